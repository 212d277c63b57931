"""The commands: options in, a table or (with --json) one JSON object out."""

from __future__ import annotations

import errno
import logging
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from io import TextIOWrapper
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import TyperException

from firth import __version__
from firth.cli import options as opt
from firth.cli import render
from firth.cli.command import add_command
from firth.cli.export import EXPORT_EXAMPLES, ExportOptions, report_export
from firth.cli.push import PUSH_EXAMPLES, PushOptions, push
from firth.cli.values import parse_escapes
from firth.core.console import format_count, print_error, print_text, say, set_quiet, show_table, stderr_console, track
from firth.core.errors import MAX_REASON_CHARS, Interrupted, UserError, shorten
from firth.generate.config import CONSTRAINTS, GenerationConfig
from firth.serve.config import ServeConfig
from firth.tasks import FinetuneRecipe
from firth.train import Recipe, read_yaml_mapping

app = typer.Typer(
    help="From your own text to a language model: tokenizer, pretraining, fine-tuning, evaluation, generation, export.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command = partial(add_command, app)

DISTRIBUTED_FIELDS = ("parallel", "shard_size", "cpu_offload")  # for commands that torchrun may start
FIT_OPTIONS = ("data", "output_dir", "overwrite")  # `plan` takes them with --fit; --data to refuse it
SUITE_OPTIONS = ("tasks", "seeds", "config", "resume", "overrides")  # `evaluate` takes them only with --suite
INTERRUPTED_EXIT_CODE = 130  # after Ctrl-C
# A wrong path or a folder without permission is a user's mistake (exit code 2); a full disk is not.
USER_ERROR_TYPES = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
USER_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP)
OPTION_SYNONYMS = {  # names of other programs, for messages
    "lr": "--learning-rate",
    "epochs": "--num-train-epochs",
    "num-epochs": "--num-train-epochs",
    "steps": "--max-steps",
    "batch-size": "--per-device-train-batch-size",
    "bs": "--per-device-train-batch-size",
    "o": "--output-dir",
    "out": "--output-dir",
    "output": "--output-dir",
    "train-file": "--train",
    "validation-file": "--dev",
    "valid": "--dev",
    "test": "--dev",
    "max-length": "--max-seq-length",
    "block-size": "--max-seq-length",
    "max-tokens": "--max-new-tokens",
    "beams": "--num-beams",
    "force": "--overwrite",
    "gpu": "--device",
    "lora-r": "--lora-rank",
}


@command(
    opt.QuickstartOptions,
    examples="""
firth quickstart                     # five minutes, the built-in corpus
firth quickstart --all --minutes 10  # three architectures side by side
""",
)
def quickstart(json: bool, **options: Any) -> None:
    """Train on the built-in corpus: tokenizer, pretraining, fine-tuning, comparison with training from scratch."""
    from firth import api

    result = api.quickstart(**options)
    if json:
        render.print_json(result)


@command(
    opt.CheckOptions,
    examples="""
firth check books/
firth check books/ --kinds none                        # the text alone
firth check notes.jsonl --tokenizer bert-base-uncased/ # does it suit?
firth check books/ --labelled test.jsonl               # test set in the text?
""",
)
def check(json: bool, **options: Any) -> None:
    """Check a text and how tokenizers split it: duplicates, dirt, vocabulary, row length, model size."""
    from firth import api

    result = api.check(printed=not json, **options)
    if json:
        render.print_json(result)
    else:
        say(f"The report with plots is {result['page']}.")


@command(
    opt.DoctorOptions,
    examples="""
firth doctor run
firth doctor topics --json        # a fine-tuning, for a script
firth doctor run || echo "ill"    # exit code 1: a warning or an error
""",
)
def doctor(json: bool, run: str) -> None:
    """Examine a run: what its loss should be, what is wrong, why, and which command to try next.

    Exit code: 0 if the run is healthy or has information alone, 1 with a warning or an error.
    """
    from firth import api

    result = api.doctor(run)
    render.print_json(result) if json else render.print_diagnosis(result)
    if any(finding["level"] != "info" for finding in result["findings"]):
        raise typer.Exit(1)


