"""The verbs on the command line: options in, a table and (with --json) one JSON object out."""

from __future__ import annotations

import inspect
import json as json_module
import logging
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from firth.core.console import format_count, say, set_quiet, show_table, stderr_console, stdout_console
from firth.core.errors import UserError
from firth.core.files import replace_nonfinite

app = typer.Typer(
    help="From your own text to a language model: tokenizer, pretraining, fine-tuning, evaluation, generation, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RUN_PANEL, DATA_PANEL, TRAINABLE_PANEL, SCORES_PANEL, TEXT_ANSWERS_PANEL, TRAINING_PANEL, READING_PANEL = (
    "This run",
    "Data",
    "What learns",
    "Seeds and scores",
    "Answers that are written",
    "Training",
    "How text is read",
)
# Under which heading of --help the options of a fine-tuning recipe stand; all others are of the training itself.
PANEL_FIELDS = {
    DATA_PANEL: ("encoding", "shots", "max_seq_length", "prefix", "day"),
    TRAINABLE_PANEL: (
        *("from_scratch", "answer", "freeze", "unfreeze_every", "layer_decay", "class_weights"),
        *("lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
    ),
    SCORES_PANEL: ("seeds", "metric", "baseline", "eval_steps", "load_best", "early_stopping"),
    TEXT_ANSWERS_PANEL: ("max_target_length", "num_beams", "length_penalty", "no_repeat_ngram_size"),
    RUN_PANEL: ("resume_from_checkpoint",),
}
DISTRIBUTED_FIELDS = ("parallel", "cpu_offload")  # options of verbs that torchrun may start
MAX_LOGIT_DIFFERENCE = 1e-3  # the largest difference of logits that rounding explains
INTERRUPTED_EXIT_CODE = 130  # the exit code after Ctrl-C
# A wrong name or a folder that is not the user's; a full disk, on the other hand, is nobody's mistake.
USER_ERROR_TYPES = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)


class GroupedHelpCommand(TyperCommand):
    """A verb whose --help puts its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or kind, []).append(record)
        last = (
            TRAINABLE_PANEL,
            SCORES_PANEL,
            TEXT_ANSWERS_PANEL,
            TRAINING_PANEL,
            "Options",
            READING_PANEL,
        )  # all others first, in the verb's own order
        for title in sorted(groups, key=lambda title: last.index(title) + 1 if title in last else 0):
            with formatter.section(title):
                formatter.write_dl(groups[title])


def format_examples(text: str) -> str:
    """Commands at the end of --help, as they are: \\b keeps the lines of a paragraph."""
    return "\b\nExamples:\n" + text.strip("\n").replace("\n\n", "\n\n\b\n")


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on the last line of stdout, and no table.")
]
EncodingOption = Annotated[str, typer.Option(help="Encoding of the file.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace what an earlier run left in the output folder.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the last whole checkpoint; start anew without one.")
]
ColumnsOption = Annotated[str, typer.Option(help="Other column names, as text=body,label=class.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Any field of the recipe: model.num_layers=6.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A preset (see `firth models`), a config.json or a checkpoint folder; for pretrain also word2vec, glove "
        "or ngram."
    ),
]
DataOption = Annotated[
    list[str],
    typer.Option(help="Shards, or text: then tokenizer and shards are made on the way. Several NAME=SHARDS are mixed."),
]
TokenizerOption = Annotated[str | None, typer.Option(help="Folder of a tokenizer; without one it is trained.")]
VocabSizeOption = Annotated[int, typer.Option(help="Of the tokenizer that is trained; 0 chooses by the text's size.")]
LowercaseOption = Annotated[bool, typer.Option("--lowercase", help="Of the tokenizer that is trained.")]
MixOption = Annotated[
    str, typer.Option(help="Several --data NAME=SHARDS: the share of each in the rows, as a=0.7,b=0.3.")
]
MixEpochsOption = Annotated[str, typer.Option(help="Or how often each is read in one epoch of the mix, as a=1,b=3.")]
HeldOutOption = Annotated[float, typer.Option(help="Share of the documents that is kept for evaluation.")]
ConfigOption = Annotated[str | None, typer.Option(help="YAML file with any of these options and fields.")]
TextsArgument = Annotated[
    list[str],
    typer.Argument(
        help="Files and folders (.txt, .jsonl, .csv, .tsv, .parquet; also .gz, .xz, .bz2, .zst), - for standard input, "
        "hf:owner/name[:config][:split][#column], or pydocs."
    ),
]


def print_json(value: Any) -> None:
    print(json_module.dumps(replace_nonfinite(value), ensure_ascii=False, allow_nan=False))


def print_result(result: Mapping[str, Any], as_json: bool, title: str) -> None:
    """The table that a verb ends with, or its JSON; of several processes one shows it."""
    if stdout_console.quiet:
        return
    if as_json:
        print_json(result)
        return
    rows = list[tuple[str, str]]()
    for name, value in result.items():
        if isinstance(value, dict) and any(isinstance(part, list) for part in value.values()):
            rows += [(f"{name}: {key}", format_value(part)) for key, part in value.items()]
        else:
            rows.append((name, format_value(value)))
    show_table(title, ["", ""], rows)


def format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {format_value(v)}" for k, v in value.items())
    return "" if value is None else str(value)


def parse_columns(text: str, option: str = "--columns") -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if bad := [name for name, equals, value in pairs if not (name and equals and value)]:
        raise UserError(f"{option}: {bad[0]!r} is not name=column. Write {option} text=sentence,label=gold.")
    return {name: value for name, _, value in pairs}


DOCUMENT_SPLIT_HELP = "'file' (whole), 'blank-line' (split), or 'auto': small files of a folder whole, all others split"
READING_OPTIONS: dict[str, tuple[type, Any, str]] = {
    "documents": (str, "auto", f"How a .txt becomes documents: {DOCUMENT_SPLIT_HELP}."),
    "columns": (str, "", "Other column names, as text=body."),
    "encoding": (str, "utf-8", "Encoding of the text files."),
    "normalize": (str, "", "nfc, nfkc, lower, or several: nfkc,lower. The text stays as it is unless said."),
    "min_words": (int, 0, "Leave out documents of fewer words; 0 for no limit."),
    "max_words": (int, 0, "Leave out documents of more words; 0 for no limit."),
    "min_characters": (int, 0, "Leave out documents of fewer characters; 0 for no limit."),
    "max_characters": (int, 0, "Leave out documents of more characters; 0 for no limit."),
    "language": (str, "", "Leave out documents in other languages: en, or de,fr. Needs py3langid."),
}


def add_reading_options(command_fn: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options that say how text is read; it gets them as `reading`."""
    hints = get_type_hints(command_fn, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command_fn).parameters.values()]

    def added(name: str) -> inspect.Parameter:
        kind, default, text = READING_OPTIONS[name]
        option = typer.Option(help=text, rich_help_panel=READING_PANEL)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )

    def command(**given: Any) -> None:
        reading = {name: given.pop(name) for name in READING_OPTIONS}
        command_fn(**given, reading={**reading, "columns": parse_columns(reading["columns"])})

    return set_command_signature(
        command, command_fn, [p for p in own if p.name != "reading"] + list(map(added, READING_OPTIONS))
    )


