"""A check-up in a terminal: the numbers that matter as tables, then the advice."""

from __future__ import annotations

from typing import Any

from rich.padding import Padding
from rich.text import Text

from firth.console import out, show_table
from firth.lab.check import Check
from firth.tokens.fertility import Fit

SHOWN = 5  # of a list

FIT_COLUMNS = [
    "tokenizer",
    "pieces per word",
    "words split",
    "bytes per token",
    "characters per token",
    "unknown",
    "lost",
    "unused",
    "95% seen",
]


LEAK_COLUMNS = ["example", "of it", "stands in", "text"]


def print_check(check: Check) -> None:
    """Text, suspicious things, tokenizers, advice on stdout."""
    show_table("The text", ["", ""], text_rows(check.text))
    if rows := finding_rows(check.text, SHOWN):
        show_table("To look at", ["", "times", "documents", "for example"], rows)
    if check.fits:
        columns = [name.replace(" ", "\n", 1) for name in FIT_COLUMNS]
        show_table("Tokenizers", columns, [fit_row(fit, fit.name == check.chosen) for fit in check.fits])
        fit = next((fit for fit in check.fits if fit.given), None) or chosen_fit(check)
        show_table(f"Words that {fit.name} splits worst", ["word", "times", "pieces", "as"], worst_rows(fit)[:SHOWN])
    if check.leaks:
        show_table("Labelled examples in the text", ["", ""], leak_rows(check.leaks))
    if check.leaks and check.leaks["found"]:
        show_table("Some of them", LEAK_COLUMNS, found_rows(some_of(check.leaks["found"])))
    for sentence in check.left_out:
        out.print(Text(f"Left out: {sentence}", "dim"))
    for advice in check.advice:
        out.print(Text.assemble((advice.about, "bold"), ": ", advice.do))
        out.print(Padding(Text(advice.why, "dim"), (0, 0, 0, 2)))


def chosen_fit(check: Check) -> Fit:
    return next(fit for fit in check.fits if fit.name == check.chosen)


def text_rows(text: dict[str, Any]) -> list[tuple[str, str]]:
    """The main numbers of a text, as a person reads them."""
    words, lines, near = text["document_words"], text["line_characters"], text["near_duplicates"]
    scripts = list(text["scripts"].items())
    about = "" if text["words_are_exact"] else "about "
    return [
        ("documents", f"{text['documents']:,}"),
        ("words", f"{text['words']:,}"),
        ("characters, bytes", f"{text['characters']:,}, {text['bytes']:,}"),
        ("scripts", ", ".join(f"{name} {share:.1%}" for name, share in scripts[:SHOWN] if share >= 0.0005) or "none"),
        ("words of a document", f"median {words['median']:,}, mean {words['mean']:,.0f}, longest {words['largest']:,}"),
        ("paragraphs, lines", f"{text['paragraphs']:,}, {text['lines']:,}"),
        ("characters of a line", f"median {lines['median']:,}, longest {lines['largest']:,}"),
        ("different words", f"{about}{text['types']:,}, {text['once']:,} of them once"),
        ("type/token ratio", f"{text['type_token_ratio']:.3f}, in 1,000 words {number(text['type_token_ratio_1000'])}"),
        ("entropy", f"{text['entropy']:.2f} bits per word, {text['character_entropy']:.2f} per character"),
        ("Zipf, Heaps exponents", f"{number(text['zipf']['exponent'])}, {number(text['heaps']['exponent'])}"),
        ("most frequent words", " ".join(item["word"] for item in text["frequent"][:10])),
        ("duplicates", f"{text['duplicates']:,} ({text['duplicate_share']:.1%})"),
        ("near duplicates", f"{near['documents']:,} of {near['of']:,} different documents ({near['share']:.1%})"),
    ]


def number(value: float | None) -> str:
    """
    >>> number(0.98765), number(None)
    ('0.988', '–')
    """
    return "–" if value is None else f"{value:.3f}"


def finding_rows(text: dict[str, Any], shown: int) -> list[tuple[str, str, str, str]]:
    """Suspicious things and repeated lines."""
    found: list[tuple[str, str, str, str]] = [
        (item["name"], f"{item['count']:,}", f"{item['documents']:,}", visible(item["examples"][0]["text"]))
        for item in text["suspicious"]
    ]
    return found + [
        ("repeated line", "–", f"{line['documents']:,}", visible(line["line"]))
        for line in text["repeated_lines"][:shown]
    ]


def visible(text: str, longest: int = 48) -> str:
    r"""A text of one line in which what cannot be seen is spelled.

    >>> visible("a\x07b\u200bc")
    'a\\x07b\\u200bc'
    """
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return spelled if len(spelled) <= longest else spelled[: longest - 1] + "…"


def leak_rows(leaks: dict[str, Any]) -> list[tuple[str, str]]:
    """How many examples of a labelled file stand in the text."""
    return [
        ("file", f"{leaks['file']} ({leaks['task']})"),
        ("examples", f"{leaks['examples']:,}, of which {leaks['compared']:,} can be compared"),
        ("word for word in the text", f"{leaks['exact']:,}"),
        ("half or more of their runs of words", f"{leaks['near']:,}"),
        ("together", f"{leaks['exact'] + leaks['near']:,} ({leaks['share']:.1%})"),
    ]


def some_of(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst of some leaks, and where there are any, two that are not word for word."""
    near = [leak for leak in found if leak["share"] < 1][:2]
    return found[: SHOWN - len(near)] + near if near and near[0] not in found[:SHOWN] else found[:SHOWN]


def found_rows(found: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [
        (visible(str(leak["id"]), 24), f"{leak['share']:.0%}", leak["source"], visible(leak["text"])) for leak in found
    ]


def fit_row(fit: Fit, chosen: bool) -> tuple[str, ...]:
    """A line of the table that compares tokenizers."""
    return (
        fit.name + (f" ({fit.kind}, {fit.vocab_size:,})" if fit.given else "") + (" *" if chosen else ""),
        f"{fit.pieces_per_word:.2f}",
        f"{fit.words_split:.1%}",
        f"{fit.bytes_per_token:.2f}",
        f"{fit.characters_per_token:.2f}",
        f"{fit.unknown:.2%}",
        f"{fit.lost:.2%}",
        f"{fit.unused:.1%}",
        f"{fit.times_seen:,.0f} ×",
    )


def worst_rows(fit: Fit) -> list[tuple[str, str, str, str]]:
    return [(visible(w["word"]), f"{w['count']:,}", f"{w['pieces']:.1f}", visible(w["split"])) for w in fit.worst]