@command(
    opt.TokenizerOptions,
    examples="""
firth tokenizer books/ --output-dir tok
firth tokenizer books/ --kind byte-bpe --vocab-size 32000 --output-dir tok
firth tokenizer books/ --from bert-base-uncased/ --output-dir tok
firth tokenizer --extend bert-base-uncased/ swahili/ --output-dir tok
""",
)
def tokenizer(json: bool, kind: str | None = None, **options: Any) -> None:
    """Train a tokenizer on text, or extend one by the words of a text."""
    from firth import api

    own = {"--kind": kind, **{f"--{name}": options.get(name) for name in ("lowercase", "byte_fallback", "pattern")}}
    fixed = own | {
        "--from": options.get("like"),
        **{f"--{name}": options.get(name) for name in ("vocab_size", "reverse")},
    }
    added = {f"--{name}": options.get(name) for name in ("max_new_tokens", "min_count")}
    if "extend" in options:
        refuse_options(fixed, "--extend keeps the tokenizer as it is and adds tokens")
    elif "like" in options:
        refuse_options(own, "--from sets everything but the size")
    if "extend" not in options:
        refuse_options(added, "Only --extend adds tokens to a tokenizer")
    result = api.tokenizer(kind=kind or "wordpiece", **options)
    if "new_tokens" in result and not json:
        render.print_extension(result)
    else:
        render.print_result(result, json, "Tokenizer")


def refuse_options(options: Mapping[str, Any], cause: str) -> None:
    """Raise a UserError if any of these options was given."""
    if given := [name.replace("_", "-") for name, value in options.items() if value]:
        raise UserError(f"{cause}: leave out {', '.join(given)}.")


@command(
    opt.PrepareOptions,
    examples="""
firth prepare books/ --tokenizer tok --output-dir shards
firth prepare books/ --tokenizer tok --output-dir shards --dedup near
firth prepare s3://b/text --tokenizer tok --output-dir s3://b/out --engine ray
""",
)
def prepare(json: bool, **options: Any) -> None:
    """Tokenize text into shards, once; any number of runs can read them."""
    from firth import api

    render.print_result(api.prepare(**options), json, "Shards")


@command(
    opt.PretrainOptions,
    Recipe,
    "max_steps num_train_epochs minutes max_seq_length per_device_train_batch_size global_batch_tokens "
    "learning_rate bf16 fp8 compile device save_steps seed",
    hidden_fields=("checkpoint",),
    examples="""
firth pretrain encoder --data books/ --output-dir run --minutes 10
firth pretrain gpt2-small --data shards --output-dir run --max-steps 20000
firth pretrain t5-base --data shards --output-dir run engine.weights=bf16
""",
)
def pretrain(json: bool, resume: bool, resume_from_checkpoint: bool = False, **options: Any) -> None:
    """Pretrain a model on shards or on text."""
    from firth import api

    render.print_pretraining(api.pretrain(resume=resume or resume_from_checkpoint, **options), json)


@command(
    opt.AdaptOptions,
    Recipe,
    "num_train_epochs minutes max_steps max_seq_length learning_rate global_batch_tokens bf16 device save_steps seed",
    hidden_fields=("checkpoint", "teacher", "warm_start", "mix_temperature", *DISTRIBUTED_FIELDS),
    examples="""
firth adapt run/final --data swahili.txt --output-dir sw
firth adapt bert-base-uncased/ --data mails/ --general books/ --output-dir m
firth adapt run/final --data laws/ --new-tokens 0 --minutes 30 --output-dir x
""",
)
def adapt(json: bool, resume: bool, resume_from_checkpoint: bool = False, **options: Any) -> None:
    """Continue the pretraining of a checkpoint on text of a domain, and measure what it gains and forgets.

    Measures bits per byte and tokens per word on held-out domain and general text, adds words of the domain to the
    tokenizer where that pays, trains with the checkpoint's own objective on the domain and a share of general text,
    and measures again. final/ opens in transformers; report.html and results.json have all figures.
    """
    from firth import api

    render.print_adaptation(api.adapt(resume=resume or resume_from_checkpoint, **options), json)


