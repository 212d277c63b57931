"""The result of `firth check` in a terminal: tables, then the advice."""

from __future__ import annotations

from typing import Any

from rich.padding import Padding
from rich.text import Text

from firth.core.console import show_table, stdout_console
from firth.lab.check import CorpusCheck
from firth.tokens.fertility import TokenizerFit

MAX_TABLE_ROWS = 5  # rows of a list in the terminal

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


LEAK_COLUMNS = ["example", "share", "source", "text"]


def print_check(check: CorpusCheck) -> None:
    """Print statistics, findings, tokenizers and advice to stdout."""
    show_table("The text", ["", ""], corpus_stat_rows(check.text))
    if rows := finding_rows(check.text, MAX_TABLE_ROWS):
        show_table("To look at", ["", "times", "documents", "for example"], rows)
    if check.fits:
        columns = [name.replace(" ", "\n", 1) for name in FIT_COLUMNS]
        show_table("Tokenizers", columns, [fit_row(fit, fit.name == check.chosen) for fit in check.fits])
        fit = next((fit for fit in check.fits if fit.given), None) or chosen_fit(check)
        show_table(
            f"Words that {fit.name} splits worst",
            ["word", "times", "pieces", "as"],
            worst_split_rows(fit)[:MAX_TABLE_ROWS],
        )
    if check.leaks:
        show_table("Labelled examples in the text", ["", ""], leak_rows(check.leaks))
    if check.leaks and check.leaks["found"]:
        show_table("Some of them", LEAK_COLUMNS, leak_example_rows(select_leaks_to_print(check.leaks["found"])))
    for sentence in check.left_out:
        stdout_console.print(Text(f"Left out: {sentence}", "dim"))
    for advice in check.advice:
        stdout_console.print(Text.assemble((advice.about, "bold"), ": ", advice.do))
        stdout_console.print(Padding(Text(advice.why, "dim"), (0, 0, 0, 2)))
    if check.commands:
        stdout_console.print(Text("Commands for this text and machine", "bold"))
    for command in check.commands:
        stdout_console.print(Text(command), soft_wrap=True)  # a wrapped line cannot be pasted


def chosen_fit(check: CorpusCheck) -> TokenizerFit:
    return next(fit for fit in check.fits if fit.name == check.chosen)


