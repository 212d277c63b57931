"""Datasets as the Hub has them, from a local folder; nothing here needs a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from firth.core.errors import UserError
from firth.text.corpus import Corpus, Document, TextCount
from firth.text.hub import HubAddress, parse_hub_address

datasets = pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for split, texts in {"train": ["one", "tw\u2028o", ""], "test": ["three"]}.items():
        table = pa.table({"text": texts, "body": [text.upper() for text in texts], "n": list(range(len(texts)))})
        pq.write_table(table, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    return tmp_path


def refusal(path: str) -> str:
    with pytest.raises(UserError) as e:
        list(Corpus([path]))
    return str(e.value)


def test_addresses() -> None:
    assert parse_hub_address("hf:a/b") == HubAddress("a/b", (), None)
    assert parse_hub_address("hf:b:train#body") == HubAddress("b", ("train",), "body")
    for wrong in ("hf:", "hf:a:b:c:d", "hf:a::b", "hf:#text"):
        with pytest.raises(UserError, match="not the address of a dataset"):
            parse_hub_address(wrong)


def test_a_split_is_read_row_by_row(folder: Path) -> None:
    path = f"hf:{folder}"
    corpus = Corpus([path])
    assert list(corpus) == list(corpus) == [Document("one", f"{path}:row 1"), Document("tw\u2028o", f"{path}:row 2")]
    assert corpus.describe() == f"2 documents: {path} (train) with one document per row; 1 empty and skipped"
    assert corpus.total_bytes >= 0


def test_split_config_and_column_are_named(folder: Path) -> None:
    assert [d.text for d in Corpus([f"hf:{folder}:test#body"])] == ["THREE"]
    assert [d.text for d in Corpus([f"hf:{folder}:default:test"])] == ["three"]
    assert [d.text for d in Corpus([f"hf:{folder}:default"], columns={"text": "body"})] == ["ONE", "TW\u2028O"]


def test_missing_datasets_raise(folder: Path) -> None:
    assert refusal(f"hf:{folder}:tets").endswith("no split 'tets'. Did you mean 'test'?")
    assert refusal(f"hf:{folder}:defalt:test").endswith("no configuration 'defalt'. Did you mean 'default'?")
    assert "row 1: column 'n' holds 0, which is not text" in refusal(f"hf:{folder}#n")
    assert "row 1: no column 'texts'; there are: text, body, n" in refusal(f"hf:{folder}#texts")
    (folder / "data" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 no more")
    assert "A dataset folder has .parquet, .jsonl, .csv or .txt files" in refusal(f"hf:{folder}")


def test_the_size_of_a_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the split, where it is published; otherwise the documents are counted, and a long text not to its end."""
    corpus = Corpus([f"hf:{folder}"])
    assert (corpus.is_size_known, corpus.share_read) == (False, None)
    assert corpus.counted == TextCount(2, len("onetw\u2028o".encode()), is_all=True)
    monkeypatch.setattr("firth.text.corpus.MAX_COUNTED_BYTES", 2)
    assert Corpus([f"hf:{folder}"]).counted == TextCount(1, 3, is_all=False)
    (folder / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n  - {name: body, dtype: string}\n"
        "  - {name: n, dtype: int64}\n  splits:\n  - {name: train, num_bytes: 60, num_examples: 3}\n"
        "  - {name: test, num_bytes: 20, num_examples: 1}\n  dataset_size: 80\n---\n"
    )
    corpus = Corpus([f"hf:{folder}:test"])
    assert (corpus.is_size_known, corpus.text_bytes) == (True, 20)
    corpus = Corpus([f"hf:{folder}"])
    next(iter(corpus))
    assert corpus.share_read == pytest.approx(1 / 3)


def test_several_configurations(folder: Path) -> None:
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- {config_name: small, data_files: data/test-*}\n- {config_name: large, data_files: data/train-*}\n---\n"
    )
    assert "has several configurations (small, large). Name one" in refusal(f"hf:{folder}")
    assert [d.text for d in Corpus([f"hf:{folder}:small"])] == ["three"]


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand a long story")

    monkeypatch.setattr(datasets, "get_dataset_config_names", unreachable)
    message = refusal("hf:owner/name")
    assert message.startswith("hf:owner/name: cannot be read (ConnectionError: Couldn't reach the Hub). Check the name")
    assert "the network" in message