@command(
    opt.PlanOptions,
    examples="""
firth plan --data books/ --minutes 10              # the best encoder
firth plan --data books/ --passes 10 decoder
firth plan --fit runs/*                            # a law of your own runs
""",
)
def plan(json: bool, model: list[str] | None = None, fit: list[str] | None = None, **options: Any) -> None:
    """Plan a pretraining: the best size and settings for a text, a budget and this machine.

    Times some steps, and prints the expected time, memory and held-out loss beside a smaller and a larger model, and
    the command to paste. Peak memory is that of the GPU, or on a CPU of the whole process, libraries included. Nothing
    is written, except with --fit.
    """
    from firth import api

    others = model or []
    if fit:
        result = api.plan(fit=[*fit, *others], **{k: v for k, v in options.items() if k in FIT_OPTIONS})
        render.print_json(result) if json else render.print_scaling_law(result)
        return
    if len(others) > 1:
        raise UserError(f"plan takes one MODEL, and {len(others)} were given: {' '.join(others[:3])}.")
    planned = {name: value for name, value in options.items() if name not in ("output_dir", "overwrite")}
    result = api.plan(others[0] if others else "encoder", **planned)
    render.print_json(result) if json else render.print_plan(result)


@command(
    opt.ProveResumeOptions,
    Recipe,
    "max_steps max_seq_length per_device_train_batch_size save_steps seed bf16 compile device deterministic",
    hidden_fields=("checkpoint", "minutes", *DISTRIBUTED_FIELDS),
    name="prove-resume",
    examples="""
firth prove-resume bert-tiny --data books/ --output-dir proof --kills 5
""",
)
def prove_resume(json: bool, **options: Any) -> None:
    """Kill and resume a run repeatedly, and compare it bit for bit with an undisturbed run.

    Takes the options of `pretrain`; by default 10 steps for each kill and a checkpoint every 5 steps.
    """
    from firth import api

    result = api.prove_resume(**options)
    render.print_result(result, json, "A killed run against an undisturbed one")
    if not result["equal"]:
        say("The two runs differ.")
        raise typer.Exit(1)


@command(
    opt.ShowOptions,
    Recipe,
    "max_seq_length per_device_train_batch_size seed",
    hidden_fields=("checkpoint",),
    examples="""
firth show bert-tiny --data books/
firth show t5-tiny --data shards --rows 2 objective.rate=0.3
firth show llama/ --task lm --data chats.jsonl   # labels of dialogues
""",
)
def show(json: bool, **options: Any) -> None:
    """Show the inputs, masks and labels of the first rows, before any training.

    Takes the options of `pretrain`.
    """
    from firth import api

    result = api.show(printed=not json, **options)
    if json:
        render.print_json(result)
    else:
        say(f"The same as a page: {result['page']}")


@command(
    opt.FinetuneOptions,
    FinetuneRecipe,
    "num_train_epochs max_steps max_seq_length per_device_train_batch_size learning_rate search shots seeds lora_rank "
    "bf16 device",
    hidden_fields=DISTRIBUTED_FIELDS,
    examples="""
firth finetune run/final --task pair --train a.csv --dev b.csv --output-dir x
firth finetune run/final ... --against scratch --seeds 5  # gain, with a test
firth finetune small/ ... --teacher large/final --augment 10 --against alone
""",
)
def finetune(json: bool, resume: bool, resume_from_checkpoint: bool = False, **options: Any) -> None:
    """Fine-tune a checkpoint on a task with several seeds; report mean, standard deviation and the best model.

    The run's folder gets final/ (the model, with a model card), results.json, predictions.jsonl (of the best seed, on
    dev), report.html, recipe.yaml and seed-N/.
    """
    from firth import api

    configured = read_yaml_mapping(Path(options["config"])) if "config" in options else {}
    for name in ("task", "train", "dev"):
        options[name] = options.get(name) or configured.get(name) or ""
        is_inferred = name == "task" and isinstance(options.get("train"), dict)
        if not (options[name] or configured.get("tasks") or is_inferred):
            raise UserError(f"--{name} is missing: give it, or a --config file that has it.")
    result = api.finetune(resume=resume or resume_from_checkpoint, **options)
    if json or result.get("dry_run"):
        render.print_result(result, json, "Fine-tuning")
    elif "against" in options:
        render.print_arms(result)
    else:
        render.print_seeds(result, ", ".join(result.get("tasks", ())) or options["dev"], options["output_dir"])


