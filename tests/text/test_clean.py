"""Hold-out is a law of the text alone, duplicates are exact, and cleaning counts what it does."""

from __future__ import annotations

from firth.text.clean import HELD_OUT, Cleaning, Unique, fingerprint, held_out, repair

TEXTS = [f"document {i}" for i in range(20_000)]


def test_held_out_takes_its_share() -> None:
    assert abs(sum(held_out(text, HELD_OUT) for text in TEXTS) / len(TEXTS) - 0.05) < 0.006
    assert not any(held_out(text, 0.0) for text in TEXTS)
    assert all(held_out(text, 1.0) for text in TEXTS)


def test_held_out_is_nested_and_stays_the_same_in_every_version() -> None:
    assert all(held_out(text, 0.05) for text in TEXTS if held_out(text, 0.02))
    assert [i for i in range(60) if held_out(TEXTS[i], 0.05)] == [45]


def test_fingerprint_is_of_the_exact_text() -> None:
    assert len(fingerprint("a")) == 16
    assert fingerprint("a") == fingerprint("a")
    assert len({fingerprint(text) for text in ("a", "A", "a ", "a\n", "")}) == 5


def test_half_characters_do_not_stop_a_hash_and_are_repaired() -> None:
    assert isinstance(held_out("a\ud800b", 0.5), bool)
    assert fingerprint("a\ud800b") != fingerprint("ab")
    assert repair("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert repair("a\U0001f600b") == "a\U0001f600b"


def test_unique_counts_duplicates() -> None:
    unique = Unique()
    assert [unique.is_new(text) for text in ("a", "b", "a", "a ", "a")] == [True, True, False, True, False]
    assert unique.duplicates == 2


def test_cleaning_counts_by_reason() -> None:
    cleaning = Cleaning(min_words=2, max_characters=10, normalize="lower")
    assert [cleaning.stays(sides) for sides in (["a b"], ["a"], ["a b", "c"], ["aaaaa bbbbb"])] == [1, 0, 0, 0]
    assert cleaning.dropped == {"under 2 words": 2, "over 10 characters": 1}
    assert [cleaning.normal(text) for text in ("ab", "AB", "Ab")] == ["ab", "ab", "ab"]
    assert cleaning.changed == {"texts": 2, "characters": 3}
    assert cleaning.notes()[-1] == "2 changed by --normalize lower (3 characters replaced)"
    cleaning.forget()
    assert cleaning.notes() == []


def test_nothing_is_cleaned_unless_asked() -> None:
    cleaning = Cleaning()
    assert cleaning.normal("E\u0301 \ufb01") == "E\u0301 \ufb01"
    assert cleaning.stays(["x" * 10**6])
    assert cleaning.stays(["\u0000"])
