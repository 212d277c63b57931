"""Shards by tasks equal those of one process, whatever happens to the tasks."""

from __future__ import annotations

import fcntl
import gzip
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text.test_minhash import alike_signatures, flag_by_definition

from firth.core.errors import UserError
from firth.text import Corpus
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens import prepare as prepare_alone
from firth.tokens.builders import SplitOptions, build_untrained
from firth.tokens.cluster import bucket_dedup, plan
from firth.tokens.cluster import prepare as module
from firth.tokens.cluster.bucket_dedup import (
    band_hashes,
    drop_similar,
    find_candidate_pairs,
    find_repeated,
    group_by_range,
    select_similar,
)
from firth.tokens.cluster.engine import SerialEngine
from firth.tokens.cluster.guard import run_guarded
from firth.tokens.cluster.plan import BLANK_LINE, LINE_END, InputFile, Slice, find_boundary, find_slice, plan_tasks
from firth.tokens.cluster.prepare import prepare_by_tasks
from firth.tokens.cluster.sample import sample_by_tasks
from firth.tokens.cluster.store import (
    FolderStore,
    commit,
    find_commit,
    open_store,
    read_array,
    read_commit,
    read_entry,
    storage_errors,
)
from firth.tokens.cluster.tasks import Spec, Watch, run_task, task_name
from firth.tokens.train import TRAIN_MEMORY_PER_TEXT_BYTE, max_sample_bytes


def make_texts(num: int) -> list[str]:
    """Texts of which every third is nearly the one before it, and every seventh the same as an earlier one."""
    rng, found = np.random.default_rng(0), list[str]()
    for i in range(num):
        words = [f"word{j}" for j in rng.integers(900, size=40)]
        if i % 3 == 2:
            words = [*found[-1].split()[:-1], "other"]
        found.append(found[rng.integers(len(found))] if i % 7 == 6 else " ".join(words))
    return found


