"""The verbs on the command line: options in, a table and (with --json) one JSON object out."""

from __future__ import annotations

import inspect
import json as json_module
import logging
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from firth.console import err, say, show_table
from firth.errors import UserError

app = typer.Typer(
    help="From your own text to a language model: tokenizer, pretraining, fine-tuning, evaluation, generation, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SAME = 1e-3  # the largest difference of logits that rounding explains
INTERRUPTED = 130  # the exit code after Ctrl-C
# A wrong name or a folder that is not the user's; a full disk, on the other hand, is nobody's mistake.
USERS_MISTAKES = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout, and no table.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in the output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint; start anew without one.")]
Documents = Annotated[
    str,
    typer.Option(
        help="How a .txt becomes documents: 'file' (whole), 'blank-line' (split), or 'auto': small files of a folder "
        "whole, all others split."
    ),
]
Columns = Annotated[str, typer.Option(help="Other column names, as text=body,label=class.")]
Encoding = Annotated[str, typer.Option(help="Encoding of the text files.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Any field of the recipe: model.num_layers=6.")
]
ModelName = Annotated[str, typer.Argument(help="A preset (see `firth models`), a config.json or a checkpoint folder.")]
Data = Annotated[list[str], typer.Option(help="Shards, or text: then tokenizer and shards are made on the way.")]
TokenizerFolder = Annotated[str | None, typer.Option(help="Folder of a tokenizer; without one it is trained.")]
VocabSize = Annotated[int, typer.Option(help="Of the tokenizer that is trained; 0 chooses by the text's size.")]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Of the tokenizer that is trained.")]
HeldOut = Annotated[float, typer.Option(help="Share of the documents that is kept for evaluation.")]
Config = Annotated[str | None, typer.Option(help="YAML file with any of these options and fields.")]
Texts = Annotated[list[str], typer.Argument(help="Files and folders (.txt, .jsonl, also .gz and .xz), or pydocs.")]


def finish(result: Mapping[str, Any], as_json: bool, title: str) -> None:
    """The table that a verb ends with, or its JSON."""
    if as_json:
        print(json_module.dumps(result, ensure_ascii=False))
        return
    rows = [(name, readable(value)) for name, value in result.items()]
    show_table(title, ["", ""], rows)


def readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {readable(v)}" for k, v in value.items())
    return "" if value is None else str(value)


def parse_columns(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if bad := [name for name, equals, value in pairs if not (name and equals and value)]:
        raise UserError(f"--columns: {bad[0]!r} is not name=column. Write --columns text=sentence,label=gold.")
    return {name: value for name, _, value in pairs}


def run_options(
    recipe: Callable[[], type], hidden: tuple[str, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the options of a recipe, with the help that the recipe's fields carry.

    The verb gets those that were set, as `options`.
    """

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        kind = recipe()
        hints = get_type_hints(verb, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in inspect.signature(verb).parameters.values()
            if p.name != "options"
        ]
        types_ = get_type_hints(kind)
        names = [f.name for f in fields(kind) if "help" in f.metadata and f.name not in hidden]
        added = [_option(name, types_[name], next(f for f in fields(kind) if f.name == name)) for name in names]

        def command(**given: Any) -> None:
            options = {name: given.pop(name) for name in names}
            resume_from = given.pop("resume_from_checkpoint", None)
            if resume_from not in (None, "auto", "true", "True"):
                raise UserError("--resume-from-checkpoint takes 'auto': the last whole checkpoint of the run.")
            if resume_from is not None:
                given["resume"] = True
            verb(**given, options={k: v for k, v in options.items() if v is not None})

        if any(p.name == "resume" for p in own):
            alias = Annotated[str | None, typer.Option(help="'auto': the same as --resume.")]
            name, keyword = "resume_from_checkpoint", inspect.Parameter.KEYWORD_ONLY
            added.append(inspect.Parameter(name, keyword, default=None, annotation=alias))
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + added
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__, command.__name__ = verb.__doc__, verb.__name__
        return command

    return decorate


def _option(name: str, kind: Any, field: Any) -> inspect.Parameter:
    if isinstance(kind, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    if get_origin(kind) is Literal:
        kind = str
    default = field.metadata["default"]
    shown = "" if default in ("None", "") else f" [default: {default}]"
    option = typer.Option(help=str(field.metadata["help"]) + shown, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _pretraining() -> type:
    from firth.train import Recipe

    return Recipe


def _objectives() -> str:
    from firth.objectives import NAMED

    return ", ".join(NAMED)


def _finetuning() -> type:
    from firth.tasks import FinetuneRecipe

    return FinetuneRecipe


ObjectiveName = Annotated[str | None, typer.Option(help=f"{_objectives()}; the family's own unless said.")]


@app.command()
def quickstart(
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for everything it makes; the next free quickstart-N unless said.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="About how long each architecture may take.")] = 5.0,
    all: Annotated[bool, typer.Option("--all", help="Encoder, decoder and encoder-decoder, side by side.")] = False,
    seed: int = 0,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """The whole way on the built-in corpus: tokenizer, pretraining, fine-tuning against training from scratch."""
    from firth import verbs

    result = verbs.quickstart(output_dir, minutes=minutes, all=all, seed=seed, resume=resume, overwrite=overwrite)
    if json:
        print(json_module.dumps(result, ensure_ascii=False))


@app.command()
def tokenizer(
    texts: Texts,
    output_dir: Annotated[str, typer.Option(help="Folder for the tokenizer.")],
    kind: Annotated[str, typer.Option(help="wordpiece (BERT), byte-bpe (GPT-2) or unigram (T5).")] = "wordpiece",
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary; 0 chooses by the size of the text.")] = 0,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Make everything lower case.")] = False,
    documents: Documents = "auto",
    columns: Columns = "",
    encoding: Encoding = "utf-8",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train a tokenizer on your text."""
    from firth import verbs

    reading = {"documents": documents, "columns": parse_columns(columns), "encoding": encoding}
    result = verbs.tokenizer(texts, output_dir, kind, vocab_size, lowercase, overwrite, **reading)
    finish(result, json, "Tokenizer")


@app.command()
def prepare(
    texts: Texts,
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer or a checkpoint.")],
    output_dir: Annotated[str, typer.Option(help="Folder for the shards.")],
    held_out: Annotated[float, typer.Option(help="Share of the documents that is kept for evaluation.")] = 0.05,
    salient: Annotated[
        str | None,
        typer.Option(help="Mark salient spans: 'default' (names, numbers, dates), or your package.module:function."),
    ] = None,
    documents: Documents = "auto",
    columns: Columns = "",
    encoding: Encoding = "utf-8",
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Turn text into token shards, once; any number of runs can read them."""
    from firth import verbs

    reading = {"documents": documents, "columns": parse_columns(columns), "encoding": encoding}
    result = verbs.prepare(texts, tokenizer, output_dir, held_out, resume, overwrite, salient, **reading)
    finish(result, json, "Shards")


@app.command()
@run_options(_pretraining, hidden=("output_dir", "data", "tokenizer", "checkpoint"))
def pretrain(
    model: ModelName,
    data: Data,
    output_dir: Annotated[str, typer.Option(help="Folder of the run.")],
    options: dict[str, Any],
    overrides: Overrides = None,
    tokenizer: TokenizerFolder = None,
    objective: ObjectiveName = None,
    vocab_size: VocabSize = 0,
    lowercase: Lowercase = False,
    held_out: HeldOut = 0.05,
    documents: Documents = "auto",
    columns: Columns = "",
    encoding: Encoding = "utf-8",
    config: Config = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Pretrain a model on shards or on your text."""
    from firth import verbs
    from firth.train import parse_overrides

    result = verbs.pretrain(
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
        documents,
        parse_columns(columns),
        encoding,
        **options,
    )
    finish(result, json, "Pretraining")


@app.command()
@run_options(_pretraining, hidden=("output_dir", "data", "tokenizer", "checkpoint"))
def show(
    model: ModelName,
    data: Annotated[list[str], typer.Option(help="Shards, or text: then tokenizer and shards are made and removed.")],
    options: dict[str, Any],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(help="How many rows to show.")] = 4,
    tokenizer: TokenizerFolder = None,
    objective: ObjectiveName = None,
    output_dir: Annotated[str, typer.Option(help="Folder for show.html.")] = ".",
    vocab_size: VocabSize = 0,
    lowercase: Lowercase = False,
    held_out: HeldOut = 0.05,
    documents: Documents = "auto",
    columns: Columns = "",
    encoding: Encoding = "utf-8",
    config: Config = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a show.html that `firth show` did not write.")
    ] = False,
    json: Json = False,
) -> None:
    """Show exactly what the model will read and be asked, before any training. Takes the options of `pretrain`."""
    from firth import verbs
    from firth.train import parse_overrides

    result = verbs.show(
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
        documents,
        parse_columns(columns),
        encoding,
        printed=not json,
        **options,
    )
    if json:
        print(json_module.dumps(result, ensure_ascii=False))
    else:
        say(f"The same as a page: {result['page']}")


@app.command()
@run_options(_finetuning, hidden=("output_dir", "checkpoint", "task", "train", "dev", "columns"))
def finetune(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, ours or a published one.")],
    task: Annotated[str, typer.Option(help="classify or text-to-text.")],
    train: Annotated[str, typer.Option(help="Labelled file (.jsonl, .tsv, .csv, also .gz and .xz), or pydocs.")],
    dev: Annotated[str, typer.Option(help="Labelled file to score on, or pydocs.")],
    output_dir: Annotated[str, typer.Option(help="Folder of the run.")],
    options: dict[str, Any],
    overrides: Overrides = None,
    columns: Columns = "",
    config: Config = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Fine-tune a checkpoint on a task, with several seeds."""
    from firth import verbs
    from firth.train import parse_overrides

    changes = parse_overrides(overrides or [])
    result = verbs.finetune(
        checkpoint, task, train, dev, output_dir, config, changes, resume, overwrite, parse_columns(columns), **options
    )
    finish(result, json, "Fine-tuning")


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="A fine-tuned checkpoint.")],
    task: Annotated[str, typer.Option(help="classify or text-to-text.")],
    data: Annotated[str, typer.Option(help="Labelled file, or pydocs.")],
    output_dir: Annotated[
        str | None, typer.Option(help="Folder for predictions; beside the checkpoint unless said.")
    ] = None,
    columns: Columns = "",
    encoding: Encoding = "utf-8",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Score a fine-tuned checkpoint on labelled data."""
    from firth import verbs

    result = verbs.evaluate(checkpoint, task, data, output_dir, parse_columns(columns), overwrite, encoding)
    finish(result, json, "Evaluation")


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A decoder or an encoder-decoder.")],
    prompt: Annotated[str, typer.Argument(help="What the text begins with, or what the encoder reads.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens are written.")] = 50,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time; 1 draws as learned.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many of the likeliest; 0 among all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest that together have this share.")] = 1.0,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Continue a prompt."""
    from firth import verbs

    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    text = verbs.generate(checkpoint, prompt, **settings)
    print(json_module.dumps({"text": text}, ensure_ascii=False) if json else text)


@app.command()
def fill(
    checkpoint: Annotated[str, typer.Argument(help="An encoder, or an encoder-decoder.")],
    text: Annotated[str, typer.Argument(help="A text with blanks, written [MASK] or ___.")],
    top: Annotated[int, typer.Option(help="How many guesses for each blank.")] = 5,
    json: Json = False,
) -> None:
    """Fill the blanks of a text."""
    from firth import verbs

    blanks = verbs.fill(checkpoint, text, top)
    if json:
        found = [{"guesses": [{"text": g.text, "probability": g.probability} for g in b.guesses]} for b in blanks]
        print(json_module.dumps({"text": text, "blanks": found}, ensure_ascii=False))
        return
    rows = [(i + 1, g.text, f"{100 * g.probability:.1f}%") for i, b in enumerate(blanks) for g in b.guesses]
    show_table(text, ["blank", "guess", "probability"], rows)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder.")],
    output_dir: Annotated[str, typer.Option(help="Folder to write.")],
    check: Annotated[bool, typer.Option("--check", help="Open it in transformers and compare the logits.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a plain Hugging Face folder."""
    from firth import verbs

    result = verbs.export(checkpoint, output_dir, check, overwrite)
    finish(result, json, "Export")
    if result.get("max_difference", 0.0) > SAME:
        say(f"The logits differ by more than {SAME}: transformers does not compute the same model.")
        raise typer.Exit(1)


@app.command()
def models(json: Json = False) -> None:
    """List the presets: size, operations to read a token, objective, and what they are good for."""
    from firth import verbs

    found = verbs.models()
    if json:
        print(json_module.dumps({"models": found}))
        return
    for family in dict.fromkeys(m["family"] for m in found):
        sizes = [m for m in found if m["family"] == family]
        rows = [(m["name"], short(m["parameters"]), short(m["flops_per_token"]), m["objective"]) for m in sizes]
        title = f"{family}, {sizes[0]['shape']}: {sizes[0]['good_for']}"
        show_table(title, ["name", "parameters", "FLOPs/token", "objective"], rows)


def short(number: float) -> str:
    """
    >>> short(124_439_808), short(1.5e12)
    ('124M', '1.5T')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def main() -> None:
    """Run a verb: exit code 0 when it did what was asked, 2 for a user's mistake, 130 for Ctrl-C."""
    debug = "--debug" in sys.argv[1:]
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    logging.captureWarnings(not debug)
    try:
        app(arguments)  # exits with 0 when the verb returns, with 2 for a wrong option
    except SystemExit as e:
        if e.code == INTERRUPTED:
            say("stopped")
        raise
    except Exception as e:
        if debug:
            raise
        sys.exit(explain(e))


def explain(e: Exception) -> int:
    """One or two lines on stderr, and the exit code."""
    from firth.train import Interrupted

    if isinstance(e, Interrupted):
        say(f"{e}; the same command with --resume goes on.")
        return INTERRUPTED
    if isinstance(e, UserError):
        err.print("[red]error:[/red] ", end="")
        err.print(str(e), markup=False)
        return 2
    if isinstance(e, OSError) and e.strerror:
        err.print("[red]error:[/red] ", end="")
        err.print(f"{e.filename or 'a file'}: {e.strerror}. What was whole before is whole still.", markup=False)
        return 2 if isinstance(e, USERS_MISTAKES) else 1
    raise e
