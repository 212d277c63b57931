"""Commands whose options are made from dataclass fields.

Each command has a dataclass in `options.py` that lists its options. A field's name gives the option (`max_steps` is
`--max-steps`), its type says how the value is converted, and its metadata hold the help text, the topic, the bounds and
the parser. `Recipe`, `FinetuneRecipe` and `GenerationConfig` become options in the same way, so that a field is
described once, where it is defined.

A field that is itself a dataclass (`model`, `objective`, `engine`) is not an option: KEY=VALUE after the options sets
its parts, as in `engine.weights=bf16`.

Typer splits the command line; values are converted here, so that every mistake reads alike:
"--learning-rate: 'fast' is not a number."
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from firth.cli.completion import complete_values
from firth.cli.render import render_help
from firth.core.errors import UserError, quote
from firth.generate.config import GenerationConfig
from firth.train import parse_overrides
from firth.train.recipe import BOUNDS

REQUIRED, TEXT, DATA, TRAINING, COMPUTE, RUN, OUTPUT, KEY_VALUE, BUDGET = (
    *("Required", "Reading text", "Data", "Training", "Compute", "Run", "Output", "KEY=VALUE", "Budget (one of them)"),
)
# Topic in --help of each option, by the dataclass that has it; required ones are under "Required".
TOPICS = {
    TEXT: "documents encoding keep_mail normalize min_words max_words min_characters max_characters language",
    RUN: "config resume resume_from_checkpoint allow_change rewind kills minutes all seed dry_run",
    OUTPUT: "output_dir overwrite json rows stream",
    "Suites": "suite tasks seeds",
    "Prompts": "shots template verbalizer random_labels train",
    "Tasks (each takes some of these)": "method max_seq_length stride delimiter threshold ensemble limit "
    "batch_size batch_tokens",
    "Vectors": "layer pool top similar analogy",
    "One word in several texts": "compare with_ among",
    KEY_VALUE: "overrides",
}
RECIPE_TOPICS = {
    DATA: "encoding shots max_seq_length prefix day order split memory mix_temperature mix_cap mix_weights",
    "Trained parameters": "from_scratch answer freeze unfreeze_every layer_decay class_weights layers pool bilstm crf "
    "contrastive_margin contrastive_scale lora_rank lora_alpha lora_dropout lora_targets",
    "Distillation": "teacher distill_alpha distill_temperature unlabeled augment augment_rate augment_model",
    "Preferences": "preference_loss beta label_smoothing simpo_gamma orpo_sft center_rewards_coefficient",
    "Seeds and scores": "search seeds metric baseline load_best early_stopping",
    "Generated answers": "max_target_length num_beams length_penalty",
    COMPUTE: "device bf16 fp16 fp8 compile gradient_checkpointing deterministic parallel shard_size cpu_offload",
    RUN: "eval_steps eval_rows save_steps save_total_limit async_save samples logging_steps report_to push_to_hub "
    "public seed",
}
GENERATION_TOPICS = {
    "Sampling": "temperature top_k top_p min_p repetition_penalty no_repeat_ngram_size seed",
    "Beam search": "num_beams length_penalty early_stopping num_return_sequences",
    "Length": "max_new_tokens min_new_tokens stop",
    "Structured output": "json_schema regex choices grammar",
}
# Options that only --help-all shows.
RARE_OPTIONS = (
    f"{TOPICS[TEXT]} mix mix_epochs held_out resume_from_checkpoint allow_change rewind target_text method delimiter "
    "threshold limit batch_size batch_tokens verbalizer random_labels"
)
TEXT_OPTIONS = ("text", "prompt", "stop", "compare", "among", "template", "regex", "choices")  # that a tokenizer reads
VALUE_NAMES = {int: "a whole number", float: "a number"}
NO_BREAK_SPACE = "\xa0"
METAVARS = {int: "N", float: "X", str: "TEXT"}


class Option(NamedTuple):
    """One argument or option of a command."""

    name: str
    kind: type  # of one value: str, int, float or bool
    many: bool  # can be given several times
    default: Any  # None: not passed to the command; MISSING: required
    help: str
    shown_default: str
    topic: str
    common: bool  # listed by --help, not only by --help-all
    choices: tuple[str, ...]
    metavar: str
    flag: str
    argument: bool  # given by position
    bounds: Mapping[str, float]  # "ge": at least, "gt": more than, "le": at most, "lt": less than
    parse: Callable[[str, str], Any] | None  # text and option name to the value
    parse_all: Callable[[list[str], str], Any] | None  # all texts of a repeated option

    @property
    def label(self) -> str:
        """The option as --help writes it: `--max-steps N`, `--[no-]bf16`."""
        if self.argument:
            return self.metavar
        if self.kind is bool:
            return self.flag if self.default is False else f"--[no-]{self.flag[2:]}"
        return f"{self.flag} {self.metavar}"

    @property
    def default_note(self) -> str:
        """The default as --help writes it, behind the help text; a short one is not wrapped."""
        note = f" [default: {self.shown_default}]" if self.shown_default else ""
        return note.replace(" ", NO_BREAK_SPACE).replace(NO_BREAK_SPACE, " ", 1) if len(note) < 24 else note

    def convert(self, text: str) -> Any:
        """The value that `text` stands for; a UserError that names both if there is none."""
        name = self.metavar if self.argument else self.flag
        if self.parse is not None:
            return self.parse(text, name)
        if self.choices and text not in self.choices:
            raise UserError(f"{name}: {quote(text)} is not one of {', '.join(self.choices)}.")
        try:
            value = self.kind(text)
        except ValueError:
            raise UserError(f"{name}: {quote(text)} is not {VALUE_NAMES[self.kind]}.") from None
        for bound, limit in self.bounds.items():
            holds, words = BOUNDS[bound]
            if not holds(value, limit):
                raise UserError(f"{name}: {text} is out of bounds, it must be {words} {limit:,}.")
        return value

    def resolve(self, given: Any) -> Any:
        """The value to pass to the command; None passes nothing."""
        if given is None or given == []:
            return self.default
        if self.kind is bool:
            return given
        if self.parse_all is not None:
            return self.parse_all(given, self.flag)
        return list(map(self.convert, given)) if self.many else self.convert(given)

    def parameter(self) -> inspect.Parameter:
        """What Typer needs to know."""
        kind: Any = bool if self.kind is bool else list[str] if self.many else str
        default: Any = None
        complete = complete_values(self.name, self.choices)
        if self.argument:
            info: Any = typer.Argument(metavar=self.metavar, autocompletion=complete)
        else:
            negative = f"/--no-{self.flag[2:]}" if self.kind is bool and self.default is not False else ""
            info = typer.Option(self.flag + negative, autocompletion=complete)
        if self.default is MISSING:
            default = inspect.Parameter.empty
        else:
            kind = kind | None
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, keyword, default=default, annotation=Annotated[kind, info])


def option(default: Any, help: str, metavar: str = "", **metadata: Any) -> Any:
    """A field that is an option; `...` as its default makes it required.

    A default that the value cannot tell is a sentence of the help text: "Default: the family's own." Metadata:
    `argument=True` gives the value by position, `parse(text, option)` converts it, `parse_all(texts, option)` all texts
    of a repeated option, `bounds` limit it,
    `flag` names it otherwise, `topic` lists it under another topic, `required=True` among the required options although
    it has a default, `common=False` only in --help-all.
    """
    facts = {"help": help, "metavar": metavar, **metadata}
    return field(metadata=facts) if default is ... else field(default=default, metadata=facts)


def list_options(
    options_type: type, config_type: type | None = None, common_fields: str = "", hidden_fields: Sequence[str] = ()
) -> list[Option]:
    """The options of a command: its own dataclass, then the other fields of a recipe that have a help text.

    A recipe's field has no default here: where the option is not given, it keeps the recipe's value.
    """
    rare, hints = RARE_OPTIONS.split(), get_type_hints(options_type)
    options = [make_option(f, hints[f.name], TOPICS, DATA, f.default, f.name not in rare) for f in fields(options_type)]
    options.sort(key=lambda o: o.argument and o.default is not MISSING)  # optional arguments follow required ones
    if config_type is None:
        return options
    hints, taken = get_type_hints(config_type), {*hidden_fields, *(o.name for o in options)}
    topics = GENERATION_TOPICS if config_type is GenerationConfig else RECIPE_TOPICS
    return options + [
        make_option(f, hints[f.name], topics, TRAINING, None, f.name in common_fields.split())
        for f in fields(config_type)
        if f.metadata.get("help") and f.name not in taken and not is_dataclass(hints[f.name])
    ]


def make_option(
    f: Field[Any], hint: Any, topics: Mapping[str, str], other_topic: str, default: Any, common: bool
) -> Option:
    (kind, many, choices), facts = value_type(hint), f.metadata
    own_default = "" if f.default is MISSING or f.default is False else f.default
    shown = str(facts.get("default", own_default)).removesuffix(".0")
    shown = {"None": "", "()": "", "True": "on", "False": "off"}.get(shown, shown)
    text, shown = split_default(facts["help"], shown)
    topic = facts.get("topic") or next((t for t, names in topics.items() if f.name in names.split()), other_topic)
    argument = facts.get("argument", False)
    if topic != KEY_VALUE and (argument or default is MISSING or facts.get("required")):
        topic = REQUIRED
    metavar = facts.get("metavar") or (f.name.upper() if argument else "NAME" if choices else METAVARS.get(kind, ""))
    return Option(
        *(f.name, kind, many and "parse" not in facts, default, text, shown, topic),
        *(topic == REQUIRED or facts.get("common", common), choices, metavar),
        *(facts.get("flag") or "--" + f.name.replace("_", "-"), argument),
        facts.get("bounds", {}),
        *(facts.get("parse"), facts.get("parse_all")),
    )


def split_default(text: str, default: str) -> tuple[str, str]:
    """A help text without the sentence on its default, and that default.

    >>> split_default("Set the task. Default: by its columns. One of tag, lm.", "")
    ('Set the task. One of tag, lm.', 'by its columns')
    """
    before, separator, after = text.partition(" Default: ")
    default_text, _, rest = after.partition(". ")
    return (f"{before} {rest}".rstrip(), default_text.removesuffix(".")) if separator else (text, default)


def value_type(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    """Type of one value, whether there can be several, and the allowed values of a Literal.

    >>> value_type(float | None), value_type(list[str]), value_type(Literal["a", "b"])
    ((<class 'float'>, False, ()), (<class 'str'>, True, ()), (<class 'str'>, False, ('a', 'b')))
    """
    if get_origin(hint) in (UnionType, Union):
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return str, False, get_args(hint)
    if get_origin(hint) is dict:
        return str, False, ()
    return (get_args(hint)[0], True, ()) if get_origin(hint) is not None else (hint, False, ())


def nested_fields(config_type: type) -> list[tuple[str, str]]:
    """Name and help text of each KEY=VALUE that has one: the fields of a recipe's nested dataclasses."""
    hints = get_type_hints(config_type)
    found = []
    for outer in fields(config_type):
        kind = hints[outer.name]
        for inner in fields(kind) if is_dataclass(kind) else ():
            if inner.metadata.get("help"):
                o = make_option(inner, get_type_hints(kind)[inner.name], {}, KEY_VALUE, None, False)
                choices = f" One of {', '.join(o.choices)}." if o.choices else ""
                found.append((f"{outer.name}.{inner.name}=...", o.help + choices + o.default_note))
    return found