@command(
    opt.EvaluateOptions,
    examples="""
firth evaluate topics/final --data test.csv               # fine-tuned
firth evaluate run/final --task perplexity --data books/  # not fine-tuned
firth evaluate run/final --task classify --shots 4 --train a.csv --data b.csv
firth evaluate run/final --suite glue --data GLUE/ --tasks cola,rte
""",
)
def evaluate(json: bool, suite: str | None = None, random_labels: bool = False, **options: Any) -> None:
    """Score a checkpoint on a file or on a suite of tasks.

    Writes results.json, predictions.jsonl and report.html. A file without labels gives predictions alone.
    """
    from firth import api

    if random_labels:
        options["random_labels"] = True
    if suite is not None:
        result = api.evaluate_suite(suite=suite, **check_suite_options(options))
    else:
        for name in SUITE_OPTIONS:
            if name == "seeds" and "shots" in options:  # they draw demonstrations
                continue
            if options.pop(name, None):
                repeat = " For more than one file, repeat --data." * (name == "overrides")
                raise UserError(f"{'KEY=VALUE' if name == 'overrides' else f'--{name}'} is for --suite.{repeat}")
        result = api.evaluate(**options)
    if json:
        render.print_json(result)
    else:
        (render.print_suite if suite is not None else render.print_evaluation)(result)


def check_suite_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `evaluate` as `evaluate_suite` takes them; those of a single file are refused."""
    if "task" in options:
        raise UserError("--suite has its own tasks: leave out --task, or choose some of them with --tasks.")
    known = ("checkpoint", "data", "output_dir", "overwrite", "max_seq_length", "encoding", *SUITE_OPTIONS)
    if other := [name for name in options if name not in known]:
        raise UserError(f"--{other[0].replace('_', '-')} is for a single file: leave out --suite, or this option.")
    data = options.pop("data", [None])
    if len(data) > 1:
        raise UserError(f"--suite takes one folder as --data; {len(data)} were given.")
    return {**options, "data": data[0]}


@command(
    opt.PredictOptions,
    examples="""
firth predict topics/final "The team won again." "Prices rose."
firth predict names/final --data new.txt --output names.jsonl
tail -f feed | firth predict topics/final --data - --batch-size 1 --json
""",
)
def predict(
    json: bool,
    checkpoint: str,
    text: list[str] | None = None,
    data: str | None = None,
    output: str | None = None,
    overwrite: bool = False,
    task: str | None = None,
    columns: dict[str, str] | None = None,
    format: Literal["auto", "text", "jsonl"] = "auto",
    encoding: str = "utf-8",
    batch_size: int | None = None,
    max_new_tokens: int | None = None,
) -> None:
    """Ask a fine-tuned checkpoint: labels, scores, entities, answers, texts or vectors for new inputs.

    Prints one line per input; with --json a JSON object per line, as it is computed.
    """
    if text and text != ["-"] and data:
        raise UserError(f"Texts are given both as arguments and in --data {data}: choose one.")
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder. `firth finetune` makes one: RUN/final.")
    if output is not None:
        from firth.evaluate.predict_output import check_output_file

        check_output_file(Path(output), overwrite, data)
    if not text and not data and sys.stdin.isatty():
        raise UserError("There is nothing to predict for: give texts as arguments, --data FILE, or lines on stdin.")
    from firth.evaluate.predict import CHUNK_BATCHES, Predictor
    from firth.evaluate.predict_output import format_prediction, merge_columns, write_predictions

    predictor = Predictor(checkpoint, task or "", batch_size, max_new_tokens=max_new_tokens)
    texts = text if text and text != ["-"] else None
    inputs = (
        predictor.reader.read_arguments(texts)
        if texts
        else predictor.reader.read_file(data or "-", columns, encoding, format)
    )
    predictions = predictor.predict_inputs(
        track(inputs, "predicting", "inputs") if data else inputs, 1 if data in (None, "-") else CHUNK_BATCHES
    )
    if output is not None:
        count = write_predictions(Path(output), predictions)
    else:
        count = 0
        for task_input, record in predictions:
            count += 1
            if json:
                render.print_json(merge_columns(task_input.columns, record))
            else:
                print_text(format_prediction(task_input, record))
    if not count:
        raise UserError(f"{data or 'stdin'}: no inputs.")
    for notice in predictor.notices:
        say(notice)
    if output is not None:
        say(f"{output}: {format_count(count, 'prediction')}.")


@command(
    opt.GenerateOptions,
    GenerationConfig,
    "temperature top_k top_p repetition_penalty seed num_beams num_return_sequences max_new_tokens stop json_schema "
    "regex choices",
    examples="""
