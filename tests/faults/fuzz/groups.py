# ruff: noqa: PTH101, PTH102, PTH211 (names of files are bytes here: they need not be UTF-8)
"""The 18 groups of inputs: each makes a damaged input in a folder, and the command line that reads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import yaml
from faults.fuzz.document_files import DOCUMENT_FILES
from faults.fuzz.fixtures import ANIMALS, CONLL, ROWS, SIZES, SQUAD, STEPS, TUNED, Fixtures, table
from faults.fuzz.harness import Case, MakeCase
from faults.fuzz.mutators import (
    ODD_NUMBERS,
    ODD_TEXTS,
    RAW,
    bomb,
    compress_and_damage,
    mutate_bytes,
    mutate_json,
    mutate_jsonl,
    mutate_lines,
    mutate_text,
    mutate_value,
    odd_value,
)

ENCODINGS = [
    *("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "shift_jis", "utf-7", "utf-8-sig", "ascii", "idna", "punycode"),
    *(
        "raw_unicode_escape",
        "unicode_escape",
        "rot13",
        "base64",
        "zlib",
        "undefined",
        "mbcs",
        "no-such",
        "",
        "\0",
        "hex",
    ),
]
ALIAS_BOMB = "".join(
    [
        *("a: &a [x, x, x, x]\n", "b: &b [*a, *a, *a, *a, *a]\n", "c: &c [*b, *b, *b, *b, *b]\n"),
        *("d: &d [*c, *c, *c, *c, *c]\n", "e: &e [*d, *d, *d, *d, *d]\n", "f: &f [*e, *e, *e, *e, *e]\n"),
        *("g: &g [*f, *f, *f, *f, *f]\n", "seed: [*g, *g, *g]"),
    ]
)
TEMPLATES = [
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "{% for i in range(100000000) %}{{ i }}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(99) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'x' * 100000000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ ('x' * 100000).center(1000000000) }}",
    "{{ messages[5].content }}{{ undefined.a.b }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__ }}{{ cycler.__init__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% if %}{% endfor %}{{",
    "{{ 1 / 0 }}",
    "{{ messages | tojson | length }}",
    "{{ '%s' | format(1, 2) }}{{ '%1000000000d' % 1 }}",
    "{{ strftime_now('%' * 1000) }}",
    "{{ [1, 2] | join(3) | batch(0) | list }}",
    "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + m %}{% endfor %}",
]


def mutate_file(rng: random.Random, path: Path, mutate: Callable[[random.Random, bytes], bytes]) -> None:
    path.write_bytes(mutate(rng, path.read_bytes()))


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def by_extension(path: Path) -> Callable[[random.Random, bytes], bytes]:
    """The mutator that suits a file."""
    return {".json": mutate_json, ".jsonl": mutate_jsonl, ".safetensors": mutate_safetensors, ".npy": mutate_npy}.get(
        path.suffix, mutate_bytes
    )


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header (names, shapes, types, offsets), its length, or bytes."""
    kind, size = rng.random(), struct.unpack("<Q", data[:8])[0]
    if kind < 0.3:
        return mutate_bytes(rng, data)
    if kind < 0.4:
        return struct.pack("<Q", rng.choice([0, 1, size - 1, size + 1, 2**32, 2**62, 2**64 - 1])) + data[8:]
    header = mutate_json(rng, data[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def mutate_npy(rng: random.Random, data: bytes) -> bytes:
    """Change the header of a NumPy file, its numbers, or bytes."""
    import numpy as np

    kind = rng.random()
    if kind < 0.3:
        return mutate_bytes(rng, data)
    values = np.load(io.BytesIO(data))
    if kind < 0.6 and len(values):
        info = np.iinfo(values.dtype)
        values[rng.randrange(len(values))] = rng.choice([0, 1, info.min, info.max, info.max // 2])
    elif kind < 0.7:
        values = values[: rng.randrange(len(values) + 1)]
    elif kind < 0.8:
        values = values[::-1] if rng.random() < 0.5 else values.reshape(1, -1)
    else:
        values = values.astype(rng.choice(["<f8", "<i4", ">i8", "<u1", "<U3", "<c16"]))
    out = io.BytesIO()
    np.save(out, values)
    return out.getvalue()


def model_command(rng: random.Random, folder: Path, family: str, checkpoint: Path, fixtures: Fixtures) -> Case:
    """A command that loads a checkpoint."""
    rows, out = fixtures.rows("classify"), folder / "out"
    files = ["--task=classify", "--train", rows, "--dev", rows, "--output-dir", out, "--dry-run"]
    commands: list[list[Any]] = [
        ["embed", checkpoint, "a cat slept", "--output-dir", out],
        ["generate", checkpoint, "a cat", "--max-new-tokens=2"]
        if family == "gpt2"
        else ["fill", checkpoint, "a [MASK] slept"],
        ["finetune", checkpoint, *files],
        ["export", checkpoint, "--output-dir", out],
        ["export", checkpoint, "--output-dir", out, "--format=gguf", "--dtype", rng.choice(["f32", "q8_0"])],
        ["push", checkpoint, "me/animals"],
        ["pretrain", checkpoint, "--data", fixtures.shards, "--output-dir", out, "--dry-run"],
    ]
    return Case(rng.choices(commands, [3, 3, 2, 2, 1, 1, 1])[0])


def checkpoint_file(name: str, fixtures: Fixtures) -> MakeCase:
    """Damage one file of a checkpoint."""

    def make(rng: random.Random, folder: Path) -> Case:
        family = rng.choice(["bert", "gpt2"])
        checkpoint = copy(getattr(fixtures, family) / "final", folder / "checkpoint")
        mutate_file(rng, checkpoint / name, by_extension(Path(name)))
        return model_command(rng, folder, family, checkpoint, fixtures)

    return make


# --- recipes and options


def dump_yaml(rng: random.Random, value: Any) -> bytes:
    text = yaml.dump(value, allow_unicode=rng.random() < 0.5)
    lines = [line.replace(json.dumps(RAW)[1:-1], "").replace(RAW, "") for line in text.splitlines()]
    if rng.random() < 0.15:
        extra = [
            ALIAS_BOMB,
            *("seed: 2020-13-45", "? [a, b]\n: 1", "1: 2", "null: 3", "seed: " + "9" * 5000, "model: " + "[" * 100_000),
            *("seed: !!python/object/apply:os.system [ls]", "seed: !!binary x", "a: *b", "&a a: *a", "<<: {seed: 1}"),
            *(
                "--- \n---",
                "\tseed: 1",
                "seed: 1\nseed: 2",
                "seed: 0o17",
                "seed: 1:30:00",
                "seed: !!set {a}",
                "%YAML 9.9",
            ),
        ]
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(extra))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data) if rng.random() < 0.2 else data


def recipes(fixtures: Fixtures) -> MakeCase:
    suite = {"tasks": [{"name": "a", "task": "classify", "train": "classify.jsonl", "dev": {"dev": "classify.jsonl"}}]}

    def make(rng: random.Random, folder: Path) -> Case:
        path, out, rows = folder / "recipe.yaml", folder / "out", fixtures.rows("classify")
        kind = rng.choices(["pretrain", "finetune", "suite"], [10, 10, 1])[0]
        if kind == "suite":
            path.write_bytes(dump_yaml(rng, mutate_value(rng, json.loads(json.dumps(suite)))))
            data = ["--data", fixtures.folder, "--output-dir", out, "--seeds=1", "max_steps=1"]
            return Case(["evaluate", fixtures.bert / "final", "--suite", path, *data])
        source = fixtures.bert if kind == "pretrain" else fixtures.classify
        recipe = mutate_value(rng, yaml.safe_load((source / "recipe.yaml").read_text()))
        if isinstance(recipe, dict) and rng.random() < 0.5:
            recipe = {name: value for name, value in recipe.items() if rng.random() < 0.3}
        path.write_bytes(dump_yaml(rng, recipe))
        given: list[Any] = ["--config", path, "--output-dir", out, "--dry-run"]
        if kind == "pretrain":
            return Case(["pretrain", "bert-tiny", "--data", fixtures.shards, *given])
        return Case(["finetune", fixtures.bert / "final", "--task=classify", "--train", rows, "--dev", rows, *given])

    return make


def overrides(fixtures: Fixtures) -> MakeCase:
    def make(rng: random.Random, folder: Path) -> Case:
        is_pretraining, out, rows = rng.random() < 0.7, folder / "out", fixtures.rows("classify")
        source = fixtures.bert if is_pretraining else fixtures.classify
        recipe = yaml.safe_load((source / "recipe.yaml").read_text())
        keys = dotted_names(recipe)
        words = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            key = rng.choice(keys) if rng.random() < 0.95 else rng.choice(ODD_TEXTS)
            value = odd_value(rng)
            text = json.dumps(value) if isinstance(value, list | dict) else str(value).removeprefix(RAW)
            words.append(f"{key}={text}".replace("\0", "").encode("utf-8", "surrogatepass").decode(errors="replace"))
        if is_pretraining:
            model = rng.choice(["bert-tiny", "gpt2-tiny", "t5-tiny", "llama-tiny", "elmo-tiny", "electra-tiny"])
            return Case(["pretrain", model, "--data", fixtures.shards, "--output-dir", out, "--dry-run", "--", *words])
        files = ["--task=classify", "--train", rows, "--dev", rows, "--output-dir", out, "--dry-run"]
        return Case(["finetune", fixtures.bert / "final", *files, "--", *words])

    return make


def dotted_names(recipe: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for name, value in recipe.items():
        names.append(prefix + name)
        if isinstance(value, dict):
            names += 2 * dotted_names(value, f"{prefix}{name}.")
    return names


def command_lines(fixtures: Fixtures) -> MakeCase:
    """Options of every command with odd values; commands that would train are asked for --dry-run."""
    from firth.cli import options as opt
    from firth.cli.command import Option, list_options
    from firth.cli.export import ExportOptions
    from firth.cli.push import PushOptions
    from firth.generate.config import GenerationConfig
    from firth.tasks import FinetuneRecipe
    from firth.train import Recipe

    rows, text, bert, gpt2 = fixtures.rows("classify"), fixtures.text, fixtures.bert / "final", fixtures.gpt2 / "final"
    given: dict[str, tuple[list[Any], list[Option]]] = {
        "tokenizer": ([text, "--output-dir=out", "--dry-run"], list_options(opt.TokenizerOptions)),
        "prepare": (
            [text, "--tokenizer", fixtures.shards / "tokenizer", "--output-dir=out", "--dry-run"],
            list_options(opt.PrepareOptions),
        ),
        "pretrain": (
            ["bert-tiny", "--data", fixtures.shards, "--output-dir=out", "--dry-run"],
            list_options(opt.PretrainOptions, Recipe),
        ),
        "finetune": (
            [bert, "--task=classify", "--train", rows, "--dev", rows, "--output-dir=out", "--dry-run"],
            list_options(opt.FinetuneOptions, FinetuneRecipe),
        ),
        "evaluate": ([fixtures.classify / "final", "--data", rows], list_options(opt.EvaluateOptions)),
        "generate": (
            [gpt2, "a cat", "--max-new-tokens=3"],
            list_options(opt.GenerateOptions, GenerationConfig),
        ),
        "fill": ([bert, "a [MASK] slept"], list_options(opt.FillOptions)),
        "embed": ([bert, "a cat", "a dog"], list_options(opt.EmbedOptions)),
        "export": ([bert, "--output-dir=out"], list_options(ExportOptions)),
        "show": (["bert-tiny", "--data", fixtures.shards], list_options(opt.ShowOptions, Recipe)),
        "models": ([], list_options(opt.JsonOptions)),
        "predict": ([fixtures.classify / "final", "a cat slept"], list_options(opt.PredictOptions)),
        "check": ([text, "--kinds=none", "--output-dir=out"], list_options(opt.CheckOptions)),
        "plan": (["bert-tiny", "--data", fixtures.shards], list_options(opt.PlanOptions)),
        "adapt": ([bert, "--data", text, "--output-dir=out", "--dry-run"], list_options(opt.AdaptOptions, Recipe)),
        "doctor": ([fixtures.bert], list_options(opt.DoctorOptions)),
        "push": ([bert, "me/animals"], list_options(PushOptions)),  # tests have no network
    }
    weights = [6, 6, 10, 10, 3, 8, 6, 8, 4, 2, 1, 5, 3, 2, 4, 1, 2]
    paths = [text, rows, bert, gpt2, fixtures.shards, fixtures.folder / "none", "/dev/null", "", "a" * 300]

    def value_of(rng: random.Random, option: Option) -> Any:
        if option.choices and rng.random() < 0.5:
            return rng.choice(option.choices)
        if rng.random() < 0.2:
            return rng.choice(paths)
        if option.kind in (int, float) and rng.random() < 0.7:
            return rng.choice(ODD_NUMBERS)
        return rng.choice(["a=b", "a=1,b=2", "x,y", "1,2,3", "4GB", "auto", "none", "all", *ODD_TEXTS])

    def make(rng: random.Random, folder: Path) -> Case:
        name = rng.choices(list(given), weights)[0]
        arguments, options = given[name]
        words: list[Any] = [name, *arguments]
        for _ in range(rng.choice([1, 1, 2, 3])):
            option = rng.choice([o for o in options if o.name not in ("workers", "kills", "minutes", "target_text")])
            if option.argument and option.default is MISSING:
                continue
            if option.kind is bool:
                words.append(option.flag if rng.random() < 0.5 else f"--no-{option.flag[2:]}")
            else:
                value = os.fsencode(str(value_of(rng, option)).encode(errors="replace").replace(b"\0", b""))
                words += [value] if option.argument else [option.flag.encode() + b"=" + value]
        if rng.random() < 0.1:
            del words[rng.randrange(1, len(words) + 1) :]
        # 1: a text that is cut before --regex or the like is satisfied; an ill run
        may_be_one = name in ("generate", "doctor")
        return Case(words, owned=(folder / "out",), codes=(0, 1, 2) if may_be_one else (0, 2))

    return make


# --- checkpoints and tokenizers


def tokenizer_settings(fixtures: Fixtures) -> MakeCase:
    """tokenizer_config.json, generation_config.json and the files of special tokens."""
    generation = {"eos_token_id": 1, "max_new_tokens": 3, "temperature": 0.7, "top_k": 5, "do_sample": True}
    special = {"eos_token": {"content": "</s>", "special": True}, "additional_special_tokens": ["<a>"]}

    def make(rng: random.Random, folder: Path) -> Case:
        family = rng.choice(["bert", "gpt2"])
        checkpoint = copy(getattr(fixtures, family) / "final", folder / "checkpoint")
        (checkpoint / "generation_config.json").write_text(json.dumps(generation))
        (checkpoint / "special_tokens_map.json").write_text(json.dumps(special))
        (checkpoint / "added_tokens.json").write_text('{"<a>": 300}')
        names = ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"]
        mutate_file(rng, checkpoint / rng.choices(names, [6, 3, 1, 1])[0], mutate_json)
        return model_command(rng, folder, family, checkpoint, fixtures)

    return make


def task_files(fixtures: Fixtures) -> MakeCase:
    """Files of a fine-tuned checkpoint, task.json before all."""

    def make(rng: random.Random, folder: Path) -> Case:
        is_chat = rng.random() < 0.5
        checkpoint = copy((fixtures.chat if is_chat else fixtures.classify) / "final", folder / "checkpoint")
        others = sorted(p.name for p in checkpoint.iterdir() if p.is_file())
        name = "task.json" if rng.random() < 0.7 else rng.choice(others)
        mutate_file(rng, checkpoint / name, by_extension(checkpoint / name))
        rows, out = fixtures.rows("lm" if is_chat else "classify"), folder / "out"
        evaluate = ["evaluate", checkpoint, "--data", rows, "--output-dir", out]
        other: list[Any] = (
            ["generate", checkpoint, "Who?", "--max-new-tokens=2"] if is_chat else ["embed", checkpoint, "a"]
        )
        more = ["finetune", checkpoint, f"--task={'lm' if is_chat else 'classify'}", "--train", rows, "--dev", rows]
        export = ["export", checkpoint, "--output-dir", out]
        return Case(rng.choice([evaluate, other, other, [*more, "--output-dir", out, "--dry-run"], export]))

    return make


def chats(fixtures: Fixtures) -> MakeCase:
    """Messages and chat templates."""

    def make(rng: random.Random, folder: Path) -> Case:
        checkpoint, rows = fixtures.chat / "final", folder / "chat.jsonl"
        shutil.copyfile(fixtures.rows("lm"), rows)
        if rng.random() < 0.6:
            checkpoint = copy(checkpoint, folder / "checkpoint")
            path = checkpoint / "tokenizer_config.json"
            config = json.loads(path.read_text())
            template = rng.choice([config["chat_template"], *TEMPLATES])
            if rng.random() < 0.5:
                template = mutate_bytes(rng, template.encode()).decode(errors="replace")
            config["chat_template"] = template if rng.random() < 0.95 else odd_value(rng)
            path.write_text(json.dumps(config))
        else:
            mutate_file(rng, rows, mutate_jsonl)
        if checkpoint != fixtures.chat / "final" and rng.random() < 0.5:
            return Case(["generate", checkpoint, "Who?", "--max-new-tokens=2", "--chat"])
        files = ["--task=lm", "--train", rows, "--dev", fixtures.rows("lm"), "--output-dir", folder / "out"]
        return Case(["finetune", checkpoint, *files, "--dry-run"])

    return make


# --- shards and runs


def shard_files(fixtures: Fixtures) -> MakeCase:
    def make(rng: random.Random, folder: Path) -> Case:
        shards = copy(fixtures.shards, folder / "shards")
        files = sorted(p for p in shards.rglob("*") if p.is_file())
        path = rng.choice([p for p in files if rng.random() < 0.5 or "rows-" not in str(p)] or files)
        mutate_file(rng, path, by_extension(path))
        out = folder / "out"
        shown = ["show", "bert-tiny", "--data", shards, "--rows=1", *SIZES, "--output-dir", folder, "--json"]
        trained = ["pretrain", "bert-tiny", "--data", shards, *SIZES, *STEPS, "--output-dir", out]
        dry = ["pretrain", "gpt2-tiny", "--data", shards, *SIZES, "--output-dir", out, "--dry-run"]
        return Case(rng.choices([shown, dry, trained], [4, 4, 1])[0], owned=(shards,))

    return make


def run_folders(fixtures: Fixtures) -> MakeCase:
    def make(rng: random.Random, folder: Path) -> Case:
        is_pretraining = rng.random() < 0.6
        run = copy(fixtures.bert if is_pretraining else fixtures.classify, folder / "run")
        (run / "mine.txt").write_text("my notes\n")
        if rng.random() < 0.3:
            shutil.rmtree(run / "final")
        files = sorted(p for p in run.rglob("*") if p.is_file() and p.suffix != ".html" and p.name != "mine.txt")
        for path in rng.sample(files, rng.choice([1, 1, 2])):
            if rng.random() < 0.1:
                path.unlink(missing_ok=True)
                if rng.random() < 0.3:
                    os.mkfifo(path)
            else:
                mutate_file(rng, path, by_extension(path) if path.stat().st_size else mutate_bytes)
        last = rng.choice([["--resume"]] * 6 + [["--overwrite"], []])
        if rng.random() < 0.3:
            return Case(["doctor", run], owned=(run,), codes=(0, 1, 2))
        if is_pretraining:
            command = ["pretrain", "bert-tiny", "--data", fixtures.shards, *SIZES, *STEPS, "--output-dir", run, *last]
        else:
            rows = fixtures.rows("classify")
            files_given = ["--task=classify", "--train", rows, "--dev", rows, "--output-dir", run]
            command = ["finetune", fixtures.bert / "final", *files_given, *TUNED, *last]
        return Case(command, owned=(run,))

    return make


# --- texts and tables


def write_input(rng: random.Random, folder: Path, name: str, data: bytes, compressed: float = 0.15) -> Path:
    if rng.random() < compressed:
        extension, data = compress_and_damage(rng, data)
        name += extension
    path = folder / name
    path.write_bytes(data)
    return path


def texts(fixtures: Fixtures) -> MakeCase:
    tokenizer = fixtures.shards / "tokenizer"

    def make(rng: random.Random, folder: Path) -> Case:
        encoding = rng.choice(["utf-8", "utf-8", *ENCODINGS])
        text = "\n\n".join([fixtures.text.read_text()[: rng.choice([0, 100, 3000])], *rng.sample(ODD_TEXTS, 3)])
        try:
            data = text.encode(rng.choice(["utf-8", encoding]), "replace")
        except (LookupError, TypeError, UnicodeError, ValueError):
            data = text.encode("utf-8", "replace")
        if is_bomb := rng.random() < 0.003:
            path = folder / f"bomb.txt{(extension := rng.choice(['.gz', '.xz', '.bz2', '.zst']))}"
            path.write_bytes(bomb(extension, rng.choice([b"\0", b" ", b"a", b"\n"]), 40))
        else:
            path = write_input(rng, folder, "text.txt", mutate_text(rng, data), 0.35)
        options: list[Any] = ["--output-dir", folder / "out"]
        if rng.random() < 0.4:
            options += [
                f"--encoding={encoding}".replace("\0", ""),
                f"--documents={rng.choice(['auto', 'file', 'blank-line'])}",
            ]
        prepare = ["prepare", path, "--tokenizer", tokenizer, "--workers=1", *options]
        train = ["tokenizer", path, "--kind", rng.choice(["wordpiece", "byte-bpe", "unigram", "bpe", "char", "word"])]
        if rng.random() < 0.3 and not is_bomb:
            train = ["tokenizer", "--extend", tokenizer, path]
        score = ["evaluate", fixtures.gpt2 / "final", "--task=perplexity", "--data", path, *options]
        # A text of 40 MB is read in seconds; a model that scores it needs minutes, whatever its file is.
        return Case(
            rng.choices(
                [prepare, [*train, *options, *["--vocab-size=300"] * ("--kind" in train)], score],
                [10, 6, 0 if is_bomb else 1],
            )[0]
        )

    return make


def labelled_command(rng: random.Random, task: str, path: Path, folder: Path, fixtures: Fixtures) -> Case:
    checkpoint, out = fixtures.gpt2 if task in ("lm", "text-to-text") else fixtures.bert, folder / "out"
    if task == "classify" and rng.random() < 0.1:
        return Case(["evaluate", fixtures.classify / "final", "--data", path, "--output-dir", out])
    if task == "word-in-context":
        return Case(
            ["evaluate", fixtures.bert / "final", "--task", task, "--data", path, "--output-dir", folder / "out"]
        )
    files = ["--task", task, "--output-dir", folder / "out", "--dry-run"]
    dev = fixtures.rows(task) if task in ROWS else path
    train, dev = (path, dev) if rng.random() < 0.7 else (dev, path)
    return Case(["finetune", checkpoint / "final", *files, "--train", train, "--dev", dev])


def labelled_jsonl(fixtures: Fixtures) -> MakeCase:
    tokenizer = fixtures.shards / "tokenizer"

    def make(rng: random.Random, folder: Path) -> Case:
        task = rng.choice([name for name in ROWS if name != "word-in-context" or rng.random() < 0.3])
        data, name = fixtures.rows(task).read_bytes(), "data.jsonl"
        if rng.random() < 0.1:
            data, name = json.dumps([json.loads(line) for line in data.splitlines()]).encode(), "data.json"
        if rng.random() < 0.002:
            extension = rng.choice([".gz", ".xz"])
            path = folder / (name + extension)
            path.write_bytes(bomb(extension, b" "))
        else:
            path = write_input(rng, folder, name, (mutate_jsonl if name[-1] == "l" else mutate_json)(rng, data))
        if rng.random() < 0.15:
            return Case(["prepare", path, "--tokenizer", tokenizer, "--workers=1", "--output-dir", folder / "out"])
        if rng.random() < 0.1:
            return Case(["embed", fixtures.bert / "final", "--texts", path, "--output-dir", folder / "out"])
        if rng.random() < 0.1:
            output = rng.choice([path, folder / "out.csv", folder / "out.tsv", folder / "out.jsonl"])
            return Case(["predict", fixtures.classify / "final", "--data", path, "--output", output, "--overwrite"])
        return labelled_command(rng, task, path, folder, fixtures)

    return make


def tables(fixtures: Fixtures) -> MakeCase:
    tokenizer = fixtures.shards / "tokenizer"

    def make(rng: random.Random, folder: Path) -> Case:
        task = rng.choice(["classify", "pair", "regress", "text-to-text"])
        name, separator = rng.choice([("data.csv", ","), ("data.tsv", "\t")])
        data = mutate_lines(rng, table(ROWS[task] * 2, separator).encode(), separator.encode())
        path = write_input(rng, folder, name, data)
        if rng.random() < 0.2:
            more = ["--columns=text=label"] if rng.random() < 0.5 else []
            return Case(
                ["prepare", path, "--tokenizer", tokenizer, "--workers=1", "--output-dir", folder / "out", *more]
            )
        return labelled_command(rng, task, path, folder, fixtures)

    return make


def parquets(fixtures: Fixtures) -> MakeCase:
    tokenizer = fixtures.shards / "tokenizer"

    def column(rng: random.Random) -> Any:
        import pyarrow as pa

        n = rng.choice([0, 1, 5, 50, 50])
        odd = rng.random() < 0.3
        texts = [
            rng.choice([None, "a cat", "", "x" * 5000]) if odd else f"{rng.choice(ANIMALS)} {i} slept near the river"
            for i in range(n)
        ]
        makers: list[Callable[[], Any]] = [
            lambda: pa.array(texts, pa.string()),
            lambda: pa.array(texts, pa.large_string()),
            lambda: pa.array(texts, pa.string()).dictionary_encode(),
            lambda: pa.array([[t] for t in texts], pa.list_(pa.string())),
            lambda: pa.array([{"a": t} for t in texts], pa.struct([("a", pa.string())])),
            lambda: pa.array([None] * n, pa.null()),
            lambda: pa.array([2**32] * n, pa.timestamp("s")),
            lambda: pa.array([b"\xff\xfe"] * n, pa.binary()),
            lambda: pa.array([1.5, *[float("nan")] * n][:n], pa.float64()),
        ]
        return rng.choice(makers[:3] if rng.random() < 0.5 else makers)()

    def make(rng: random.Random, folder: Path) -> Case:
        import pyarrow as pa
        import pyarrow.parquet as pq

        first = column(rng)
        names = [rng.choice(["text"] * 6 + ["body", "a.b", ""])]
        path, data = folder / "data.parquet", io.BytesIO()
        pq.write_table(pa.table([first], names=names), data, compression=rng.choice(["snappy", "zstd", "none"]))
        raw = data.getvalue()
        if is_bomb := rng.random() < 0.002:
            repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1500, pa.int32()), ["x" * 10**6])
            pq.write_table(pa.table({"text": repeated}), data := io.BytesIO())
            raw = data.getvalue()
        elif rng.random() < 0.8:
            raw = mutate_parquet(rng, raw)
        path.write_bytes(raw)
        options = rng.choice([[], [], [], ["--columns=text=body"]])
        out = ["--output-dir", folder / "out"]
        prepare = ["prepare", path, "--tokenizer", tokenizer, "--workers=1", *out, *options]
        train = ["tokenizer", path, "--vocab-size=300", *out]
        # 1.5 GB of text are read in seconds, but the training of a tokenizer takes minutes, whatever their file is.
        return Case(prepare if is_bomb else rng.choice([prepare, prepare, train]))

    return make


def documents(fixtures: Fixtures) -> MakeCase:
    """Web archives, Wikipedia dumps, web pages, PDF files and mailboxes."""
    tokenizer = fixtures.shards / "tokenizer"

    def make(rng: random.Random, folder: Path) -> Case:
        name = rng.choice(list(DOCUMENT_FILES))
        if rng.random() < 0.005:
            extension = rng.choice([".gz", ".xz", ".bz2", ".zst"])
            path = folder / (name + extension)
            path.write_bytes(
                bomb(extension, rng.choice([b"\0", b"<a>", b"From a 2024\n\n", b"WARC/1.0\r\n", b"x"]), 40)
            )
        else:
            data = mutate_text(rng, DOCUMENT_FILES[name]) if rng.random() < 0.95 else DOCUMENT_FILES[name]
            path = write_input(rng, folder, name, data)
        options: list[Any] = ["--output-dir", folder / "out"]
        if rng.random() < 0.2:
            keep = rng.choice(["quotes", "headers,signatures", "", "\n", "all"])
            options += [f"--encoding={rng.choice(ENCODINGS)}".replace("\0", ""), f"--keep-mail={keep}"]
        prepare = ["prepare", path, "--tokenizer", tokenizer, "--workers=1", *options]
        return Case(rng.choice([prepare, prepare, ["tokenizer", path, "--vocab-size=300", *options]]))

    return make


def mutate_parquet(rng: random.Random, data: bytes) -> bytes:
    """Change the footer or the pages of a Parquet file; its length and magic number often stay right."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    size = struct.unpack("<I", data[-8:-4])[0]
    body, footer = data[4 : -8 - size], data[-8 - size : -8]
    if rng.random() < 0.5:
        footer = mutate_bytes(rng, footer)
    else:
        body = mutate_bytes(rng, body)
    return b"PAR1" + body + footer + struct.pack("<I", len(footer)) + b"PAR1"


def conll_and_squad(fixtures: Fixtures) -> MakeCase:
    def make(rng: random.Random, folder: Path) -> Case:
        if rng.random() < 0.5:
            data = mutate_lines(rng, CONLL.encode() * 2, b" ")
            path, task = write_input(rng, folder, rng.choice(["data.conll", "data.txt", "data.bio"]), data), "tag"
        else:
            path, task = write_input(rng, folder, "data.json", mutate_json(rng, json.dumps(SQUAD).encode())), "span-qa"
        if rng.random() < 0.002:
            extension = rng.choice([".gz", ".xz"])
            path = folder / f"{'bomb.conll' if task == 'tag' else 'bomb.json'}{extension}"
            path.write_bytes(bomb(extension, b" "))
        return labelled_command(rng, task, path, folder, fixtures)

    return make


# --- the file system


@contextlib.contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Without root's rights, where the tests run as root and others may read this code: commands import as they run."""
    if os.geteuid() == 0:
        folder.chmod(0o755)
        os.seteuid(65534)
        if not os.access(__file__, os.R_OK, effective_ids=True):
            os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def file_system(fixtures: Fixtures) -> MakeCase:
    """Names, links, devices, rights and full disks."""
    tokenizer, text = fixtures.shards / "tokenizer", fixtures.text.read_text()[:3000]

    def odd_name(rng: random.Random) -> bytes:
        names = [
            b"caf\xe9",
            b"\xff\xfe",
            b"a\nb",
            b"\x1b[31mred",
            b"-x",
            b"a b",
            b"[red]",
            b":100:",
            "İ\u202e".encode(),
        ]
        return rng.choice([*names, b"n" * 240, b"n" * 300, b"a/" * 100, b"{}", b"%s", b"*", b"~", b"a=b", b"#"])

    def odd_file(rng: random.Random, folder: Path, name: bytes) -> bytes:
        """The path of something that should be a text."""
        path = os.fsencode(folder) + b"/" + name
        kind = rng.randrange(9)
        with contextlib.suppress(OSError):
            if kind == 0:
                os.mkfifo(path)
            elif kind == 1:
                os.symlink(path, path)
            elif kind == 2:
                os.symlink(rng.choice(["/dev/zero", "/dev/null", "/dev/tty", "/proc/self/mem", "nowhere", "."]), path)
            elif kind == 3:
                os.mkdir(path)
                os.symlink(b"..", path + b"/up")
                Path(os.fsdecode(path), "a.txt").write_text(text)
            elif kind == 4:
                Path(os.fsdecode(path)).write_text("a cat")
                os.chmod(path, 0)
            elif kind == 5:
                with socket.socket(socket.AF_UNIX) as s:
                    s.bind(path)
            else:
                Path(os.fsdecode(path)).write_text(text)
        return path

    def reading(rng: random.Random, folder: Path) -> Case:
        name = rng.choice([b"text", odd_name(rng)]) + rng.choice([b".txt"] * 5 + [b".jsonl", b".csv", b"", b".txt.gz"])
        path, out = odd_file(rng, folder, name), folder / "out"
        rows = fixtures.rows("classify")
        files = ["--task=classify", "--train", path, "--dev", rows]
        if rng.random() < 0.2:
            out = Path(os.fsdecode(os.fsencode(folder) + b"/" + odd_name(rng)))
        commands: list[list[Any]] = [
            ["prepare", path, "--tokenizer", tokenizer, "--workers=1", "--output-dir", out],
            ["tokenizer", path, "--output-dir", out, "--vocab-size=300"],
            ["finetune", fixtures.bert / "final", *files, "--output-dir", out, "--dry-run"],
            ["embed", fixtures.bert / "final", "--texts", path, "--output-dir", out],
            ["generate", path, "a cat"],
            ["pretrain", "bert-tiny", "--data", path, "--config", path, "--output-dir", out, "--dry-run"],
            ["prepare", fixtures.text, "--tokenizer", path, "--workers=1", "--output-dir", out],
        ]
        return Case(
            rng.choice(commands), prepare=lambda: as_nobody(folder) if rng.random() < 0.3 else contextlib.nullcontext()
        )

    def planting(rng: random.Random, folder: Path) -> Case:
        """Links in a run folder that point to a person's file."""
        run, mine = copy(fixtures.bert, folder / "run"), folder / "mine.txt"
        mine.write_text("years of work\n")
        if rng.random() < 0.5:
            shutil.rmtree(run / "final")
        names = [".lock", ".log.jsonl.tmp", "log.jsonl", ".recipe.yaml.tmp", "results.json", ".results.json.tmp"]
        names += [".report.html.tmp", "report.html", ".final.tmp", ".checkpoint-4.tmp", ".final.old", "final", ".clock"]
        names += ["data", "tensorboard", "seed-0", "checkpoint-4"]
        for name in rng.sample(names, 2):
            path = run / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
            os.symlink(rng.choice(["../mine.txt", folder]), path)
        last = rng.choice([["--resume"], ["--overwrite"], []])
        return Case(
            ["pretrain", "bert-tiny", "--data", fixtures.shards, *SIZES, *STEPS, "--output-dir", run, *last], (run,)
        )

    def publishing(rng: random.Random, folder: Path) -> Case:
        """A link or a pipe in a model folder that is exported, or pushed without a network."""
        model, mine = copy(fixtures.bert / "final", folder / "model"), folder / "mine.txt"
        mine.write_text("years of work\n")
        name = rng.choice(["README.md", "modules.json", "1_Pooling/config.json", "task.json", "generation_config.json"])
        path = model / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        if rng.random() < 0.3:
            os.mkfifo(path)
        else:
            os.symlink(rng.choice([mine, "/dev/zero", "nowhere"]), path)
        export = ["export", model, "--output-dir", folder / "out"]
        return Case(rng.choice([export, ["push", model, "me/animals"], ["embed", model, "a cat"]]))

    def overwriting(rng: random.Random, folder: Path) -> Case:
        """--overwrite on a folder with a person's files, which a manifest may name."""
        out = folder / "out"
        out.mkdir()
        for name in ("mine.txt", "mine.bin", "mine.json"):
            (out / name).write_text("years of work\n")
        files = {
            name: {"bytes": 14, "sha256": "0" * 64} for name in rng.sample(["mine.txt", "../mine.txt", "mine.bin"], 2)
        }
        if rng.random() < 0.7:
            manifest = {"files": files, "kind": rng.choice(["shards", "tokenizer", "checkpoint"])}
            (out / "manifest.json").write_bytes(mutate_json(rng, json.dumps(manifest).encode()))
        commands: list[list[Any]] = [
            ["prepare", fixtures.text, "--tokenizer", tokenizer, "--workers=1", "--output-dir", out],
            ["tokenizer", fixtures.text, "--vocab-size=300", "--output-dir", out],
            ["export", fixtures.bert / "final", "--output-dir", out],
            ["pretrain", "bert-tiny", "--data", fixtures.shards, *SIZES, *STEPS, "--output-dir", out],
        ]
        return Case([*rng.choice(commands), "--overwrite"], owned=(out / "manifest.json",))

    def full_disk(rng: random.Random, folder: Path) -> Case:
        """No file may become larger than some size; an existing result stays whole."""
        out = folder / "out"
        commands: list[list[Any]] = [
            ["prepare", fixtures.text, "--tokenizer", tokenizer, "--workers=1", "--output-dir", out],
            ["tokenizer", fixtures.text, "--vocab-size=300", "--output-dir", out],
            ["export", fixtures.bert / "final", "--output-dir", out],
            ["embed", fixtures.bert / "final", "a cat", "--output-dir", folder / "mine.npy", "--overwrite"],
        ]
        (folder / "mine.npy").write_bytes(b"vectors")
        size = rng.choice([0, 10, 100, 1000, 5000])
        replaced = (folder / "mine.npy",)
        return Case(rng.choice(commands), replaced=replaced, codes=(0, 1, 2), max_file_bytes=size)

    def make(rng: random.Random, folder: Path) -> Case:
        return rng.choices([reading, planting, publishing, overwriting, full_disk], [12, 1, 2, 2, 3])[0](rng, folder)

    return make


GROUPS: dict[str, Callable[[Fixtures], MakeCase]] = {
    "recipes": recipes,
    "overrides": overrides,
    "command lines": command_lines,
    "config.json": lambda fixtures: checkpoint_file("config.json", fixtures),
    "tokenizer.json": lambda fixtures: checkpoint_file("tokenizer.json", fixtures),
    "tokenizer and generation settings": tokenizer_settings,
    "safetensors": lambda fixtures: checkpoint_file("model.safetensors", fixtures),
    "fine-tuned checkpoints": task_files,
    "chats and templates": chats,
    "shards": shard_files,
    "run folders": run_folders,
    "texts": texts,
    "labelled .jsonl and .json": labelled_jsonl,
    "tables": tables,
    "Parquet": parquets,
    "documents": documents,
    "CoNLL and SQuAD": conll_and_squad,
    "file system": file_system,
}