def add_command(
    app: typer.Typer,
    options_type: type,
    config_type: type | None = None,
    common_fields: str = "",
    hidden_fields: Sequence[str] = (),
    name: str | None = None,
    examples: str = "",
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a command. It gets the options that were given, or have a default, as keyword arguments.

    Of the fields of `config_type`, --help shows `common_fields`, and --help-all all but `hidden_fields`.
    """
    options = list_options(options_type, config_type, common_fields, hidden_fields)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        description = " ".join((function.__doc__ or "").split())

        class Command(TyperCommand):
            def format_help(self, ctx: Any, formatter: Any) -> None:
                """--help, or --help-all, in place of Typer's list of all options."""
                nested = nested_fields(config_type) if config_type is not None else []
                show_all = ctx.meta.get("help_all", False)
                formatter.write(render_help(ctx.command_path, description, examples, options, nested, show_all))

            def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
                """Parse the command line; an option that would silently replace an earlier one is an error."""
                _, _, given = self.make_parser(ctx).parse_args(args=list(args))  # parameters, as often as given
                check_repeated_options(options, [parameter.name for parameter in given])
                return list(super().parse_args(ctx, args))

        def run(help_all: bool = False, **given: Any) -> None:
            values = {o.name: o.resolve(given[o.name]) for o in options}
            check_texts(values)
            if values.get("overrides") is not None:
                values["overrides"] = parse_overrides(values["overrides"])
            function(**{name: value for name, value in values.items() if value is not None})

        parameters = [o.parameter() for o in options] + [HELP_ALL]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        sentence = description.partition(". ")[0].rstrip(".") + "."  # whole: Typer would cut it at 45 characters
        app.command(name or function.__name__, cls=Command, help=description, short_help=sentence)(run)
        return function

    return decorate


def check_texts(values: Mapping[str, Any]) -> None:
    """Raise UserError for a text that is not UTF-8. A file name may be anything, but no tokenizer reads other bytes."""
    for name in TEXT_OPTIONS:
        value = values.get(name)
        for text in [value] if isinstance(value, str) else value or ():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(f"{quote(text)}: a text must be UTF-8. Use such a terminal, or a file.") from None


def check_repeated_options(options: Sequence[Option], given: Sequence[str]) -> None:
    """Raise UserError for an option with one value that is given twice. A flag without a `--no-` may be repeated."""
    for o in options:
        replaces = not (o.many or o.argument or (o.kind is bool and o.default is False))
        if replaces and given.count(o.name) > 1:
            raise UserError(f"{o.flag} is given {given.count(o.name)} times and takes one value: leave one.")


def show_help_all(ctx: typer.Context, value: bool) -> None:
    if value:
        ctx.meta["help_all"] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show_help_all)],
)
