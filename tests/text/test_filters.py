"""Hold-out depends on the text alone, duplicates are exact, and filters count what they do."""

from __future__ import annotations

from firth.text.filters import (
    HELD_OUT_FRACTION,
    ExactDedup,
    TextCleaner,
    is_held_out,
    replace_lone_surrogates,
    text_fingerprint,
)

TEXTS = [f"document {i}" for i in range(20_000)]


def test_held_out_takes_its_share() -> None:
    assert abs(sum(is_held_out(text, HELD_OUT_FRACTION) for text in TEXTS) / len(TEXTS) - 0.05) < 0.006
    assert not any(is_held_out(text, 0.0) for text in TEXTS)
    assert all(is_held_out(text, 1.0) for text in TEXTS)


def test_held_out_is_nested_and_stays_the_same_in_every_version() -> None:
    assert all(is_held_out(text, 0.05) for text in TEXTS if is_held_out(text, 0.02))
    assert [i for i in range(60) if is_held_out(TEXTS[i], 0.05)] == [45]


def test_fingerprint_is_of_the_exact_text() -> None:
    assert len(text_fingerprint("a")) == 16
    assert text_fingerprint("a") == text_fingerprint("a")
    assert len({text_fingerprint(text) for text in ("a", "A", "a ", "a\n", "")}) == 5


def test_half_characters_do_not_stop_a_hash_and_are_repaired() -> None:
    assert isinstance(is_held_out("a\ud800b", 0.5), bool)
    assert text_fingerprint("a\ud800b") != text_fingerprint("ab")
    assert replace_lone_surrogates("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert replace_lone_surrogates("a\U0001f600b") == "a\U0001f600b"


def test_unique_counts_duplicates() -> None:
    unique = ExactDedup()
    assert [unique.is_new(text) for text in ("a", "b", "a", "a ", "a")] == [True, True, False, True, False]
    assert unique.num_duplicates == 2


def test_cleaning_counts_by_reason() -> None:
    cleaning = TextCleaner(min_words=2, max_characters=10, normalize="lower")
    assert [cleaning.should_keep(sides) for sides in (["a b"], ["a"], ["a b", "c"], ["aaaaa bbbbb"])] == [1, 0, 0, 0]
    assert cleaning.dropped_by_reason == {"under 2 words": 2, "over 10 characters": 1}
    assert [cleaning.normalize_text(text) for text in ("ab", "AB", "Ab")] == ["ab", "ab", "ab"]
    assert cleaning.change_counts == {"texts": 2, "characters": 3}
    assert cleaning.summary_lines()[-1] == "2 changed by --normalize lower (3 characters replaced)"
    cleaning.reset_counts()
    assert cleaning.summary_lines() == []


def test_nothing_is_cleaned_by_default() -> None:
    cleaning = TextCleaner()
    assert cleaning.normalize_text("E\u0301 \ufb01") == "E\u0301 \ufb01"
    assert cleaning.should_keep(["x" * 10**6])
    assert cleaning.should_keep(["\u0000"])