TEXTS = make_texts(200)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS[:50], "wordpiece", 300)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each kind, of which two are cut into several tasks."""
    folder = tmp_path_factory.mktemp("source")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "a.jsonl").write_text("\n".join(lines[:80]) + "\n")
    (folder / "b.txt").write_text("\r\n\r\n".join(TEXTS[80:140]) + "\n \n\n\n\ufeffmarked\n\n")
    (folder / "c.csv").write_text("text\n" + "\n".join(TEXTS[140:150]) + "\n")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[150:170]).encode()))
    (folder / "e.jsonl").write_text(
        json.dumps({"words": ["我", "喜欢"]}) + "\n" + json.dumps({"text_a": TEXTS[171], "text_b": TEXTS[172]}) + "\n"
    )
    (folder / "f.jsonl").write_text('{"text": " "}\n')
    return folder


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TASK_BYTES", 8000)
    monkeypatch.setattr(plan, "SCAN_BYTES", 64)
    monkeypatch.setattr(module, "INPUT_BYTES_PER_RANGE", 20_000)
    monkeypatch.setattr("firth.tokens.cluster.tasks.MAX_ROW_GAP", 2)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def inputs(source: Path) -> list[Path]:
    return [source / "b.txt", source]


OPTIONS: dict[str, Any] = {"held_out_share": 0.2, "dedup": "near"}


@pytest.fixture(scope="module")
def alone(tokenizer: Tokenizer, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "s"
    prepare_alone(Corpus(inputs(source)), tokenizer, folder, **OPTIONS)
    return folder


def make(tokenizer: Tokenizer, source: Path, folder: Path, engine: Any = None, **options: Any) -> dict[str, Any]:
    options = {**OPTIONS, "document_timeout": 0, **options}
    return prepare_by_tasks(inputs(source), tokenizer, folder, engine or SerialEngine(), **options)


# --- the plan -------------------------------------------------------------------------------------------------------


def test_what_is_cut() -> None:
    names = ["a.jsonl", "a.txt", "a.jsonl.gz", "a.csv", "a.parquet"]
    files = [InputFile(name, 1000, "", True) for name in names]
    assert [len(plan_tasks([file], task_bytes=100)) for file in files] == [10, 10, 1, 1, 1]
    assert len(plan_tasks([files[1]], documents="file", task_bytes=100)) == 1
    assert len(plan_tasks([files[0]], encoding="utf-16", task_bytes=100)) == 1
    in_folder = [InputFile("d/a.txt", size, "", False) for size in (2**22, 2**22 + 1)]
    assert [len(plan_tasks([file], task_bytes=2**20)) for file in in_folder] == [1, 5], "one document, or many"
    small = [InputFile("a.csv", 30, "", True)] * 10
    assert [len(task) for task in plan_tasks(small, task_bytes=100)] == [3, 3, 3, 1]
    assert plan_tasks([InputFile("a.jsonl", 0, "", True)]) == [[Slice(0, 0, 0)]]


@pytest.mark.parametrize("pattern", [LINE_END, BLANK_LINE])
def test_slices_are_the_file(pattern: Any) -> None:
    """Whatever the offsets: nothing is lost, nothing is twice, and each slice begins after a boundary."""
    rng = np.random.default_rng(0)
    data = b"".join(rng.choice([b"word ", b"\n", b"\n\n", b"\r\n", b"\xef\xbb\xbf", b" \n"], size=400))

    def read(start: int, stop: int) -> bytes:
        return data[start:stop]

    for step in (7, 50, 333, 5000):
        edges = [find_boundary(read, len(data), i, pattern) for i in [*range(0, len(data), step), len(data)]]
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (0, len(data))
        for edge in edges[1:-1]:
            end = b"\n" if pattern is LINE_END else (b"\n\n", b"\n\r\n")
            assert edge == len(data) or data[:edge].endswith(end)
            assert not data[edge:].startswith(b"\xef\xbb\xbf")
        slices = [find_slice(read, len(data), i, min(i + step, len(data)), pattern) for i in range(0, len(data), step)]
        expected = [ends for ends in pairwise(edges) if ends[0] < ends[1]]
        assert [ends for ends in slices if ends[0] < ends[1]] == expected


def test_a_file_without_boundaries_is_read_twice() -> None:
    """Not once more for each task: the search of one task for its end, and of each for its beginning."""
    num_read = 0

    def read(start: int, stop: int) -> bytes:
        nonlocal num_read
        num_read += stop - start
        return b"x" * (stop - start)

    size, step = 2**22, 2**18
    slices = [find_slice(read, size, start, start + step, BLANK_LINE) for start in range(0, size, step)]
    assert slices == [(0, size), *[(size, size)] * 15]
    assert num_read < 2.1 * size


# --- commits --------------------------------------------------------------------------------------------------------


def test_a_commit_is_found_if_it_is_whole(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "work"))
    assert find_commit(store, "read-1") is None
    arrays = {"a": np.arange(5, dtype=np.uint16), "b": np.arange(12).reshape(6, 2)}
    entry = commit(store, "read-1", arrays, documents=5)
    assert find_commit(store, "read-1") == entry
    assert entry["documents"] == 5
    assert read_array(store, "read-1", entry, "a").tolist() == [0, 1, 2, 3, 4]
    assert read_array(store, "read-1", entry, "b", 2, 4).tolist() == [[4, 5], [6, 7]]
    assert sorted(p.name for p in (tmp_path / "work").iterdir()) == ["read-1", "read-1.json"]
    data = bytearray((tmp_path / "work" / "read-1").read_bytes())
    data[3] ^= 1
    (tmp_path / "work" / "read-1").write_bytes(data)
    assert find_commit(store, "read-1") is None, "damaged"
    (tmp_path / "work" / "read-1.json").write_text('{"sha2')
    assert find_commit(store, "read-1") is None, "cut off"


# --- deduplication by hash range ------------------------------------------------------------------------------------


def test_a_changed_entry_is_no_commit(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    commit(store, "a", {"x": np.arange(3)}, skipped=[["b", 1]])
    assert find_commit(store, "a")
    entry = json.loads((tmp_path / "a.json").read_text())
    for key in ("arrays", "skipped", "sha256"):
        (tmp_path / "a.json").write_text(json.dumps({k: v for k, v in entry.items() if k != key}))
        assert find_commit(store, "a") is None
        with pytest.raises(UserError, match=r"a\.json does not match its checksum"):
            read_commit(store, "a")


def test_errors_of_a_storage_library_are_one_line() -> None:
    missing = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})
    with pytest.raises(UserError, match=r"^s3://b/a: .*\(Unable to locate credentials\)\. Check its name"):  # noqa: SIM117
        with storage_errors("s3://b/a"):
            raise missing("Unable to locate\ncredentials")
    with pytest.raises(KeyError), storage_errors("s3://b/a"):
        raise KeyError("a")


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends between the opening of the lock file and its lock, and removes the file."""
    file, lock, calls = tmp_path / ".out.lock", fcntl.flock, list[int]()

    def flock(*args: Any) -> None:
        if not calls:
            file.unlink()
        calls.append(1)
        lock(*args)

    monkeypatch.setattr(fcntl, "flock", flock)
    with module.lock_output(tmp_path / "out"):
        assert file.exists()
    assert len(calls) == 2
    assert not file.exists()