firth generate run/final "Once upon a time" --temperature 0.8 --top-p 0.95
firth generate de/final "A man sleeps." --num-beams 4    # encoder-decoder
firth generate run/final --prompts prompts.txt --json    # one prompt a line
firth generate run/final "A person:" --json-schema person.json
firth generate chat/final "Hello" --best-of 8 --reward reward/final
""",
)
def generate(
    json: bool,
    checkpoint: str,
    encoding: str,
    prompt: list[str] | None = None,
    prompts: str | None = None,
    chat: bool | None = None,
    stream: bool | None = None,
    bf16: bool = False,
    draft: str | None = None,
    best_of: int | None = None,
    reward: str | None = None,
    **settings: Any,
) -> None:
    """Continue a prompt (decoder), or answer it (encoder-decoder, or a model fine-tuned to answer)."""
    from firth.commands.generate import (
        generate_best_of,
        generate_in_batches,
        generate_with_ngram,
        load_draft,
        load_for_generation,
        with_structured_length,
    )
    from firth.generate import stream_text
    from firth.generate.grammar import read_grammar
    from firth.static.ngram import is_ngram

    settings |= {"stop": [parse_escapes(text, "--stop") for text in settings.get("stop", ())]}
    texts = collect_input_texts(prompt, prompts, "--prompts", ("prompt", "source", "text"), encoding)
    if stream and json:
        raise UserError("--stream prints tokens one by one and --json one object at the end: choose one.")
    constraint = {name: settings[name] for name in CONSTRAINTS if name in settings}
    read_grammar(GenerationConfig(**constraint))  # a mistake in a schema shows before a model is loaded
    if best_of is not None or reward is not None:
        if stream:
            raise UserError("--stream prints tokens one by one, and --best-of compares whole texts: choose one.")
        ranked = generate_best_of(checkpoint, texts, best_of, reward, settings, chat, bf16, draft, logprobs=json)
        best = [result for result in ranked if result["best"]]
        render.print_generated_texts(ranked if json else best, json)
        exit_if_incomplete(best)
        return
    if is_ngram(checkpoint):
        render.print_generated_texts(generate_with_ngram(checkpoint, texts, settings), json)
        return
    model, encoded, defaults = load_for_generation(checkpoint, texts, chat, bf16)
    settings = defaults | settings
    single = len(texts) == 1 and settings.get("num_beams", 1) == settings.get("num_return_sequences", 1) == 1
    if stream is None:
        stream = single and not json and not constraint and draft is None and sys.stdout.isatty()
    if stream and draft is not None:
        raise UserError("--stream prints tokens one by one, and --draft makes several at once: choose one.")
    if not stream:
        results = generate_in_batches(model, encoded, settings, load_draft(draft, bf16), logprobs=json)
        render.print_generated_texts(results, json)
        exit_if_incomplete(results)
        return
    if len(texts) > 1:
        raise UserError(f"--stream prints one text as it is generated, and there are {len(texts)} prompts.")
    pieces = stream_text(model, encoded[0], **with_structured_length(model, settings))
    continues = not constraint and isinstance(encoded[0], str) and model.config.architecture != "encoder-decoder"
    print_stream(texts[0] if continues else "", pieces)


def exit_if_incomplete(results: Sequence[Mapping[str, Any]]) -> None:
    if not all(result.get("complete", True) for result in results):
        raise typer.Exit(1)


def print_stream(prompt: str, pieces: Iterator[str]) -> None:
    """Print a text piece by piece, after the prompt that it continues."""
    first = next(pieces, "")  # raises for invalid settings before anything is printed
    print_text(prompt, end="")
    for piece in chain([first], pieces):
        print_text(piece, end="")
    print()


def collect_input_texts(
    arguments: list[str] | None, file: str | None, option: str, columns: tuple[str, ...], encoding: str
) -> list[str]:
    """Texts from the command line, from a file (one per line, or a column of a .jsonl), or all of stdin as one."""
    if arguments and file:
        raise UserError(f"Texts are given both as arguments and in {option} {file}: choose one.")
    if file:
        return read_input_file(file, columns, encoding)
    if arguments and arguments != ["-"]:
        return arguments
    if sys.stdin.isatty():
        if option == "--texts":
            raise UserError("No texts: give them as arguments, with --texts FILE, or on stdin.")
        return [""]  # an empty prompt: the model starts a text
    try:
        text = sys.stdin.read()
        text.encode()
    except UnicodeError:
        raise UserError("Standard input is not UTF-8. Convert it, or give a file and its --encoding.") from None
    return [text.removesuffix("\n")]


def read_input_file(file: str, columns: tuple[str, ...], encoding: str) -> list[str]:
    from firth.text.filters import replace_lone_surrogates
    from firth.text.open_text import check_encoding
    from firth.text.records import data_extension, read_jsonl_records, read_record_lines

    path, encoding = Path(file), check_encoding(encoding)
    if data_extension(path) != ".jsonl":
        texts = [line.rstrip("\r\n") for line in read_record_lines(path, encoding)]
    else:
        texts = []
        for number, record in read_jsonl_records(path, encoding, bound_size=True):
            column = next((name for name in columns if isinstance(record.get(name), str)), None)
            if column is None:
                raise UserError(f"{file}:{number}: none of the columns {', '.join(columns)} holds a text.")
            texts.append(replace_lone_surrogates(record[column]))
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{file}: no text in this file.")
    return texts


@command(
    opt.ChatOptions,
    GenerationConfig,
    "temperature top_k top_p repetition_penalty seed stop",
    hidden_fields=("num_beams", "length_penalty", "early_stopping", "num_return_sequences"),
    examples="""
