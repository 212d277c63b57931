"""Normal forms: variants of one word become one string, in a corpus and in a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from firth.text.normalize import NORMALIZERS, apply_normal_forms, repair_word_script
from firth.tokens import train_tokenizer
from firth.tokens.builders import NORMAL_FORM_STEPS
from firth.tokens.checkup import find_spelling_variants

TEXTS = [
    "Ng’ombe wa ng'ombe, ‘quoted’ and dogs’ tails",
    "o\u0323\u0300’kan e\u0301tude A\u030a \ufb01t",
    "well\u2010known 3\u22122 a \u2212 b x\u2011y",
    "in\u00advisible\u200b \ufeffmarks\u200e",
    "plain ascii",
    "Η ΟΔΟΣ ΤΗΣ, Σ. ΣΑΣ",
]


@pytest.mark.parametrize("name", NORMAL_FORM_STEPS)
def test_a_step_of_a_tokenizer_does_what_the_corpus_does(name: str) -> None:
    for text in TEXTS:
        assert NORMAL_FORM_STEPS[name]().normalize_str(text) == NORMALIZERS[name](text)


def test_apostrophes_and_hyphens_inside_words_only() -> None:
    joined = [apply_normal_forms(text, ["apostrophes", "hyphens", "invisible"]) for text in TEXTS]
    assert joined[0] == "Ng'ombe wa ng'ombe, ‘quoted’ and dogs’ tails"
    assert joined[2] == "well-known 3\u22122 a \u2212 b x-y"
    assert joined[3] == "invisible marks"


@pytest.mark.parametrize(
    ("word", "repaired"),
    [
        ("c\u0442\u043e\u043b", "\u0441\u0442\u043e\u043b"),  # Latin c in a Cyrillic word
        ("h\u043euse", "house"),  # Cyrillic o in a Latin word
        ("\u0391thens", "Athens"),  # Greek Alpha
        ("\u0394T", "\u0394T"),  # as many of both scripts
        ("\u03b1helix", "\u03b1helix"),  # alpha is no Latin letter
    ],
)
def test_lookalikes_follow_the_script_of_the_word(word: str, repaired: str) -> None:
    assert repair_word_script(word) == repaired


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_a_tokenizer_remembers_the_normal_forms_of_its_text(kind: str, tmp_path: Path) -> None:
    texts = ["the ng'ombe and the well-known caf\u00e9"] * 20
    tokenizer = train_tokenizer(texts, kind, 400, normalize="nfc,apostrophes,hyphens,invisible,lookalikes")
    tokenizer.save(tmp_path)
    variant = "the ng\u2019om\u00adbe and the well\u2010known cafe\u0301"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(variant) == tokenizer.encode(texts[0])
    assert theirs(variant).input_ids == theirs(texts[0]).input_ids


def test_spellings_of_a_word_are_found() -> None:
    counts = {"ng'ombe": 9, "ng\u2019ombe": 4, "x\u2019y": 3, "\u00e9t\u00e9": 2, "e\u0301te\u0301": 5, "h\u043euse": 1}
    found = {variant["form"]: variant for variant in find_spelling_variants(counts)}
    assert {form: (v["words"], v["occurrences"]) for form, v in found.items()} == {
        "nfc": (1, 2),
        "apostrophes": (1, 4),
        "lookalikes": (1, 1),
    }
    assert found["apostrophes"]["examples"] == [{"ng'ombe": 9, "ng\u2019ombe": 4}]
