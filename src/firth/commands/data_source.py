"""The text or shards of a run: opened and checked first, tokenized in the run's folder later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from firth.commands.shards import check_shard_tokenizer, write_shards
from firth.core.console import say
from firth.core.errors import UserError, quote, shorten
from firth.core.files import atomic_folder, find_corruption, read_object, write_json
from firth.recipes import default_vocab_size
from firth.text import CORPUS_OPTIONS, Corpus, load_salient_finder
from firth.tokens import (
    Tokenizer,
    extend_word_tokenizer,
    is_shards_folder,
    load_tokenizer,
    open_shards,
    train_tokenizer,
)
from firth.tokens.shard_writer import remove_finished_journal
from firth.tokens.shards import find_shard_damage


class DataOptions(NamedTuple):
    """How text becomes shards: size and case of a new tokenizer, held-out fraction, arguments of Corpus.

    `add_words` adds the words of the text to a given word tokenizer.
    """

    vocab_size: int
    lowercase: bool
    held_out: float
    corpus_options: dict[str, Any]
    add_words: bool = False


def pop_corpus_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of Corpus from `options`, and return them with their defaults."""
    reading = {name: options.pop(name) for name in CORPUS_OPTIONS if name in options}
    return {"documents": "auto", "columns": {}, "encoding": "utf-8"} | {k: v for k, v in reading.items() if v}


class DataSource(NamedTuple):
    """The text or shards of a run, resolved and checked before anything is written."""

    sources: list[str | Path]
    tokenizer_path: str | Path | None  # folder of a tokenizer or checkpoint
    data_options: DataOptions
    new_tokenizer_args: list[Any]  # kind, size and case of a tokenizer to train
    marks_salient: bool  # mark names, numbers and dates
    corpus: Corpus | None  # the text of all sources; None where all are shards
    tokenizer: Tokenizer | None  # None: train one, or take that of the shards
    by_name: dict[str, Corpus | str]  # text or a folder of shards; "" names the source of a run without a mix

    @property
    def inputs(self) -> list[str | Path]:
        """Paths that the run reads and must not overwrite."""
        sources = parse_named_sources(self.sources).values() or self.sources
        return [*sources, *([self.tokenizer_path] if self.tokenizer_path else [])]

    def describe(self) -> tuple[dict[str, Any], int, int]:
        """Return what is read, its tokens (those of text are estimated) and the size of the vocabulary.

        Of a text whose size is unknown the tokens are the least that it has.
        """
        from firth.lab.dry_run import describe_text

        if self.corpus is None:
            shards = [open_shards(Path(folder)) for folder in self.by_name.values() if isinstance(folder, str)]
            num_tokens = sum(part.num_tokens for part in shards)
            return (
                {"reads": list(map(str, self.sources)), "tokens": num_tokens},
                num_tokens,
                shards[0].tokenizer.vocab.size,
            )
        data, default = describe_text(self.corpus), default_vocab_size(self.corpus.text_bytes)
        vocab = self.tokenizer.vocab.size if self.tokenizer else self.new_tokenizer_args[1] or default
        return data, data.get("estimated_tokens") or data.get("tokens_at_least", 0), vocab

    def source_record(self, corpus: Corpus) -> dict[str, Any]:
        """Everything that the shards depend on, as written to source.json."""
        return {
            "data": list(map(str, self.sources)),
            "bytes": corpus.total_bytes,
            **self.data_options.corpus_options,
            "tokenizer": self.tokenizer.fingerprint if self.tokenizer is not None else self.new_tokenizer_args,
            "held_out": self.data_options.held_out,
            **({"salient": "default"} if self.marks_salient else {}),
            **({"add_words": True} if self.data_options.add_words else {}),
        }

    def make_shards(
        self, folder: Path, check_tokenizer_fn: Callable[[Tokenizer], None] = lambda _: None
    ) -> dict[str, str]:
        """Return the folders of shards by source. Text becomes FOLDER/data, or FOLDER/data/SOURCE in a mix.

        `check_tokenizer_fn` can refuse a tokenizer before the text is tokenized.
        """
        given = {name: source for name, source in self.by_name.items() if isinstance(source, str)}
        texts = {name: source for name, source in self.by_name.items() if isinstance(source, Corpus)}
        if self.corpus is None:
            return given
        check_same_source(folder / "source.json", self.source_record(self.corpus))
        made = {name: folder / "data" / name for name in texts}
        missing = [
            name for name, path in made.items() if not is_shards_folder(path) or find_shard_damage(path) is not None
        ]
        for name in made.keys() - missing:
            remove_finished_journal(made[name])
        if missing:
            tokenizer = self.tokenizer or train_run_tokenizer(folder, self.corpus, *self.new_tokenizer_args)
            if self.data_options.add_words:
                tokenizer = extend_word_tokenizer(tokenizer, self.corpus.texts())
            check_tokenizer_fn(tokenizer)
            if self.marks_salient:
                say("Names, numbers and dates are marked as salient; `firth prepare --salient` can mark other spans.")
            salient = load_salient_finder("default") if self.marks_salient else None
            for name in missing:
                write_shards(texts[name], tokenizer, made[name], self.data_options.held_out, salient)
        return {name: given.get(name) or str(made[name]) for name in self.by_name}