firth chat assistant/final
firth chat assistant/final --system "Answer briefly." --temperature 0.7
echo "Who are you?" | firth chat assistant/final
""",
)
def chat(checkpoint: str, system: str = "", bf16: bool = False, **settings: Any) -> None:
    """Talk with a model that was fine-tuned on dialogues, in its chat template.

    /clear begins anew, /exit or Ctrl-D ends. Without a terminal every line of stdin is a message.
    """
    if not Path(checkpoint).is_dir():
        raise UserError(f"{checkpoint} is not a checkpoint folder. `firth finetune --task lm` makes one: RUN/final.")
    from firth.commands.generate import move_for_generation
    from firth.models import load_model
    from firth.tasks.conversation import Conversation

    settings |= {"stop": [parse_escapes(text, "--stop") for text in settings.get("stop", ())]}
    conversation = Conversation(move_for_generation(load_model(checkpoint), bf16), system, **settings)
    interactive = sys.stdin.isatty()
    if interactive:
        say("Write a message. /clear begins anew, /exit ends.")
    while (message := read_message(interactive)) is not None and message != "/exit":
        if message == "/clear":
            conversation.clear()
            say("The conversation begins anew.")
        elif message:
            forgotten = conversation.num_forgotten
            for piece in conversation.reply(message):
                print_text(piece, end="")
            print_text("")
            if conversation.num_forgotten > forgotten:
                say("The conversation is too long for this model: its oldest messages were left out.")


def read_message(interactive: bool) -> str | None:
    """Return the next line of stdin without white space at its ends; None at its end."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


@command(
    opt.FillOptions,
    examples="""
firth fill run/final "The ___ sleeps on the mat."
""",
)
def fill(checkpoint: str, text: str, top: int, json: bool, bf16: bool = False) -> None:
    """Predict the most likely words for the blanks of a text."""
    from firth import api

    blanks = api.fill(checkpoint, text, top, bf16)
    if json:
        guesses = [{"guesses": [{"text": g.text, "probability": g.probability} for g in b.guesses]} for b in blanks]
        render.print_json({"text": text, "blanks": guesses})
        return
    rows = [
        (i + 1, render.visible_text(g.text), f"{100 * g.probability:.1f}%")
        for i, b in enumerate(blanks)
        for g in b.guesses
    ]
    show_table(text, ["blank", "guess", "probability"], rows)


