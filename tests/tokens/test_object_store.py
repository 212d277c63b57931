"""Text and shards on object storage: servers in this process stand in for S3 and for Google's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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


class Bucket(NamedTuple):
    """A bucket, and the file system of fsspec that it is in."""

    url: str
    filesystem: Any


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run moto's S3 in this process; yield the environment of its clients."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


@contextmanager
def gcs_server() -> Iterator[dict[str, str]]:
    """Run an emulator of Google's storage in this process; yield the environment of its clients."""
    library = pytest.importorskip("gcp_storage_emulator.server", reason="pip install gcsfs gcp-storage-emulator")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = library.create_server("localhost", port, in_memory=True)
    server.start()
    yield {
        "STORAGE_EMULATOR_HOST": f"http://localhost:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of a bucket over gRPC, with TLS
        "FSSPEC_GCS_TOKEN": "anon",
    }
    server.stop()


SERVERS = {"s3": (s3_server, "s3fs"), "gs": (gcs_server, "gcsfs")}


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    serve, library = SERVERS[request.param]
    with serve() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pytest.importorskip(library)
        import fsspec

        fsspec.config.set_conf_env(fsspec.config.conf)
        filesystem = fsspec.filesystem(request.param)
        filesystem.mkdir("bucket")
        yield Bucket(f"{request.param}://bucket", filesystem)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS[:50], "wordpiece", 300)


@pytest.fixture
def text(bucket: Bucket, tmp_path: Path) -> list[Path]:
    """The same files here and in the bucket."""
    (tmp_path / "text").mkdir()
    files = [tmp_path / "text" / "a.jsonl", tmp_path / "text" / "b.csv"]
    files[0].write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS[:100]))
    files[1].write_text("text\n" + "\n".join(TEXTS[100:]) + "\n")
    for file in files:
        bucket.filesystem.put_file(str(file), f"bucket/text/{file.name}")
    bucket.filesystem.pipe_file("bucket/text/notes.bin", b"\0")
    return files


def test_a_commit_in_a_bucket(bucket: Bucket) -> None:
    store = open_store(f"{bucket.url}/work")
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
    bucket: Bucket,
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
    urls = [f"{bucket.url}/text"] if dies_after else [f"{bucket.url}/text/{file.name}" for file in text]
    shards = f"{bucket.url}/shards"
    if dies_after:
        with pytest.raises(KeyboardInterrupt):
            prepare_by_tasks(urls, tokenizer, shards, ShuffledEngine(0, dies_after), **options)
    prepare_by_tasks(urls, tokenizer, shards, ShuffledEngine(1), resume=bool(dies_after), **options)
    bucket.filesystem.invalidate_cache()
    bucket.filesystem.get("bucket/shards/", str(tmp_path / "copy") + "/", recursive=True)
    assert contents(tmp_path / "copy") == contents(tmp_path / "one")
    assert not bucket.filesystem.exists("bucket/.shards.tasks"), "the work folder is gone"
    open_shards(tmp_path / "copy")


def test_what_is_not_there(bucket: Bucket, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{bucket.url}/nothing: nothing to read"):
        prepare_by_tasks([f"{bucket.url}/nothing"], tokenizer, tmp_path / "s", ShuffledEngine(0), 0.1)
    with pytest.raises(UserError, match="Protocol not known: nostore"):
        prepare_by_tasks(["nostore://bucket"], tokenizer, tmp_path / "s", ShuffledEngine(0), 0.1)