def open_data_source(
    sources: list[str | Path],
    tokenizer_path: str | Path | None,
    data_options: DataOptions,
    new_tokenizer_args: list[Any],
    marks_salient: bool = False,
    named_sources: Mapping[str, str] | None = None,
) -> DataSource:
    """Open text or shards with a given tokenizer; `named_sources` are the sources of a mix."""
    paths: dict[str, list[str | Path]] = {name: [path] for name, path in (named_sources or {}).items()} or {"": sources}
    shards = {
        name: str(given[0]) for name, given in paths.items() if len(given) == 1 and is_shards_folder(Path(given[0]))
    }
    for folder in shards.values():
        check_shard_tokenizer(Path(folder), tokenizer_path)
    text_paths = [path for name, given in paths.items() if name not in shards for path in given]
    corpus = Corpus(text_paths, **data_options.corpus_options) if text_paths else None
    by_name = {
        name: shards[name] if name in shards else Corpus(given, **data_options.corpus_options)
        for name, given in paths.items()
    }
    tokenizer = load_tokenizer(Path(tokenizer_path)) if tokenizer_path is not None else None
    if tokenizer is None and shards:
        tokenizer = open_shards(Path(next(iter(shards.values())))).tokenizer
    return DataSource(
        sources, tokenizer_path, data_options, new_tokenizer_args, marks_salient, corpus, tokenizer, by_name
    )


def parse_named_sources(sources: Sequence[str | Path]) -> dict[str, str]:
    """The sources of a mix by name, from NAME=TEXT, NAME=SHARDS or several folders of shards; empty without a mix."""
    pairs = [str(source).partition("=") for source in sources]
    named = [bool(equals) and not Path(source).exists() for source, (_, equals, _) in zip(sources, pairs, strict=True)]
    if not any(named):
        several = len(sources) > 1 and all(is_shards_folder(source) for source in sources)
        pairs = [(Path(source).resolve().name, "=", str(source)) for source in sources] if several else []
    elif not all(named):
        raise UserError(f"--data {sources[named.index(False)]} has no name, the others have. Write NAME=PATH.")
    by_name = {name: path for name, _, path in pairs}
    if len(by_name) < len(pairs):
        raise UserError("Two --data have the same name. Write --data a=a.txt --data b=b.txt.")
    for name, path in by_name.items():
        if Path(name).name != name:
            raise UserError(
                f"--data {shorten(name)}={path}: {quote(name)} cannot name a folder. Use letters and digits."
            )
    return by_name


def check_same_source(file: Path, source: dict[str, Any]) -> None:
    """Write source.json; refuse to resume a run on another text or with other options of reading it."""
    saved = read_object(file) if file.is_file() else source
    if changed := [
        f"{name}: {saved.get(name)} -> {source.get(name)}"
        for name in {**source, **saved}
        if saved.get(name) != source.get(name)
    ]:
        raise UserError(
            "Cannot resume: text or options differ: " + "; ".join(changed) + ". "
            "Give the same text and options, start over with --overwrite, or name another --output-dir."
        )
    write_json(file, source)


def train_run_tokenizer(folder: Path, corpus: Corpus, kind: str, vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train a tokenizer in the run's folder, unless it is there already."""
    path = folder / "tokenizer"
    if find_corruption(path) is not None:
        size = vocab_size or default_vocab_size(corpus.text_bytes, kind)
        with atomic_folder(path, "tokenizer") as temporary:
            normalize = corpus.cleaner.normalize
            train_tokenizer(corpus.texts(), kind, size, lowercase, normalize=normalize).save(temporary)
    return load_tokenizer(path)