@pytest.mark.parametrize("num_ranges", [1, 2, 7])
def test_ranges_find_the_duplicates_of_one_table(num_ranges: int) -> None:
    hashes = np.random.default_rng(0).integers(2**64, size=300, dtype=np.uint64)
    hashes = np.concatenate([hashes, hashes[::3], hashes[::5]])
    order, bounds = group_by_range(hashes, num_ranges)
    assert bounds[0] == 0
    assert bounds[-1] == len(hashes)
    parts = [order[start:stop] for start, stop in pairwise(bounds)]
    found = np.concatenate([find_repeated(hashes[part], part) for part in parts])
    seen: set[int] = set()
    expected = [i for i, value in enumerate(hashes.tolist()) if value in seen or seen.add(value)]
    assert sorted(found.tolist()) == expected


@pytest.mark.parametrize(("num_groups", "num_ranges", "num_tasks"), [(5, 1, 1), (5, 3, 4), (40, 7, 10)])
def test_ranges_drop_what_the_index_drops(num_groups: int, num_ranges: int, num_tasks: int) -> None:
    signatures = np.stack(alike_signatures(500, num_groups))
    bands, documents = band_hashes(signatures).ravel(), np.repeat(np.arange(500), 16)
    order, bounds = group_by_range(bands, num_ranges)
    parts = [order[start:stop] for start, stop in pairwise(bounds)]
    candidates = [find_candidate_pairs(bands[part], documents[part]) for part in parts]
    pairs = np.concatenate([select_similar(found, lambda rows: signatures[rows]) for found in candidates])
    edges = np.linspace(0, 500, num_tasks + 1).astype(int)
    is_dropped = np.zeros(500, bool)
    by_task = [pairs[(pairs[:, 0] >= a) & (pairs[:, 0] < b)] for a, b in pairwise(edges)]
    drop_similar(by_task, is_dropped)
    assert is_dropped.tolist() == flag_by_definition(list(signatures))


def test_equal_bytes_in_other_bands_are_no_bucket() -> None:
    signature = np.tile(np.arange(8, dtype=np.uint8), 16)[None]
    assert len(set(band_hashes(signature).ravel().tolist())) == 16


def test_a_large_bucket_costs_eight_comparisons_a_text() -> None:
    pairs = find_candidate_pairs(np.zeros(1000, np.uint64), np.arange(1000))
    assert len(pairs) == sum(min(i, 8) for i in range(1000))


def test_pairs_are_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_dedup, "COMPARE_BLOCK", 3)
    signatures = np.zeros((8, 128), np.uint8)
    signatures[4:] = 1
    pairs = np.array([[j, i] for j in range(8) for i in range(j)])
    similar = select_similar(pairs, lambda rows: signatures[rows])
    assert similar.tolist() == [pair for pair in pairs.tolist() if (pair[0] < 4) == (pair[1] < 4)]


# --- the same bytes -------------------------------------------------------------------------------------------------


class ShuffledEngine:
    """Runs tasks in a random order, as a cluster would; `dies_after` tasks it is interrupted."""

    def __init__(self, seed: int, dies_after: int | None = None) -> None:
        self.rng, self.dies_after, self.ran = np.random.default_rng(seed), dies_after, list[tuple[str, int]]()

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in self.rng.permutation(len(specs)).tolist():
            if len(self.ran) == self.dies_after:
                raise KeyboardInterrupt
            self.ran.append((specs[index]["kind"], index))
            yield index, run_task(json.loads(json.dumps(specs[index])))


def test_tasks_write_the_bytes_of_one_process(tokenizer: Tokenizer, source: Path, alone: Path, tmp_path: Path) -> None:
    engine = ShuffledEngine(0)
    facts = make(tokenizer, source, tmp_path / "s", engine)
    assert contents(tmp_path / "s") == contents(alone)
    assert Counter(kind for kind, _ in engine.ran) == {"read": 9, "exact": 4, "near": 4, "tokenize": 9}
    assert facts["duplicates"] > 50
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


@pytest.mark.parametrize(
    "options", [{"dedup": "none", "language": ""}, {"dedup": "exact", "normalize": "nfkc,lower", "min_words": 5}]
)
def test_other_options(tokenizer: Tokenizer, source: Path, tmp_path: Path, options: dict[str, Any], capfd: Any) -> None:
    reading = {name: value for name, value in options.items() if name != "dedup"}
    corpus = Corpus(inputs(source), **reading)
    prepare_alone(corpus, tokenizer, tmp_path / "one", 0.2, dedup=options["dedup"])
    make(tokenizer, source, tmp_path / "many", **options)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert " ".join(corpus.describe().split()) in " ".join(capfd.readouterr().err.split())