def corpus_stat_rows(corpus_stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the main statistics of a text, formatted."""
    words = corpus_stats["document_words"]
    lines = corpus_stats["line_characters"]
    near = corpus_stats["near_duplicates"]
    scripts = list(corpus_stats["scripts"].items())
    approximately = "" if corpus_stats["words_are_exact"] else "about "
    ratio_1000 = format_decimal(corpus_stats["type_token_ratio_1000"])
    return [
        ("documents", f"{corpus_stats['documents']:,}"),
        ("words", f"{corpus_stats['words']:,}"),
        ("characters, bytes", f"{corpus_stats['characters']:,}, {corpus_stats['bytes']:,}"),
        (
            "scripts",
            ", ".join(f"{name} {share:.1%}" for name, share in scripts[:MAX_TABLE_ROWS] if share >= 0.0005) or "none",
        ),
        ("words of a document", f"median {words['median']:,}, mean {words['mean']:,.0f}, longest {words['largest']:,}"),
        ("paragraphs, lines", f"{corpus_stats['paragraphs']:,}, {corpus_stats['lines']:,}"),
        ("characters of a line", f"median {lines['median']:,}, longest {lines['largest']:,}"),
        ("different words", f"{approximately}{corpus_stats['types']:,}, {corpus_stats['once']:,} of them once"),
        ("type/token ratio", f"{corpus_stats['type_token_ratio']:.3f}, in 1,000 words {ratio_1000}"),
        (
            "entropy",
            f"{corpus_stats['entropy']:.2f} bits per word, {corpus_stats['character_entropy']:.2f} per character",
        ),
        (
            "Zipf, Heaps exponents",
            f"{format_decimal(corpus_stats['zipf']['exponent'])}, {format_decimal(corpus_stats['heaps']['exponent'])}",
        ),
        ("most frequent words", " ".join(item["word"] for item in corpus_stats["frequent"][:10])),
        ("duplicates", f"{corpus_stats['duplicates']:,} ({corpus_stats['duplicate_share']:.1%})"),
        ("near duplicates", f"{near['documents']:,} of {near['of']:,} different documents ({near['share']:.1%})"),
    ]


def format_decimal(value: float | None) -> str:
    """Return three decimals, or a dash for None.

    >>> format_decimal(0.98765), format_decimal(None)
    ('0.988', '–')
    """
    return "–" if value is None else f"{value:.3f}"


def finding_rows(corpus_stats: dict[str, Any], max_lines: int) -> list[tuple[str, str, str, str]]:
    """Return table rows for suspicious patterns and repeated lines."""
    rows: list[tuple[str, str, str, str]] = [
        (item["name"], f"{item['count']:,}", f"{item['documents']:,}", escape_and_truncate(item["examples"][0]["text"]))
        for item in corpus_stats["suspicious"]
    ]
    return rows + [
        ("repeated line", "–", f"{line['documents']:,}", escape_and_truncate(line["line"]))
        for line in corpus_stats["repeated_lines"][:max_lines]
    ]


def escape_and_truncate(text: str, max_chars: int = 48) -> str:
    r"""Return a text on one line, with unprintable characters escaped.

    >>> escape_and_truncate("a\x07b\u200bc")
    'a\\x07b\\u200bc'
    """
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return escaped if len(escaped) <= max_chars else escaped[: max_chars - 1] + "…"


def leak_rows(leaks: dict[str, Any]) -> list[tuple[str, str]]:
    """Return table rows for the number of labelled examples that occur in the text."""
    return [
        ("file", f"{leaks['file']} ({leaks['task']})"),
        ("examples", f"{leaks['examples']:,}, of which {leaks['compared']:,} can be compared"),
        ("word for word in the text", f"{leaks['exact']:,}"),
        ("half or more of their n-grams", f"{leaks['near']:,}"),
        ("total", f"{leaks['exact'] + leaks['near']:,} ({leaks['share']:.1%})"),
    ]


def select_leaks_to_print(leaks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worst leaks, with two that are not word for word where there are any."""
    near = [leak for leak in leaks if leak["share"] < 1][:2]
    return (
        leaks[: MAX_TABLE_ROWS - len(near)] + near
        if near and near[0] not in leaks[:MAX_TABLE_ROWS]
        else leaks[:MAX_TABLE_ROWS]
    )


def leak_example_rows(leaks: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    return [
        (
            escape_and_truncate(str(leak["id"]), 24),
            f"{leak['share']:.0%}",
            leak["source"],
            escape_and_truncate(leak["text"]),
        )
        for leak in leaks
    ]


def fit_row(fit: TokenizerFit, is_chosen: bool) -> tuple[str, ...]:
    """Return a row of the table that compares tokenizers."""
    return (
        fit.name + (f" ({fit.kind}, {fit.vocab_size:,})" if fit.given else "") + (" *" if is_chosen else ""),
        f"{fit.pieces_per_word:.2f}",
        f"{fit.words_split:.1%}",
        f"{fit.bytes_per_token:.2f}",
        f"{fit.characters_per_token:.2f}",
        f"{fit.unknown:.2%}",
        f"{fit.lost:.2%}",
        f"{fit.unused:.1%}",
        f"{fit.times_seen:,.0f} ×",
    )


def worst_split_rows(fit: TokenizerFit) -> list[tuple[str, str, str, str]]:
    return [
        (escape_and_truncate(w["word"]), f"{w['count']:,}", f"{w['pieces']:.1f}", escape_and_truncate(w["split"]))
        for w in fit.worst
    ]