def set_command_signature(
    command: Callable[..., None], command_fn: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Let a function appear as a verb with these parameters."""
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__, command.__name__ = command_fn.__doc__, command_fn.__name__
    return command


def parse_bytes(text: str, option: str) -> int | None:
    """
    >>> parse_bytes("512MB", "--max-memory"), parse_bytes("1.5 g", "--max-memory"), parse_bytes("", "--max-memory")
    (512000000, 1500000000, None)
    """
    if not text:
        return None
    units = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*?)b?", text.strip().lower())
    try:
        assert match is not None
        return int(float(match[1]) * units[match[2]])
    except (AssertionError, KeyError, ValueError):
        raise UserError(f"{option} {text}: not a size. Write it as 512MB or 4GB.") from None


def parse_numbers(text: str, option: str) -> dict[str, float]:
    """
    >>> parse_numbers("a=0.7,b=0.3", "--mix")
    {'a': 0.7, 'b': 0.3}
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    try:
        return {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        raise UserError(f"{option} {text}: not numbers by name. Write {option} a=0.7,b=0.3.") from None


def collect_mix_fields(mix: str, mix_epochs: str) -> dict[str, Any]:
    """The fields of a recipe that say how much of each source is read, where they were given."""
    given = {"mix": parse_numbers(mix, "--mix"), "mix_epochs": parse_numbers(mix_epochs, "--mix-epochs")}
    return {name: value for name, value in given.items() if value}


def add_recipe_options(
    get_recipe_type: Callable[[], type], hidden_fields: tuple[str, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of a recipe, with the help that the recipe's fields carry.

    The verb gets those that were set, as `options`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        kind = get_recipe_type()
        hints = get_type_hints(verb, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in inspect.signature(verb).parameters.values()
            if p.name != "options"
        ]
        types_ = get_type_hints(kind)
        names = [f.name for f in fields(kind) if "help" in f.metadata and f.name not in hidden_fields]
        added = [_make_option(name, types_[name], next(f for f in fields(kind) if f.name == name)) for name in names]

        def command(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            resume_from = given.pop("resume_from_checkpoint", None)
            if resume_from not in (None, "auto", "true", "True"):
                raise UserError("--resume-from-checkpoint takes 'auto': the last whole checkpoint of the run.")
            if resume_from is not None:
                given["resume"] = True
            verb(**given, options={k: v for k, v in options.items() if v is not None})

        if any(p.name == "resume" for p in own):
            alias = Annotated[str | None, typer.Option(help="'auto': the same as --resume.", rich_help_panel=RUN_PANEL)]
            name, keyword = "resume_from_checkpoint", inspect.Parameter.KEYWORD_ONLY
            added.append(inspect.Parameter(name, keyword, default=None, annotation=alias))
        return set_command_signature(command, verb, own + added)

    return decorate


def _make_option(name: str, kind: Any, field: Any) -> inspect.Parameter:
    if isinstance(kind, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        kind = str
    default = field.metadata["default"]
    shown = "" if default in ("None", "") else f" [default: {default}]"
    panel = next((title for title, names in PANEL_FIELDS.items() if name in names), TRAINING_PANEL)
    option = typer.Option(help=str(field.metadata["help"]) + shown, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _pretrain_recipe_type() -> type:
    from firth.train import Recipe

    return Recipe


def _objective_names() -> str:
    from firth.objectives import OBJECTIVES

    return ", ".join(OBJECTIVES)


def _finetune_recipe_type() -> type:
    from firth.tasks import FinetuneRecipe

    return FinetuneRecipe


def _finetune_task_names() -> str:
    from firth.tasks import FINETUNE_TASKS

    return ", ".join(FINETUNE_TASKS)


def _labelled_task_names() -> str:
    from firth.text.examples import TASK_FORMATS

    return ", ".join(TASK_FORMATS)


def _evaluation_names() -> str:  # firth.evaluate has more to load, and every verb would wait for it
    return f"{_labelled_task_names()}, perplexity, pseudo-likelihood"


ObjectiveOption = Annotated[str | None, typer.Option(help=f"{_objective_names()}; the family's own unless said.")]


@app.command()
def quickstart(
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for everything it makes; the next free quickstart-N unless said.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="About how long each architecture may take.")] = 5.0,
    all: Annotated[bool, typer.Option("--all", help="Encoder, decoder and encoder-decoder, side by side.")] = False,
    seed: int = 0,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """The whole way on the built-in corpus: tokenizer, pretraining, fine-tuning against training from scratch."""
    from firth import api

    result = api.quickstart(output_dir, minutes=minutes, all=all, seed=seed, resume=resume, overwrite=overwrite)
    if json:
        print_json(result)


CHECK_EXAMPLES = format_examples("""
  # what is in these books, and which vocabulary, row length and model size suit them?
  firth check books/

  # does the tokenizer of a checkpoint fit this text: keep, extend or retrain it?
  firth check notes.jsonl --tokenizer bert-base-uncased/

  # the text alone, in seconds; or two kinds at sizes of your own
  firth check books/ --kinds none
  firth check books/ --kinds byte-bpe,unigram --vocab-sizes 8000,16000

  # does the training text contain what the model will be tested on?
  firth check books/ --labelled test.jsonl --kinds none
  firth check books/ --labelled test.csv --task pair --labelled-columns text_a=premise,text_b=hypothesis
""")


@app.command(cls=GroupedHelpCommand, epilog=CHECK_EXAMPLES)
@add_reading_options
def check(
    texts: TextsArgument,
    reading: dict[str, Any],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of a tokenizer or a checkpoint to judge: keep, extend or retrain?")
    ] = None,
    output_dir: Annotated[str, typer.Option(help="Folder for check.html.")] = ".",
    kinds: Annotated[
        str, typer.Option(help="Kinds of tokenizer to train on a sample and compare; 'none' looks at the text alone.")
    ] = "byte-bpe,wordpiece,unigram",
    vocab_sizes: Annotated[
        str, typer.Option(help="Their sizes, as 4096,8192; three around what suits the text unless said.")
    ] = "",
    sample: Annotated[int, typer.Option(help="Characters of the text that tokenizers are compared on.")] = 2_000_000,
    lowercase: LowercaseOption = False,
    labelled: Annotated[
        str | None,
        typer.Option(help="A labelled file: how many of its examples stand in the text, word for word or nearly?"),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help=f"Of --labelled: {_labelled_task_names()}; told by its columns unless said.")
    ] = None,
    labelled_columns: Annotated[
        str, typer.Option(help="Other column names of --labelled, as text=sentence,label=gold.")
    ] = "",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a check.html that `firth check` did not write.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a text, and how tokenizers split it: duplicates, dirt, vocabulary, row length, model size."""
    from firth import api

    result = api.check(
        texts,
        tokenizer,
        output_dir,
        [] if kinds == "none" else [kind.strip() for kind in kinds.split(",")],
        parse_vocab_sizes(vocab_sizes),
        sample,
        lowercase,
        overwrite,
        printed=not json,
        labelled=labelled,
        task=task,
        labelled_columns=parse_columns(labelled_columns, "--labelled-columns"),
        **reading,
    )
    if json:
        print_json(result)
    else:
        say(f"With plots, as a page: {result['page']}")


def parse_vocab_sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise UserError(f"--vocab-sizes: {text!r} is no list of sizes. Name whole numbers, as 4096,8192.") from None


@app.command(cls=GroupedHelpCommand)
@add_reading_options
def tokenizer(
    texts: TextsArgument,
    output_dir: Annotated[str, typer.Option(help="Folder for the tokenizer.")],
    reading: dict[str, Any],
    kind: Annotated[
        str | None,
        typer.Option(
            help="wordpiece (BERT), bpe (GPT), byte-bpe (GPT-2, RoBERTa, Llama), unigram (T5, XLNet, XLM-R), "
            "char (ELMo) or word (word2vec). [default: wordpiece]"
        ),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Be like the tokenizer of this folder: same kind, special tokens and treatment of text.",
        ),
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary; 0 chooses by the size of the text.")] = 0,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Make everything lower case.")] = False,
    pattern: Annotated[
        str, typer.Option(help="Where byte-bpe cuts text first: gpt2, or llama3 (numbers in groups of three).")
    ] = "gpt2",
    byte_fallback: Annotated[
        bool,
        typer.Option("--byte-fallback", help="Of unigram: spell in bytes what has no piece, so that nothing is lost."),
    ] = False,
    max_memory: Annotated[
        str, typer.Option(help="Learn from a sample where all of the text would take more, as 512MB or 4GB.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="For a model that reads every text from its end to its begin (ULMFiT).")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Train a tokenizer on your text."""
    from firth import api

    if from_ is not None and (kind is not None or lowercase or byte_fallback or pattern != "gpt2"):
        raise UserError("--from takes everything but the size from that tokenizer: leave out --kind, --lowercase, ...")
    made: dict[str, Any] = {"like": from_, "pattern": pattern, "byte_fallback": byte_fallback, "seed": seed}
    made["reverse"] = reverse
    memory = parse_bytes(max_memory, "--max-memory")
    result = api.tokenizer(
        texts, output_dir, kind or "wordpiece", vocab_size, lowercase, overwrite, max_memory=memory, **made, **reading
    )
    print_result(result, json, "Tokenizer")


@app.command(cls=GroupedHelpCommand)
@add_reading_options
def prepare(
    texts: TextsArgument,
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer or a checkpoint.")],
    output_dir: Annotated[str, typer.Option(help="Folder for the shards.")],
    reading: dict[str, Any],
    held_out: Annotated[float, typer.Option(help="Share of the documents that is kept for evaluation.")] = 0.05,
    salient: Annotated[
        str | None,
        typer.Option(help="Mark salient spans: 'default' (names, numbers, dates), or your package.module:function."),
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that tokenise; 0 takes as many as there are cores. The result is the same.")
    ] = 0,
    max_memory: Annotated[
        str, typer.Option(help="What all processes together may take, as 512MB or 4GB; no bound unless said.")
    ] = "",
    dedup: Annotated[
        str,
        typer.Option(
            help="Drop documents that were there before: none, exact (the same text), near (also nearly the same)."
        ),
    ] = "exact",
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Turn text into token shards, once; any number of runs can read them."""
    from firth import api

    memory = parse_bytes(max_memory, "--max-memory")
    doing: dict[str, Any] = {"workers": workers, "max_memory": memory, "dedup": dedup}
    result = api.prepare(texts, tokenizer, output_dir, held_out, resume, overwrite, salient, **doing, **reading)
    print_result(result, json, "Shards")


@app.command(cls=GroupedHelpCommand)
@add_recipe_options(_pretrain_recipe_type, hidden_fields=("output_dir", "data", "tokenizer", "checkpoint"))
@add_reading_options
def pretrain(
    model: ModelArgument,
    data: DataOption,
    output_dir: Annotated[str, typer.Option(help="Folder of the run.")],
    options: dict[str, Any],
    reading: dict[str, Any],
    overrides: OverridesArgument = None,
    tokenizer: TokenizerOption = None,
    objective: ObjectiveOption = None,
    vocab_size: VocabSizeOption = 0,
    lowercase: LowercaseOption = False,
    held_out: HeldOutOption = 0.05,
    mix: MixOption = "",
    mix_epochs: MixEpochsOption = "",
    config: ConfigOption = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Go on although the recipe or the shards have changed; says what.")
    ] = False,
    rewind: Annotated[
        int | None,
        typer.Option(
            help="After steps that did harm: go back to a checkpoint at least so many steps before the first of them, "
            "and pass over the text from there to them. Resumes."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Pretrain a model on shards or on your text."""
    from firth import api
    from firth.train import parse_overrides

    result = api.pretrain(
        model,
        data,
        output_dir,
        tokenizer,
        objective,
        vocab_size,
        lowercase,
        held_out,
        config,
        parse_overrides(overrides or []),
        resume,
        overwrite,
        allow_change,
        rewind,
        **reading,
        **options,
        **collect_mix_fields(mix, mix_epochs),
    )
    print_result(result, json, "Pretraining")


@app.command("prove-resume", cls=GroupedHelpCommand)
@add_recipe_options(
    _pretrain_recipe_type,
    hidden_fields=("output_dir", "data", "tokenizer", "checkpoint", "minutes", *DISTRIBUTED_FIELDS),
)
@add_reading_options
def prove_resume(
    model: ModelArgument,
    data: DataOption,
    output_dir: Annotated[str, typer.Option(help="Folder for both runs: straight/ and killed/.")],
    options: dict[str, Any],
    reading: dict[str, Any],
    overrides: OverridesArgument = None,
    kills: Annotated[int, typer.Option(help="How often the second run is killed, half of them inside a write.")] = 10,
    tokenizer: TokenizerOption = None,
    objective: ObjectiveOption = None,
    vocab_size: VocabSizeOption = 0,
    lowercase: LowercaseOption = False,
    held_out: HeldOutOption = 0.05,
    mix: MixOption = "",
    mix_epochs: MixEpochsOption = "",
    config: ConfigOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Kill a real run again and again, resume it, and show that it is the run that nobody disturbed, bit for bit.

    Takes the options of `pretrain`; unless said, 10 steps for each kill and a checkpoint every 5.
    """
    from firth import api
    from firth.train import parse_overrides

    result = api.prove_resume(
        model,
        data,
        output_dir,
        kills,
        tokenizer,
        objective,
        vocab_size,
        lowercase,
        held_out,
        config,
        parse_overrides(overrides or []),
        overwrite,
        **reading,
        **options,
        **collect_mix_fields(mix, mix_epochs),
    )
    print_result(result, json, "A killed run against an undisturbed one")
    if not result["equal"]:
        say("The two runs differ.")
        raise typer.Exit(1)


@app.command(cls=GroupedHelpCommand)
@add_recipe_options(_pretrain_recipe_type, hidden_fields=("output_dir", "data", "tokenizer", "checkpoint"))
@add_reading_options
def show(
    model: ModelArgument,
    data: Annotated[list[str], typer.Option(help="Shards, or text: then tokenizer and shards are made and removed.")],
    options: dict[str, Any],
    reading: dict[str, Any],
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option(help="How many rows to show.")] = 4,
    tokenizer: TokenizerOption = None,
    objective: ObjectiveOption = None,
    output_dir: Annotated[str, typer.Option(help="Folder for show.html.")] = ".",
    vocab_size: VocabSizeOption = 0,
    lowercase: LowercaseOption = False,
    held_out: HeldOutOption = 0.05,
    mix: MixOption = "",
    mix_epochs: MixEpochsOption = "",
    config: ConfigOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a show.html that `firth show` did not write.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show exactly what the model will read and be asked, before any training. Takes the options of `pretrain`."""
    from firth import api
    from firth.train import parse_overrides

    result = api.show(
        model,
        data,
        rows,
        tokenizer,
        objective,
        vocab_size,
        lowercase,
        held_out,
        config,
        parse_overrides(overrides or []),
        output_dir,
        overwrite,
        printed=not json,
        **reading,
        **options,
        **collect_mix_fields(mix, mix_epochs),
    )
    if json:
        print_json(result)
    else:
        say(f"The same as a page: {result['page']}")


FINETUNE_EXAMPLES = format_examples("""
  # topics of texts: a file with the columns text and label; three seeds, mean and deviation
  firth finetune run/final --task classify --train train.csv --dev dev.csv --output-dir topics

  # what did pretraining bring? The same from random weights, and whether the difference is chance
  firth finetune run/final ... --output-dir scratch --from-scratch
  firth finetune run/final ... --output-dir topics2 --baseline scratch

  # few labels: 64 examples, drawn anew by each of 5 seeds; the lower layers learn more slowly
  firth finetune run/final ... --shots 64 --seeds 5 --layer-decay 0.9

  # a large model: LoRA learns two small matrices beside each large one (and writes adapter/ for peft)
  firth finetune llama/ ... --lora-rank 8 --learning-rate 2e-4

  # other column names; names in sentences; translation with a T5
  firth finetune run/final --task classify --columns text=review,label=stars ...
  firth finetune run/final --task tag --train train.conll --dev dev.conll --output-dir names
  firth finetune t5/final --task text-to-text --train en-de.jsonl --dev en-de-dev.jsonl --output-dir de

  # it was stopped: go on
  firth finetune run/final --task classify ... --output-dir topics --resume
""")


@app.command(cls=GroupedHelpCommand, epilog=FINETUNE_EXAMPLES)
@add_recipe_options(
    _finetune_recipe_type,
    hidden_fields=("output_dir", "checkpoint", "task", "train", "dev", "columns", *DISTRIBUTED_FIELDS),
)
def finetune(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, ours or a published one.")],
    *,
    task: Annotated[str, typer.Option(help=f"{_finetune_task_names()}.", rich_help_panel=DATA_PANEL)] = "",
    train: Annotated[
        str,
        typer.Option(
            help="Labelled file to learn from (.jsonl, .json, .tsv, .csv, .conll, for lm also .txt; plain or "
            "compressed), or pydocs.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = "",
    dev: Annotated[str, typer.Option(help="Labelled file to score on, or pydocs.", rich_help_panel=DATA_PANEL)] = "",
    output_dir: Annotated[str, typer.Option(help="Folder of the run.", rich_help_panel=RUN_PANEL)],
    options: dict[str, Any],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Any field of the recipe: weight_decay=0.1.")
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Other column names, as text=body,label=class.", rich_help_panel=DATA_PANEL)
    ] = "",
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A published one: ulmfit, dai-le or elmo; the model's own unless said.", rich_help_panel=RUN_PANEL
        ),
    ] = None,
    target_text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text like the task's: the checkpoint first goes on learning its language, in OUTPUT_DIR-target.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="YAML file with any of these options and fields, such as the recipe.yaml of another run.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the last whole checkpoint; start anew without one.", rich_help_panel=RUN_PANEL
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace what an earlier run left in the output folder.", rich_help_panel=RUN_PANEL
        ),
    ] = False,
    allow_change: Annotated[
        bool,
        typer.Option(
            "--allow-change",
            help="Go on although the recipe or the examples to learn from have changed; says what.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = False,
    rewind: Annotated[
        int | None,
        typer.Option(
            help="After steps that did harm: let the seed that was under way go back to a checkpoint at least so many "
            "steps before the first of them, and pass over the examples from there to them. Resumes.",
            rich_help_panel=RUN_PANEL,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Fine-tune a checkpoint on a task, several times: the mean, the deviation, and the best model.

    The run's folder gets final/ (the model, with a model card), results.json, predictions.jsonl (of the best seed, on
    dev), report.html, recipe.yaml and seed-N/.
    """
    from firth import api
    from firth.evaluate import seed_table
    from firth.train import parse_overrides
    from firth.train.recipe import read_yaml_mapping

    changes = parse_overrides(overrides or [])
    known, needed = read_yaml_mapping(Path(config)) if config else {}, {"task": task, "train": train, "dev": dev}
    needed = {name: given or str(known.get(name) or "") for name, given in needed.items()}
    if missing := next((name for name, given in needed.items() if not given), None):
        raise UserError(f"Missing option '--{missing}': give it, or a --config that has it.")
    task, train, dev = needed.values()
    result = api.finetune(
        *(checkpoint, task, train, dev, output_dir, config, changes, resume, overwrite, parse_columns(columns)),
        recipe=recipe,
        target_text=target_text or (),
        allow_change=allow_change,
        rewind=rewind,
        **options,
    )
    if json:
        print_json(result)
        return
    names, rows = seed_table(result)
    show_table(f"{task} on {dev}", names, [[format_value(value) for value in row] for row in rows])
    say(f"{output_dir}/final is the model, {result['report']} the whole story.")


EVALUATE_EXAMPLES = format_examples("""
  # a fine-tuned checkpoint on a file that it has not seen
  firth evaluate topics/final --data test.csv

  # any language model, without fine-tuning: how well it foresees text, grammar, facts, endings
  firth evaluate run/final --task perplexity --data books/
  firth evaluate run/final --task minimal-pairs --data blimp.jsonl
  firth evaluate run/final --task cloze --data lambada.jsonl
  firth evaluate run/final --task choice --data arc.jsonl --delimiter "\\nAnswer: "

  # vectors: same sense or not, similar words (also of a file of word vectors), similar texts
  firth evaluate run/final --task word-in-context --data dev.jsonl --train train.jsonl --layer -2
  firth evaluate vectors.txt --task word-similarity --data simlex.tsv
  firth evaluate run/final --task embed --data stsb.jsonl

  # a suite: fine-tunes for each task with 3 seeds, scores, averages; KEY=VALUE is for the fine-tuning
  firth evaluate run/final --suite glue --data GLUE/ --tasks cola,rte --seeds 3 num_train_epochs=3
  firth evaluate run/final --suite mine.yaml --resume
""")
SUITE_PANEL, EVALUATION_PANEL = "Suites", "How it is asked (each task takes some of these)"


@app.command(cls=GroupedHelpCommand, epilog=EVALUATE_EXAMPLES)
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder; for words also a file of word vectors.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="With --suite: any field of the fine-tuning recipe."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help=f"{_evaluation_names()}; what the checkpoint was fine-tuned for unless said.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Labelled file, or pydocs; for perplexity text files and folders; for a suite its folder.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Other column names, as text=body,label=class.", rich_help_panel=DATA_PANEL)
    ] = "",
    encoding: Annotated[str, typer.Option(help="Encoding of the files.", rich_help_panel=DATA_PANEL)] = "utf-8",
    documents: Annotated[
        str,
        typer.Option(help="How a .txt becomes documents: 'file', 'blank-line' or 'auto'.", rich_help_panel=DATA_PANEL),
    ] = "auto",
    suite: Annotated[
        str | None,
        typer.Option(help="glue, superglue, or a .yaml file that lists tasks.", rich_help_panel=SUITE_PANEL),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Only these of the suite, as cola,rte.", rich_help_panel=SUITE_PANEL)] = "",
    seeds: Annotated[
        int | None,
        typer.Option(help="How often to fine-tune for each task. [default: 3]", rich_help_panel=SUITE_PANEL),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file with fields of the fine-tuning recipe.", rich_help_panel=SUITE_PANEL)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a suite: tasks that are done are kept.", rich_help_panel=SUITE_PANEL),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="Likelihood: left-to-right (decoder); pseudo or within-word-l2r (encoder); span or continuation "
            "(encoder-decoder). The first of these unless said.",
            rich_help_panel=EVALUATION_PANEL,
        ),
    ] = None,
    max_seq_length: Annotated[
        int | None,
        typer.Option(help="Tokens read at once; what the model can unless said.", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Likelihood: windows of a long text are so many tokens apart.", rich_help_panel=EVALUATION_PANEL
        ),
    ] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(
            help="choice: what stands between context and ending. [default: a space]", rich_help_panel=EVALUATION_PANEL
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="word-in-context: file on which the threshold is found.", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="word-in-context: the cosine from which on it is the same sense.", rich_help_panel=EVALUATION_PANEL
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Vectors: of this layer; 0 is the embedding, -1 the last.", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="embed: first, mean, last or auto.", rich_help_panel=EVALUATION_PANEL)
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Words: look among so many of the commonest.", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    ensemble: Annotated[
        list[str] | None,
        typer.Option(
            help="Another checkpoint that was tuned for the same labels: the mean of their probabilities answers.",
            rich_help_panel=EVALUATION_PANEL,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Examples at once, of a fine-tuned model. [default: 32]", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens at once, in all other tasks. [default: 8192]", rich_help_panel=EVALUATION_PANEL),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for predictions; beside the checkpoint unless said.")
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Score a checkpoint: on a file, or on a suite of tasks.

    Writes results.json, predictions.jsonl and report.html. A file without answers gives predictions alone.
    """
    from firth import api
    from firth.train import parse_overrides

    if suite is not None:
        if task is not None:
            raise UserError("--suite has tasks of its own: leave --task out, or choose some with --tasks.")
        if data and len(data) > 1:
            raise UserError(f"--suite takes one folder as --data; {len(data)} were given.")
        read: dict[str, Any] = {"encoding": encoding} if encoding != "utf-8" else {}
        asked = {"max_seq_length": max_seq_length, **read}
        result = api.evaluate_suite(
            checkpoint,
            suite,
            data[0] if data else None,
            output_dir,
            tuple(filter(None, tasks.split(","))),
            3 if seeds is None else seeds,
            config,
            parse_overrides(overrides or []),
            resume,
            overwrite,
            **asked,
        )
        print_suite(result, json)
        return
    only_suites = {"--tasks": tasks, "--seeds": seeds, "--config": config, "--resume": resume}
    if given := [name for name, value in {**only_suites, "KEY=VALUE": overrides}.items() if value]:
        hint = f" For more than one file, repeat --data: --data {overrides[0]}." if overrides else ""
        raise UserError(f"{given[0]} is for --suite.{hint}")
    settings = {
        "method": method,
        "max_seq_length": max_seq_length,
        "stride": stride,
        "delimiter": None if delimiter is None else delimiter.replace("\\n", "\n").replace("\\t", "\t"),
        "train": train,
        "threshold": threshold,
        "layer": layer,
        "pool": pool,
        "limit": limit,
        "ensemble": ensemble or None,
        "batch_tokens": batch_tokens,
        **({} if batch_size is None else {"batch_size": batch_size}),
    }
    result = api.evaluate(
        checkpoint, task, data, output_dir, parse_columns(columns), overwrite, encoding, documents, **settings
    )
    print_evaluation(result, json)


def print_evaluation(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(result)
        return
    rows = [(name, format_value(value)) for name, value in result["metrics"].items()]
    groups = [(f"  {name}", format_value(value)) for name, value in result.get("by_group", {}).items()]
    if rows:
        name = ", ".join(result["data"]) if isinstance(result["data"], list) else result["data"]
        title = f"{result['task']} on {name}: {format_count(result['examples'], 'example')}"
        show_table(title, ["metric", "score"], rows + groups)
    say(f"{result['predictions']} has every answer, {result['report']} the whole story.")


def print_suite(result: Mapping[str, Any], as_json: bool) -> None:
    from firth.evaluate import suite_table

    if as_json:
        print_json(result)
        return
    rows = [[format_value(value) for value in row] for row in suite_table(result)]
    show_table(f"{result['suite']}: {result['checkpoint']}", ["task", "metrics", "how", "score", "deviation"], rows)
    say(f"{result['report']} has the whole story.")


GENERATE_EXAMPLES = format_examples("""
  firth generate run/final "Once upon a time"                                # the likeliest words
  firth generate run/final "Once upon a time" --temperature 0.8 --top-p 0.95 # a draw; --seed 1 for another one
  firth generate run/final "The" --repetition-penalty 1.3 --stop "." --stop "?"
  firth generate de/final "A man sleeps." --num-beams 4                      # an encoder-decoder answers
  firth generate run/final --prompts prompts.txt --json                      # a prompt on each line
  cat letter.txt | firth generate summaries/final                            # all of it is one prompt
""")
SAMPLING_PANEL, SEARCH_PANEL, STOPPING_PANEL = "Which word comes next", "Search", "Where a text ends"


@app.command(cls=GroupedHelpCommand, epilog=GENERATE_EXAMPLES)
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A decoder or an encoder-decoder.")],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="What the text begins with, or what the encoder reads; from stdin unless said."),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="File with a prompt on each line; .jsonl: in the column prompt, source or text.")
    ] = None,
    encoding: EncodingOption = "utf-8",
    temperature: Annotated[
        float,
        typer.Option(help="0 takes the likeliest word each time; 1 draws as learned.", rich_help_panel=SAMPLING_PANEL),
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Draw among so many of the likeliest; 0 among all.", rich_help_panel=SAMPLING_PANEL)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Draw among the likeliest that together have this share.", rich_help_panel=SAMPLING_PANEL),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Draw among those that have at least this share of the likeliest one's probability.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: what was said becomes less likely.", rich_help_panel=SAMPLING_PANEL)
    ] = 1.0,
    no_repeat_ngram_size: Annotated[
        int, typer.Option(help="Never write so many tokens in a row twice; 0 may.", rich_help_panel=SAMPLING_PANEL)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Decides what is drawn.", rich_help_panel=SAMPLING_PANEL)] = 0,
    num_beams: Annotated[
        int | None,
        typer.Option(
            help="Keep so many unfinished texts and look for the likeliest; 1 unless fine-tuned with others.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="A text's score is its log-probability over its length to this power: more favours long ones; 1 "
            "unless fine-tuned with another.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = None,
    num_return_sequences: Annotated[int, typer.Option(help="Texts for each prompt.", rich_help_panel=SEARCH_PANEL)] = 1,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="At most so many tokens are written; 50 unless fine-tuned for longer or shorter answers.",
            rich_help_panel=STOPPING_PANEL,
        ),
    ] = None,
    min_new_tokens: Annotated[int, typer.Option(help="At least so many.", rich_help_panel=STOPPING_PANEL)] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; can be given several times.", rich_help_panel=STOPPING_PANEL),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(help="The prompt is a user's message; by itself where dialogues were fine-tuned on (--task lm)."),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option(help="Show words as they come; by itself for one text on a terminal.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Continue a prompt (decoder), or answer it (encoder-decoder, and what was fine-tuned to answer)."""
    from firth import api
    from firth.generate import stream_text
    from firth.static.ngram import is_ngram

    as_tuned = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "length_penalty": length_penalty}
    settings: dict[str, Any] = {name: value for name, value in as_tuned.items() if value is not None} | {
        "min_new_tokens": min_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "num_return_sequences": num_return_sequences,
        "stop": [text.replace("\\n", "\n").replace("\\t", "\t") for text in stop or ()],
        "seed": seed,
    }
    given = collect_input_texts(prompt, prompts, "--prompts", ("prompt", "source", "text"), encoding)
    if stream and json:
        raise UserError("--stream shows words as they come, and --json one object at the end: choose one.")
    if is_ngram(checkpoint):
        print_generated_texts(api.generate_with_ngram(checkpoint, given, settings), json)
        return
    model, asked, usual = api.load_for_generation(checkpoint, given, chat)
    settings = usual | settings
    one = len(given) == 1 and settings.get("num_beams", 1) == num_return_sequences == 1
    if stream if stream is not None else one and not json and sys.stdout.isatty():
        if len(given) > 1:
            raise UserError(f"--stream shows one text as it is written, and there are {len(given)} prompts.")
        pieces = stream_text(model, asked[0], **settings)
        first = next(pieces, "")  # what cannot be done is refused before anything is shown
        begun = isinstance(asked[0], str) and model.config.architecture == "decoder"
        print(given[0] if begun else "", end=first, flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    print_generated_texts(api.generate_in_batches(model, asked, settings), json)


def print_generated_texts(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"text": found[0]["text"], "results": found})
        return
    for number, result in enumerate(found):
        if number:
            print()
        print(result["text"])


def collect_input_texts(
    arguments: list[str] | None, file: str | None, option: str, columns: tuple[str, ...], encoding: str
) -> list[str]:
    """Texts from the command line, from a file (one on each line, or in a column of .jsonl), or all of stdin."""
    if arguments and file:
        raise UserError(f"Texts are given both as arguments and in {option} {file}: choose one.")
    if file:
        return read_input_file(file, columns, encoding)
    if arguments and arguments != ["-"]:
        return arguments
    if sys.stdin.isatty():
        if option == "--texts":
            raise UserError("Which texts? Name them as arguments, with --texts FILE, or on stdin.")
        return [""]  # from nothing: the model begins by itself
    return [sys.stdin.read().removesuffix("\n")]


def read_input_file(file: str, columns: tuple[str, ...], encoding: str) -> list[str]:
    from firth.text.open_text import check_encoding, read_lines
    from firth.text.records import data_extension, read_jsonl_records

    path, encoding = Path(file), check_encoding(encoding)
    if data_extension(path) != ".jsonl":
        texts = [line.rstrip("\r\n") for line in read_lines(path, encoding)]
    else:
        texts = []
        for number, record in read_jsonl_records(path, encoding):
            column = next((name for name in columns if isinstance(record.get(name), str)), None)
            if column is None:
                raise UserError(f"{file}:{number}: none of the columns {', '.join(columns)} holds a text.")
            texts.append(record[column])
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{file}: no text in this file.")
    return texts


@app.command()
def fill(
    checkpoint: Annotated[str, typer.Argument(help="An encoder, or an encoder-decoder.")],
    text: Annotated[str, typer.Argument(help="A text with blanks, written [MASK] or ___.")],
    top: Annotated[int, typer.Option(help="How many guesses for each blank.")] = 5,
    json: JsonOption = False,
) -> None:
    """Fill the blanks of a text."""
    from firth import api

    blanks = api.fill(checkpoint, text, top)
    if json:
        found = [{"guesses": [{"text": g.text, "probability": g.probability} for g in b.guesses]} for b in blanks]
        print_json({"text": text, "blanks": found})
        return
    rows = [(i + 1, g.text, f"{100 * g.probability:.1f}%") for i, b in enumerate(blanks) for g in b.guesses]
    show_table(text, ["blank", "guess", "probability"], rows)


COMPARE_PANEL = "One word in several texts"
EMBED_EXAMPLES = format_examples("""
  firth embed run/final "The cat sleeps." "A dog barks." --similar    # cosines of each with each
  firth embed run/final --texts sentences.txt --output-dir vectors.npy --normalize
  firth embed run/final "The cat sleeps." --pool first --layer 2 --json
  firth embed words/final --similar king                              # nearest words, also of a file: vectors.txt
  firth embed words/final --analogy man woman king

  # is bat the same word in both? One vector from word2vec, one for each place from ELMo and BERT; nearest words there
  firth embed words/final --with elmo/final --with bert/final --compare bat --among wiki.txt \\
      "The bat flew out of the cave." "He swung the bat and hit the ball."
""")


@app.command(cls=GroupedHelpCommand, epilog=EMBED_EXAMPLES)
def embed(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder.")],
    text: Annotated[list[str] | None, typer.Argument(help="Texts; from stdin unless said.")] = None,
    texts: Annotated[
        str | None, typer.Option(help="File with a text on each line; .jsonl: in the column text.")
    ] = None,
    encoding: EncodingOption = "utf-8",
    output_dir: Annotated[
        str | None, typer.Option(help="FILE.npy to write, or a folder for vectors.npy: (texts, width) float32.")
    ] = None,
    similar: Annotated[
        bool,
        typer.Option(
            "--similar", help="Show the cosine of each text with each; for one word, the words nearest to it."
        ),
    ] = False,
    analogy: Annotated[
        bool, typer.Option("--analogy", help="Of three words a b c: which is to c as b is to a.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="Compare this word where it stands in two or more of the texts: the cosines of its vectors there.",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="CHECKPOINT",
            help="Another checkpoint, or a file of word vectors, beside the first; can be given several times.",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    among: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Files of text: which of their words, where they stand, have the nearest vectors? The first 20,000 "
            "words are read.",
            rich_help_panel=COMPARE_PANEL,
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many words, with --similar, --analogy or --among.")] = 10,
    pool: Annotated[
        str,
        typer.Option(help="first, mean or last token; auto: what the checkpoint was fine-tuned for, else mean."),
    ] = "auto",
    layer: Annotated[int, typer.Option(help="0 is the embedding, -1 the last layer.")] = -1,
    normalize: Annotated[bool, typer.Option("--normalize", help="Make every vector 1 long.")] = False,
    max_seq_length: Annotated[int, typer.Option(help="Cut longer texts; 0: what the model can read.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Turn texts into vectors."""
    import numpy as np

    from firth import api
    from firth.core.files import check_writable

    given = collect_input_texts(text, texts, "--texts", ("text",), encoding)
    if compare is not None:
        if similar or analogy or output_dir is not None:
            raise UserError("--compare is a question of its own: leave --similar, --analogy and --output-dir out.")
        print_word_comparison(api.compare(compare, given, [checkpoint, *(with_ or ())], layer, among or (), top), json)
        return
    if with_ or among:
        raise UserError("--with and --among are for --compare WORD.")
    if analogy and len(given) != 3:
        raise UserError(f"--analogy needs three words a b c, and {format_count(len(given), 'was', 'were')} given.")
    if analogy or (similar and len(given) == 1):
        towards, away = (given[1:], given[:1]) if analogy else (given, [])
        print_similar_words(given, api.similar(checkpoint, towards, away, top), json)
        return
    place = None
    if output_dir is not None:
        place = Path(output_dir) if output_dir.endswith(".npy") else Path(output_dir) / "vectors.npy"
        check_writable(place.parent)
        if place.exists() and not overwrite:
            raise UserError(f"{place} exists already. Name another --output-dir, or pass --overwrite.")
    vectors = api.embed(checkpoint, given, pool, layer, normalize, max_seq_length)  # type: ignore[arg-type]
    result: dict[str, Any] = {"texts": len(given), "width": vectors.shape[1]}
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        np.save(place, vectors, allow_pickle=False)
        result["output"] = str(place)
    else:
        result["vectors"] = vectors.tolist()
    if similar:
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        result["similarity"] = (unit @ unit.T).tolist()
    if json:
        print_json(result)
        return
    names = [one if len(one) <= 40 else one[:37] + "..." for one in given]
    if similar:
        numbered = [f"{i}. {name}" for i, name in enumerate(names, 1)]
        cosines = [[f"{c:.3f}" for c in row] for row in result["similarity"]]
        rows = [(name, *row) for name, row in zip(numbered, cosines, strict=True)]
        show_table("Cosines", ["text", *map(str, range(1, len(names) + 1))], rows)
    elif place is None:
        rows = [
            (name, f"{np.linalg.norm(v):.3f}", " ".join(f"{x:+.3f}" for x in v[:6]) + " ...")
            for name, v in zip(names, vectors, strict=True)
        ]
        show_table(f"Vectors of {vectors.shape[1]} numbers", ["text", "length", "first numbers"], rows)
    if place is not None:
        say(f"{place}: {format_count(len(given), 'vector')} of {vectors.shape[1]} numbers.")


def print_word_comparison(result: Mapping[str, Any], as_json: bool) -> None:
    from firth.evaluate.context import Occurrence

    if as_json:
        print_json(result)
        return
    places = [Occurrence(result["texts"][o["text"]], o["begin"], o["end"]) for o in result["occurrences"]]
    names = [short_checkpoint_name(one["checkpoint"]) for one in result["checkpoints"]]
    kinds = [(name, one["kind"], one["layer"]) for name, one in zip(names, result["checkpoints"], strict=True)]
    show_table("Where it stands", ["", "text"], [(i, place.excerpt(60)) for i, place in enumerate(places, 1)])
    show_table("Vectors", ["", "a word's vector is", "layer"], kinds)
    pairs = [(i, j) for i in range(len(places)) for j in range(i + 1, len(places))]
    rows = [
        (f"{i + 1} and {j + 1}", *(f"{one['similarity'][i][j]:.3f}" for one in result["checkpoints"])) for i, j in pairs
    ]
    means = [one["any_two_words"] for one in result["checkpoints"]]
    usual = ["" if mean is None else f"{mean:.3f}" for mean in means]
    show_table(f"Cosines of {result['word']}", ["", *names], [*rows, ("any two words", *usual)])
    for name, one in zip(names, result["checkpoints"], strict=True):
        near = [
            (f"{i}. {places[i - 1].excerpt(16)}" if k == 0 else "", n["word"], f"{n['similarity']:.3f}", n["where"])
            for i, some in enumerate(one["neighbours"], 1)
            for k, n in enumerate(some)
        ]
        if near:
            show_table(f"Nearest by {name}", ["", "word", "cosine", "where"], near)


def short_checkpoint_name(name: str) -> str:
    """
    >>> short_checkpoint_name("runs/elmo/final"), short_checkpoint_name("vectors.txt")
    ('elmo', 'vectors.txt')
    """
    path = Path(name)
    return path.parent.name if path.name == "final" and path.parent.name else path.name or name


def print_similar_words(words: list[str], found: list[Any], as_json: bool) -> None:
    if as_json:
        plain = [{"word": one.word, "similarity": one.similarity} for one in found]
        print_json({"words": words, "similar": plain})
        return
    title = f"{words[0]} : {words[1]} = {words[2]} : ..." if len(words) == 3 else f"Nearest to {words[0]}"
    show_table(title, ["word", "cosine"], [(one.word, f"{one.similarity:.3f}") for one in found])


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder; for vectors also a file of them.")],
    output_dir: Annotated[str, typer.Option(help="Folder to write.")],
    format: Annotated[
        str,
        typer.Option(
            help="huggingface; word2vec or glove: the vectors of words, as gensim reads them; firth: these, for "
            "example of a file that was downloaded, as a checkpoint for finetune."
        ),
    ] = "huggingface",
    check: Annotated[bool, typer.Option("--check", help="Open it in transformers and compare the logits.")] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Write a plain Hugging Face folder, or the vectors of words."""
    from firth import api

    result = api.export(checkpoint, output_dir, check, overwrite, format)
    print_result(result, json, "Export")
    if result.get("max_difference", 0.0) > MAX_LOGIT_DIFFERENCE:
        say(f"The logits differ by more than {MAX_LOGIT_DIFFERENCE}: transformers does not compute the same model.")
        raise typer.Exit(1)


@app.command()
def models(json: JsonOption = False) -> None:
    """List the presets: size, operations to read a token, objective, and what they are good for."""
    from firth import api

    found = api.models()
    if json:
        print_json({"models": found})
        return
    for family in dict.fromkeys(m["family"] for m in found):
        sizes = [m for m in found if m["family"] == family]
        rows = [
            (
                m["name"],
                m.get("size") or format_magnitude(m["parameters"]),
                format_magnitude(m["flops_per_token"]),
                m["objective"],
            )
            for m in sizes
        ]
        title = f"{family}, {sizes[0]['shape']}: {sizes[0]['good_for']}"
        show_table(title, ["name", "parameters", "FLOPs/token", "objective"], rows)


def format_magnitude(number: float) -> str:
    """
    >>> format_magnitude(124_439_808), format_magnitude(1.5e12)
    ('124M', '1.5T')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def main() -> None:
    """Run a verb: exit code 0 when it did what was asked, 2 for a user's mistake, 130 for Ctrl-C, 143 for SIGTERM."""
    debug = "--debug" in sys.argv[1:]
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    logging.captureWarnings(not debug)
    try:
        app(arguments, prog_name="firth")  # exits with 0 when the verb returns, with 2 for a wrong option
    except SystemExit as e:
        if e.code == INTERRUPTED_EXIT_CODE:
            report_interrupt()
        raise
    except KeyboardInterrupt:  # once more, while the first one was dealt with
        report_interrupt()
        sys.exit(INTERRUPTED_EXIT_CODE)
    except Exception as e:
        if debug:
            raise
        exit_with_error(e)


def exit_with_error(error: Exception) -> None:
    """Say what went wrong and exit. Of several processes the first that fails says so, and none waits for another."""
    from firth.train.distributed import read_launch_env, should_report_error

    launch = read_launch_env()
    if launch is None or launch.world_size == 1:
        sys.exit(report_error(error))
    set_quiet(not should_report_error(error))
    try:
        code = report_error(error)
    except Exception:
        code = 1
        stderr_console.print(traceback.format_exc(), markup=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_interrupt() -> None:
    """The last word after Ctrl-C; one more does not disturb the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say("stopped")


def report_error(error: Exception) -> int:
    """One or two lines on stderr, and the exit code."""
    from firth.train import Interrupted
    from firth.train.distributed import is_peer_lost

    if isinstance(error, Interrupted):
        say(f"{error}; the same command with --resume goes on.")
        return error.code
    if isinstance(error, UserError):
        stderr_console.print("[red]error:[/red] ", end="")
        stderr_console.print(str(error), markup=False)
        return 2
    if isinstance(error, OSError) and error.strerror:
        stderr_console.print("[red]error:[/red] ", end="")
        safe = getattr(error, "__notes__", None) or ["What was whole before is whole still."]
        stderr_console.print(f"{error.filename or 'a file'}: {error.strerror}. {' '.join(safe)}", markup=False)
        return 2 if isinstance(error, USER_ERROR_TYPES) else 1
    if is_peer_lost(error):
        say(f"another process of this run has ended, and so this one ends too ({str(error).splitlines()[0][:200]})")
        return 1
    raise error
