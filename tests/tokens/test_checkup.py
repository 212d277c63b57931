"""What is in a text: numbers that can be counted by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from firth.text import Document, text_fingerprint
from firth.tokens import checkup as checkup_module
from firth.tokens.checkup import DocumentSample, LengthHistogram, check_documents, entropy_bits, fit_heaps, fit_zipf


def facts(*texts: str) -> dict[str, Any]:
    return check_documents([Document(text, f"{i}.txt") for i, text in enumerate(texts)]).facts()


def found(name: str, *texts: str) -> dict[str, Any] | None:
    return next((item for item in facts(*texts)["suspicious"] if item["name"] == name), None)


def test_counts() -> None:
    text = facts("the cat\nthe dog", "a né\n\ncat")
    assert (text["documents"], text["words"], text["types"], text["once"]) == (2, 7, 5, 3)
    assert text["characters"] == 15 + 9
    assert text["bytes"] == 15 + 10
    assert (text["lines"], text["blank_lines"], text["paragraphs"]) == (5, 1, 3)
    assert text["document_words"]["largest"] == 4
    assert text["document_words"]["mean"] == 3.5
    assert text["type_token_ratio"] == 5 / 7
    assert text["type_token_ratio_1000"] is None
    assert text["frequent"][:2] == [{"word": "cat", "count": 2}, {"word": "the", "count": 2}]
    assert text["entropy"] == pytest.approx(2 * (2 / 7) * math.log2(7 / 2) + 3 * (1 / 7) * math.log2(7))
    assert text["words_are_exact"]


def test_nothing_breaks_without_words() -> None:
    text = facts("!!!")
    assert (text["words"], text["types"], text["entropy"], text["zipf"]["exponent"]) == (0, 0, 0.0, None)
    assert text["scripts"] == {}


def test_scripts_are_shares_of_the_letters() -> None:
    assert facts("abc, 123", "где") == facts("abc, 123", "где")
    assert facts("abc, 123", "где")["scripts"] == {"Latin": 0.5, "Cyrillic": 0.5}


def test_duplicates_and_near_duplicates() -> None:
    words = [f"word{i}" for i in range(60)]
    near = [*words[:-1], "other"]
    text = facts(" ".join(words), "something else", " ".join(words), " ".join(words), " ".join(near))
    assert text["duplicates"] == 2
    assert text["duplicate_share"] == 0.4
    assert (text["near_duplicates"]["documents"], text["near_duplicates"]["of"]) == (1, 3)
    assert text["near_duplicates"]["examples"][0]["source"] == "4.txt"


def test_longest_and_emptiest_know_their_source() -> None:
    text = facts(*("word " * n for n in range(1, 21)))
    assert [d["words"] for d in text["longest"]] == list(range(20, 10, -1))
    assert text["longest"][0]["source"] == "19.txt"
    assert [d["words"] for d in text["emptiest"]] == list(range(1, 11))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("control characters", "a bell\x07 rings"),
        ("replacement characters", "caf\ufffd"),
        ("mojibake", "cafÃ© au lait"),
        ("mojibake", "itâ€™s"),
        ("mojibake", "“it’s naïve – где 😀”".encode().decode("cp1252", "ignore")),
        ("mojibake", "где".encode().decode("latin-1")),
        ("invisible characters", "zero\u200bwidth"),
        ("private characters", "\ue001"),
        ("HTML", "one<br/>two &amp; three"),
        ("web addresses", "see https://example.org/a"),
        ("e-mail addresses", "write to a.b@example.org"),
        ("words cut at a line end", "be-\nginning"),
        ("very long words", "a" * 41),
        ("not normalised", "cafe\u0301"),
        ("hardly text", "12 34 56 78 ab"),
    ],
)
def test_suspicious_things(name: str, text: str) -> None:
    item = found(name, "A clean text.", text)
    assert item is not None
    assert (item["count"] >= 1, item["documents"], item["examples"][0]["source"]) == (True, 1, "1.txt")


def test_clean_text_is_not_suspicious() -> None:
    texts = [
        "Château, É. Ñandú: “so”, he said – ‘à la carte’ at 20°C…",
        "Ça va? NÃO É! São Tomé",
        "Дом и мир.",
        "日本語の本",
    ]
    assert facts(*texts)["suspicious"] == []


def test_how_often_and_where() -> None:
    item = found("replacement characters", "\ufffd a \ufffd", "b", "c \ufffd")
    assert item is not None
    assert (item["count"], item["documents"]) == (3, 2)
    assert [example["source"] for example in item["examples"]] == ["0.txt", "2.txt"]


def test_boilerplate_is_found_and_documents_of_one_line_are_not_it() -> None:
    pages = [f"Story {i} begins here.\nAll rights reserved." for i in range(6)]
    assert facts(*pages)["repeated_lines"] == [{"line": "All rights reserved.", "documents": 6}]
    assert facts(*["All rights reserved."] * 6)["repeated_lines"] == []
    assert facts(*["Ha! All rights reserved.\n" * 6])["repeated_lines"] == []


def test_entropy() -> None:
    assert entropy_bits(np.array([1, 1, 1, 1])) == 2.0
    assert entropy_bits(np.array([5])) == 0.0
    assert entropy_bits(np.array([1]), np.array([8])) == 3.0


def test_zipf_finds_the_exponent() -> None:
    counts = np.array([int(1e6 / rank**0.9) for rank in range(1, 5001)])
    fitted = fit_zipf(counts, np.ones_like(counts))
    assert fitted["exponent"] == pytest.approx(0.9, abs=0.01)
    assert fitted["from_rank"] >= 10
    assert fitted["points"][0] == [1, 1_000_000]


def test_heaps_finds_the_exponent() -> None:
    fitted = fit_heaps([(n, round(5 * n**0.6)) for n in (10, 1000, 2000, 4000, 8000, 16000, 10**6)])
    assert fitted["exponent"] == pytest.approx(0.6, abs=0.01)
    assert fitted["factor"] == pytest.approx(5, rel=0.05)
    assert fit_heaps([(10, 5)])["exponent"] is None


def test_lengths() -> None:
    lengths = LengthHistogram()
    lengths.add(list(range(1, 101)))
    assert (lengths.quantile(0.05), lengths.quantile(0.5), lengths.quantile(0.95)) == (5, 50, 95)
    lengths.add([])
    lengths.add([123_456])
    assert lengths.largest == 123_456
    assert max(lengths.counts) == 123_000


def test_the_sample_is_all_or_a_part_and_does_not_depend_on_order() -> None:
    documents = [Document(f"document {i:04}", str(i)) for i in range(200)]

    def sampled(order: list[Document], budget: int) -> set[str]:
        sample = DocumentSample(budget)
        for document in order:
            sample.add(text_fingerprint(document.text), document)
            assert sample.characters <= budget
        return {d.document.source for d in sample.documents.values()}

    assert len(sampled(documents, 10_000)) == 200
    some = sampled(documents, 13 * 50)
    assert len(some) == 50
    assert sampled(random.Random(0).sample(documents, 200), 13 * 50) == some


def test_long_documents_are_cut_in_the_sample_and_keep_their_length() -> None:
    sample = DocumentSample(10**6)
    sample.add(b"x", Document("word " * 50_000, "a", word_starts=(0, 5, 249_990)))
    only = sample.documents[b"x"]
    assert (len(only.document.text), only.characters) == (checkup_module.SAMPLE_DOCUMENT_CHARS, 250_000)
    assert only.document.word_starts == (0, 5)


def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup_module, "MAX_DISTINCT_WORDS", 1000)
    monkeypatch.setattr(checkup_module, "MAX_DISTINCT_DOCUMENTS", 400)
    monkeypatch.setattr(checkup_module, "BATCH_CHARS", 1000)
    documents = [Document(f"the number {i} is {i * i}", str(i)) for i in range(3000)]
    read = check_documents(documents + documents[:1000])
    assert len(read.word_counts.counts) <= 1010
    assert len(read.document_counts.counts) <= 401
    text = read.facts()
    assert (text["documents"], text["words"]) == (4000, 20_000)
    assert not text["words_are_exact"]
    assert abs(text["types"] - 5950) < 0.2 * 5950
    assert abs(text["duplicates"] - 1000) < 0.25 * 1000
    assert {item["word"] for item in text["frequent"][:3]} == {"the", "number", "is"}


def test_batches_do_not_change_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text {i} about {i % 7}\n\nand more\x07" for i in range(50)]
    whole = facts(*texts)
    monkeypatch.setattr(checkup_module, "BATCH_CHARS", 10)
    assert facts(*texts) == whole