@command(
    opt.EmbedOptions,
    examples="""
firth embed run/final "The cat sleeps." "A dog barks." --similar  # cosines
firth embed run/final --texts lines.txt --output-dir vectors.npy --normalize
firth embed words/final --analogy man woman king
firth embed elmo/final --compare bat "A bat flew." "He swung the bat."
""",
)
def embed(
    checkpoint: str,
    encoding: str,
    layer: int,
    top: int,
    json: bool,
    similar: bool,
    analogy: bool,
    overwrite: bool,
    text: list[str] | None = None,
    texts: str | None = None,
    compare: str | None = None,
    with_: list[str] | None = None,
    among: list[str] | None = None,
    output_dir: str | None = None,
    **options: Any,
) -> None:
    """Embed texts as vectors, or compare words by their vectors."""
    import numpy as np

    from firth import api
    from firth.core.files import check_writable, write_npy

    given = collect_input_texts(text, texts, "--texts", ("text",), encoding)
    of_texts = {"--pool": options["pool"] != "auto", "--normalize": options["normalize"]}
    of_texts |= {"--max_seq_length": options["max_seq_length"], "--output_dir": output_dir}
    if compare is not None:
        refuse_options({"--similar": similar, "--analogy": analogy} | of_texts, "--compare prints its own tables")
        comparison = api.compare(compare, given, [checkpoint, *(with_ or ())], layer, among or (), top)
        render.print_json(comparison) if json else render.print_word_comparison(comparison)
        return
    if with_ or among:
        raise UserError("--with and --among are for --compare WORD.")
    if analogy and len(given) != 3:
        raise UserError(f"--analogy needs three words a b c, and {format_count(len(given), 'was', 'were')} given.")
    if analogy or (similar and len(given) == 1):
        option = "--analogy" if analogy else "--similar with one word"
        refuse_options({**of_texts, "--layer": layer != -1}, f"{option} compares the vectors of words")
        positive, negative = (given[1:], given[:1]) if analogy else (given, [])
        render.print_similar_words(given, api.similar(checkpoint, positive, negative, top), json)
        return
    path = None
    if output_dir is not None:
        path = Path(output_dir) if output_dir.endswith(".npy") else Path(output_dir) / "vectors.npy"
        check_writable(path.parent)
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists already. Name another --output-dir, or pass --overwrite.")
    vectors = api.embed(checkpoint, given, layer=layer, **options)
    result: dict[str, Any] = {"texts": len(given), "width": vectors.shape[1]}
    if path is None:
        result["vectors"] = vectors.tolist()
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_npy(path, vectors)
        result["output"] = str(path)
    if similar:
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        result["similarity"] = (unit @ unit.T).tolist()
    if json:
        render.print_json(result)
        return
    if similar or path is None:
        render.print_vectors(given, vectors, result.get("similarity"))
    if path is not None:
        say(f"{path}: {format_count(len(given), 'vector')} of {vectors.shape[1]} numbers.")


@command(
    opt.ServeOptions,
    ServeConfig,
    "host port api_key_file runs max_batch_size max_queue max_body_bytes max_input_tokens max_output_tokens timeout_s",
    examples="""
firth serve run/final                 # open http://127.0.0.1:8000
firth serve topics/final chat=assistant/final --port 8080
firth serve --runs runs               # watch training runs
firth serve run/final --host 0.0.0.0 --api-key-file keys.txt
""",
)
def serve(checkpoint: list[str] | None = None, **settings: Any) -> None:
    """Serve models: a page to try them and to watch runs, OpenAI's API, and routes such as /fill and /classify.

    The page shows next tokens, blanks, attention, vectors, tokens, tasks and runs; it loads nothing from elsewhere.
    Requests that arrive together are computed together. Ctrl-C or SIGTERM ends; running requests end first.
    """
    from firth import api

    api.serve(checkpoint or (), **settings)


command(PushOptions, examples=PUSH_EXAMPLES)(push)


@command(ExportOptions, examples=EXPORT_EXAMPLES)
def export(json: bool, **options: Any) -> None:
    """Export a checkpoint as a Hugging Face folder, as ONNX, as GGUF, or its word vectors."""
    from firth import api

    report_export(api.export(**options), json)