class LateEngine(ShuffledEngine):
    """Runs the tasks of each stage again after the next stage has begun, as machines that were thought lost do."""

    earlier: Sequence[Spec] = ()

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
        for spec in self.earlier:
            store, name = open_store(spec["store"]), task_name(spec["kind"], spec["task"])
            again = module_tasks()[spec["kind"]](spec, store, Watch())
            entry = read_entry(store, name)
            for key, array in again.arrays.items():
                assert np.array_equal(array, read_array(store, name, entry, key)), (name, key)
        self.earlier = list(specs)
        yield from super().run(specs)


def test_a_late_task_computes_the_same(tokenizer: Tokenizer, source: Path, alone: Path, tmp_path: Path) -> None:
    make(tokenizer, source, tmp_path / "s", LateEngine(0))
    assert contents(tmp_path / "s") == contents(alone)


@pytest.mark.parametrize("dies_after", [3, 10, 13, 20])
def test_a_restart_skips_what_is_committed(
    tokenizer: Tokenizer, source: Path, alone: Path, tmp_path: Path, dies_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, source, tmp_path / "s", first := ShuffledEngine(1, dies_after))
    assert not (tmp_path / "s").exists()
    computed = list[tuple[str, int]]()
    for kind, function in list(module_tasks().items()):
        monkeypatch.setitem(module_tasks(), kind, recording(function, computed))
    make(tokenizer, source, tmp_path / "s", ShuffledEngine(2), resume=True)
    assert contents(tmp_path / "s") == contents(alone)
    assert not set(first.ran) & set(computed), "nothing is computed twice"
    assert len(first.ran) + len(computed) == 9 + 4 + 4 + 9


def module_tasks() -> dict[str, Any]:
    return sys.modules["firth.tokens.cluster.tasks"].TASKS


def recording(function: Any, computed: list[tuple[str, int]]) -> Any:
    def run(spec: Spec, store: Any, watch: Watch) -> Any:
        computed.append((spec["kind"], spec["task"]))
        return function(spec, store, watch)

    return run


def test_damaged_results_are_computed_again(tokenizer: Tokenizer, source: Path, alone: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, source, tmp_path / "s", ShuffledEngine(1, 20))
    work = tmp_path / ".s.tasks"
    (work / "read-000003").write_bytes(b"damaged")
    next(work.glob("tokenize-*.json")).write_text("{")
    make(tokenizer, source, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(alone)


def test_stopped_while_it_merges(
    tokenizer: Tokenizer, source: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, merged = module.read_tokenized, list[str]()

    def read(store: Any, name: str, *rest: Any) -> Any:
        if len(merged) == 9:
            raise KeyboardInterrupt
        merged.append(name)
        return real(store, name, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "read_tokenized", read)
        make(tokenizer, source, tmp_path / "s")
    again = list[str]()
    monkeypatch.setattr(module, "read_tokenized", lambda *args: again.append(args[1]) or real(*args))
    make(tokenizer, source, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(alone)
    assert again[0] == "tokenize-000004", "four tasks were merged"


def test_a_changed_text_or_option_is_refused(tokenizer: Tokenizer, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, copy, tmp_path / "s", ShuffledEngine(1, 5))
    with pytest.raises(UserError, match=r"these settings differ \(dedup: near -> exact\)"):
        make(tokenizer, copy, tmp_path / "s", resume=True, dedup="exact")
    (copy / "c.csv").write_text("text\nanother\n")
    with pytest.raises(UserError, match="the files of the text have changed"):
        make(tokenizer, copy, tmp_path / "s", resume=True)


def test_a_text_that_changes_meanwhile_is_an_error(tokenizer: Tokenizer, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy)

    class ChangingEngine(ShuffledEngine):
        def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
            if specs[0]["kind"] == "tokenize":
                (copy / "c.csv").write_text("text\nanother\n")
            yield from super().run(specs)

    with pytest.raises(UserError, match=r"c\.csv has changed since the work began"):
        make(tokenizer, copy, tmp_path / "s", ChangingEngine(0))


def test_errors_of_the_text_name_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:60]) + "{broken\n")
    with pytest.raises(UserError, match=r"a\.jsonl from byte [\d,]+:\d+: "):
        prepare_by_tasks([file], tokenizer, tmp_path / "s", SerialEngine(), 0.1, document_timeout=0)
    for path in ("-", "pydocs", "hf:owner/name"):
        with pytest.raises(UserError, match="--engine ray reads files, folders and object storage"):
            prepare_by_tasks([path], tokenizer, tmp_path / "s", SerialEngine(), 0.1)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(UserError, match="no documents, only empty text"):
        prepare_by_tasks([tmp_path / "empty.txt"], tokenizer, tmp_path / "s", SerialEngine(), 0.1, document_timeout=0)


