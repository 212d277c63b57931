"""Text and shards on object storage: moto's server stands in for S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokens.test_cluster import ShuffledEngine, contents, make_texts

from firth.core.errors import UserError
from firth.text import Corpus
from firth.tokens import Tokenizer, open_shards, train_tokenizer
from firth.tokens import prepare as prepare_alone
from firth.tokens.cluster import plan
from firth.tokens.cluster import prepare as module
from firth.tokens.cluster.prepare import prepare_by_tasks
from firth.tokens.cluster.store import ObjectStore, commit, find_commit, open_store, read_array

pytestmark = pytest.mark.slow
TEXTS = make_texts(120)


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """The file system of an S3 with one bucket, in this process."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import s3fs

        filesystem = s3fs.S3FileSystem()
        filesystem.mkdir("bucket")
        yield filesystem
    server.stop()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS[:50], "wordpiece", 300)


@pytest.fixture
def text(bucket: Any, tmp_path: Path) -> list[Path]:
    """The same files here and in the bucket."""
    (tmp_path / "text").mkdir()
    files = [tmp_path / "text" / "a.jsonl", tmp_path / "text" / "b.csv"]
    files[0].write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS[:100]))
    files[1].write_text("text\n" + "\n".join(TEXTS[100:]) + "\n")
    for file in files:
        bucket.put_file(str(file), f"bucket/text/{file.name}")
    bucket.pipe_file("bucket/text/notes.bin", b"\0")
    return files


def test_a_commit_in_a_bucket(bucket: Any) -> None:
    store = open_store("s3://bucket/work")
    assert isinstance(store, ObjectStore)
    assert find_commit(store, "read-1") is None
    entry = commit(store, "read-1", {"a": np.arange(6), "none": np.zeros(0)}, documents=6)
    assert find_commit(store, "read-1") == entry
    assert read_array(store, "read-1", entry, "a", 2, 4).tolist() == [2, 3]
    assert len(read_array(store, "read-1", entry, "none")) == 0
    store.clear()
    assert find_commit(store, "read-1") is None
    store.clear()


@pytest.mark.parametrize("dies_after", [None, 9])
def test_the_same_bytes_from_bucket_to_bucket(
    bucket: Any,
    text: list[Path],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dies_after: Any,
) -> None:
    monkeypatch.setattr(plan, "TASK_BYTES", 8000)
    monkeypatch.setattr(module, "INPUT_BYTES_PER_RANGE", 20_000)
    monkeypatch.chdir(tmp_path)
    prepare_alone(Corpus(text), tokenizer, tmp_path / "one", 0.2, dedup="near")
    options: dict[str, Any] = {"held_out_share": 0.2, "dedup": "near", "document_timeout": 0}
    urls = ["s3://bucket/text"] if dies_after else [f"s3://bucket/text/{file.name}" for file in text]
    if dies_after:
        with pytest.raises(KeyboardInterrupt):
            prepare_by_tasks(urls, tokenizer, "s3://bucket/shards", ShuffledEngine(0, dies_after), **options)
    prepare_by_tasks(urls, tokenizer, "s3://bucket/shards", ShuffledEngine(1), resume=bool(dies_after), **options)
    bucket.invalidate_cache()
    bucket.get("bucket/shards/", str(tmp_path / "copy") + "/", recursive=True)
    assert contents(tmp_path / "copy") == contents(tmp_path / "one")
    assert not bucket.exists("bucket/.shards.tasks"), "the work folder is gone"
    open_shards(tmp_path / "copy")


def test_what_is_not_there(bucket: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="s3://bucket/nothing: nothing to read"):
        prepare_by_tasks(["s3://bucket/nothing"], tokenizer, tmp_path / "s", ShuffledEngine(0), 0.1)
    with pytest.raises(UserError, match="Protocol not known: nostore"):
        prepare_by_tasks(["nostore://bucket"], tokenizer, tmp_path / "s", ShuffledEngine(0), 0.1)