@command(
    opt.ModelsOptions,
    examples="""
firth models
firth models bert
firth models encoder-decoder
""",
)
def models(json: bool, name: list[str] | None = None) -> None:
    """List the presets: parameters, FLOPs per token, objective, and what they are good for."""
    from firth import api

    presets = api.models(*[" ".join(name)] if name else [])
    if json:
        render.print_json({"models": presets})
    else:
        render.print_models(presets)
        say("encoder, decoder and encoder-decoder get their size from `firth plan`; encoder-8x512 has 8 layers of 512.")


def show_version(value: bool) -> None:
    if value:
        print(f"firth {__version__} (Python {platform.python_version()}, torch {version('torch')})")
        raise typer.Exit


@app.callback()
def top_level(
    show: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> None:
    """Run a command. Exit code: 0 for success, 2 for a user's mistake, 130 after Ctrl-C, 143 after SIGTERM."""
    debug = "--debug" in sys.argv[1:]
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    logging.captureWarnings(not debug)
    if isinstance(sys.stdout, TextIOWrapper):  # a file name that is not UTF-8; in JSON the escape is JSON's own
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = app(arguments or ["--help"], prog_name="firth", standalone_mode=False)
    except KeyboardInterrupt:  # a second one, while the first one is handled
        code = INTERRUPTED_EXIT_CODE
    except Exception as e:
        if debug and not isinstance(e, TyperException):
            raise
        exit_with_error(e)
    if code == INTERRUPTED_EXIT_CODE:
        report_interrupt()
    sys.exit(code or (0 if arguments else 2))


def exit_with_error(error: Exception) -> None:
    """Print what went wrong and exit. Of several processes the first that fails prints, and none waits for another."""
    from firth.train.launch_env import read_launch_env

    launch = read_launch_env()
    if launch is None or launch.world_size == 1:
        sys.exit(report_error(error))
    from firth.train.distributed import should_report_error

    set_quiet(not should_report_error(error))
    try:
        code = report_error(error)
    except Exception:
        code = 1
        stderr_console.print(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_interrupt() -> None:
    """Confirm Ctrl-C; further ones are ignored while the process exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    say("stopped")


def report_error(error: Exception) -> int:
    """Print one or two lines on stderr; return the exit code."""
    if isinstance(error, Interrupted):
        say(f"{error}; resume with the same command and --resume.")
        return error.code
    if isinstance(error, TyperException):
        print_error(describe_usage_error(error))
        return 2
    if isinstance(error, UserError):
        print_error(str(error))
        return 2
    if isinstance(error, OSError) and error.strerror:
        notes = getattr(error, "__notes__", None) or ["Files that were complete before still are."]
        print_error(f"{error.filename or 'a file'}: {error.strerror}. {' '.join(notes)}")
        return 2 if isinstance(error, USER_ERROR_TYPES) or error.errno in USER_ERRNOS else 1
    from firth.train.distributed import is_peer_lost  # loads torch, which a user's mistake does not need

    if is_peer_lost(error):
        say(f"another process of this run has ended, so this one ends too ({str(error).splitlines()[0][:200]})")
        return 1
    raise error


def describe_usage_error(error: TyperException) -> str:
    """A missing, unknown or incomplete option, and the command that lists the right ones."""
    context = getattr(error, "ctx", None)
    parameter = getattr(error, "param", None)
    hint = f" Run `{context.command_path} --help`." if context is not None else ""
    if parameter is not None:
        name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name.upper()
        positional = [arg for before, arg in pairwise(sys.argv[2:]) if not before.startswith("-")]
        if name == "--data" and (path := next((arg for arg in positional if Path(arg).exists()), "")):
            return f"--data is missing: name the text with it, --data {path}.{hint}"
        return f"{name} is missing.{hint}"
    if given := getattr(error, "option_name", ""):
        known = [option for own in context.command.params for option in own.opts] if context is not None else []
        wanted = given.lower().replace("_", "-")
        if (same := wanted if wanted in known else OPTION_SYNONYMS.get(wanted.lstrip("-"), "")) in known:
            return f"No such option: {given}. Did you mean {same}?{hint}"
    message = shorten(error.format_message(), MAX_REASON_CHARS)
    return message + ("" if message.endswith((".", "?")) else ".") + hint