@pytest.mark.parametrize("kind", ["byte-bpe", "unigram"])
def test_a_sample_is_that_of_one_process(source: Path, tmp_path: Path, kind: str) -> None:
    like = build_untrained(kind, SplitOptions())
    max_memory = 20_000 * TRAIN_MEMORY_PER_TEXT_BYTE[json.loads(like.to_str())["model"]["type"]]
    alone = train_tokenizer(Corpus(inputs(source)).texts(), kind, 400, max_memory=max_memory, seed=3)
    options: dict[str, Any] = {"seed": 3, "document_timeout": 0}
    sample = sample_by_tasks(
        inputs(source), tmp_path / "t", ShuffledEngine(0), max_sample_bytes(like, max_memory), **options
    )
    assert 15_000 < sum(len(passage.encode()) for passage in sample) <= 20_000
    assert train_tokenizer(sample, kind, 400).fingerprint == alone.fingerprint
    assert list(tmp_path.iterdir()) == []


class SkippingEngine(ShuffledEngine):
    """Skips the first text in the second reading, as if it hung only then."""

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, spec in enumerate(specs):
            yield index, run_task(spec, Watch([("text", 1)] if spec["kind"] == "sample" else []))


def test_a_sample_never_takes_other_passages_than_it_drew(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gives other passages than in the first reading"):
        sample_by_tasks(inputs(source), tmp_path / "t", SkippingEngine(0), 5_000, document_timeout=0)


def test_a_machine_that_does_not_see_the_folder(tmp_path: Path) -> None:
    spec = {"kind": "read", "task": 0, "store": str(tmp_path / "nowhere"), "plan": "plan.json", "inputs": ""}
    with pytest.raises(UserError, match=r"does not see .*nowhere\. Name an --output-dir on a file system that all"):
        run_task(spec)


# --- documents that hang or kill ------------------------------------------------------------------------------------


# A module that Python imports at its start. In the process that the guard of a task starts, a document "HANG read ..."
# hangs the task that reads it, and "KILL tokenize ..." kills the one that tokenizes it.
STOPPING = """
import os, sys, time
if any("child_main" in word for word in sys.orig_argv):
    from firth.text import filters
    from firth.tokens import encode
    def stop(text, stage):
        if f"HANG {stage}" in text: time.sleep(1000)
        if f"KILL {stage}" in text: os.kill(os.getpid(), 9)
    def normalize(self, text, real=filters.TextCleaner.normalize_text):
        stop(text, "read")
        return real(self, text)
    def encode_documents(self, documents, real=encode.DocumentEncoder._encode_documents):
        [stop(d.text, "tokenize") for d in documents]
        return real(self, documents)
    filters.TextCleaner.normalize_text = normalize
    encode.DocumentEncoder._encode_documents = encode_documents
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "tokenize"])
def test_a_document_that_hangs_or_kills_is_skipped(
    stage: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three documents the second hangs and the third kills its process: only the first stays, and all is said."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(STOPPING)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), *sys.path])
    lines = [json.dumps({"text": f"{word} {stage} heron"}) + "\n" for word in ("OK", "HANG", "KILL")]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    facts = prepare_by_tasks([tmp_path / "a.jsonl"], tokenizer, tmp_path / "s", SerialEngine(), 0.0, document_timeout=3)
    assert facts["documents"] == 1
    assert [s["reason"] for s in facts["skipped"]] == ["no progress within 3 s", "the process died (SIGKILL)"]
    names = ["HANG read heron", "KILL read heron"] if stage == "read" else [":2", ":3"]
    assert all(s["document"].endswith(name) for s, name in zip(facts["skipped"], names, strict=True))


def test_a_guarded_task_is_the_same_task(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a heron"}\n{"text": "another"}\n')
    stat = (tmp_path / "a.jsonl").stat()
    slices = [[str(tmp_path / "a.jsonl"), stat.st_size, str(stat.st_mtime_ns), True, 0, stat.st_size]]
    spec = {"kind": "read", "task": 0, "plan": "plan.json", "inputs": "", "reading": {}, "slices": slices}
    entries = []
    for name, run in (("one", run_task), ("two", lambda given: run_guarded(given, 60.0))):
        store = FolderStore(str(tmp_path / name))
        store.write("plan.json", b"{}")
        entries.append(run({**spec, "store": store.url, "dedup": "near", "num_ranges": 2}))
    assert entries[0] == entries[1]
    assert entries[0]["documents"] == 2
