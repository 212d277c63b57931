"""The result of `firth check` as one self-contained HTML page: advice first, then tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firth.core.chart import Axis, Chart, Row, Series, line_chart, row_chart
from firth.core.console import format_count
from firth.core.html import HtmlPage
from firth.lab.check import MAX_USEFUL_EPOCHS, TOKENS_PER_PARAMETER, CorpusCheck
from firth.lab.check_text import (
    FIT_COLUMNS,
    LEAK_COLUMNS,
    chosen_fit,
    corpus_stat_rows,
    escape_and_truncate,
    finding_rows,
    fit_row,
    leak_example_rows,
    leak_rows,
    worst_split_rows,
)
from firth.tokens.fertility import TokenizerFit

MAX_FREQUENT_WORDS = 15  # rows of the table of frequent words
MIN_VISIBLE_SHARE = 0.001  # smaller shares are merged into "others"


def save_check_page(check: CorpusCheck, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_check_page(check).save(path)


def make_check_page(check: CorpusCheck) -> HtmlPage:
    """Return a page with advice, the text, findings, tokenizers and models."""
    page = HtmlPage("Check of a corpus", "check")
    page.add_paragraph(check.reading)
    page.add_fragment("check.html.j2", "advice", check.advice)
    if check.commands:
        page.add_code("\n".join(check.commands), "Commands for this text and machine.")
    add_corpus_section(page, check.text)
    add_findings_section(page, check.text)
    if check.leaks:
        add_leaks_section(page, check.leaks)
    if check.fits:
        add_tokenizers_section(page, check)
        add_models_section(page, check)
    return page


def add_corpus_section(page: HtmlPage, corpus_stats: dict[str, Any]) -> None:
    page.add_heading("The text")
    page.add_facts(corpus_stat_rows(corpus_stats))
    if len(shares := merge_small_shares(corpus_stats["scripts"])) > 1:
        page.add_chart(share_chart(shares), "Of the letters, the share of each script.")
    page.add_chart(
        zipf_chart(corpus_stats["zipf"]),
        "Zipf's law: how often a word occurs, by its rank. Natural text falls with an exponent near 1; a flat or "
        "broken line is a sign of lists, codes or text that was copied many times.",
    )
    page.add_chart(
        heaps_chart(corpus_stats["heaps"]),
        "Heaps' law: different words against all words. The steeper, the more words are missing from a vocabulary; a "
        "step is a sign of a part in another language or of another kind.",
    )
    page.add_chart(
        quantile_chart(corpus_stats["document_words"]), "Words of a document: the share of documents up to this length."
    )
    share = 100 / max(corpus_stats["words"], 1)
    rows = [
        (escape_and_truncate(w["word"]), w["count"], f"{share * w['count']:.2f}%")
        for w in corpus_stats["frequent"][:MAX_FREQUENT_WORDS]
    ]
    page.add_table(["word", "times", "of all words"], rows, "The most frequent words.")


def add_findings_section(page: HtmlPage, corpus_stats: dict[str, Any]) -> None:
    page.add_heading("To look at")
    if rows := finding_rows(corpus_stats, len(corpus_stats["repeated_lines"])):
        page.add_table(["", "times", "documents", "for example"], rows)
        page.add_table(
            ["", "usual cause", "source"],
            [(item["name"], item["meaning"], item["examples"][0]["source"]) for item in corpus_stats["suspicious"]],
        )
    else:
        page.add_paragraph("Nothing suspicious was found.")
    columns = ["words", "characters", "source", "begins"]
    for name, caption in (("longest", "The longest documents."), ("emptiest", "The emptiest documents.")):
        rows = [
            (d["words"], d["characters"], d["source"], escape_and_truncate(d["text"], 60)) for d in corpus_stats[name]
        ]
        page.add_table(columns, rows, caption)
    if near := corpus_stats["near_duplicates"]["examples"]:
        copies = [(item["source"], escape_and_truncate(item["text"], 80)) for item in near]
        page.add_table(["source", "begins"], copies, "Near duplicates of an earlier document.")
    if words := corpus_stats["long_words"]:
        page.add_table(
            ["word", "source"], [(escape_and_truncate(w["word"], 80), w["source"]) for w in words], "The longest words."
        )


def add_leaks_section(page: HtmlPage, leaks: dict[str, Any]) -> None:
    page.add_heading("Labelled examples in the text")
    page.add_paragraph(
        "An example is word for word in the text when all of its 13-grams of words are, ignoring case and punctuation. "
        "Examples of 5 to 12 words are compared as a whole; shorter ones are not compared."
    )
    page.add_facts(leak_rows(leaks))
    if rows := leak_example_rows(leaks["found"]):
        page.add_table(LEAK_COLUMNS, rows, "The worst of them, each with the document that has most of it.")


def add_tokenizers_section(page: HtmlPage, check: CorpusCheck) -> None:
    page.add_heading("Tokenizers")
    sample = check.sample
    documents = format_count(sample["measured_documents"], "document")
    held_out = " that none of them was trained on" if sample["measured_apart"] else ""
    page.add_paragraph(
        f"Trained on a sample of {sample['characters']:,} characters ({sample['share']:.1%} of the text), measured on "
        f"{documents}{held_out}. Unknown: share of the tokens. Lost: characters that decoding does not restore. "
        "Unused: share of the vocabulary that the sample does not use. 95% seen: 95% of the tokens that are used occur "
        "at least this often in the whole text. The star marks the advice above."
    )
    page.add_table(FIT_COLUMNS, [fit_row(fit, fit.name == check.chosen) for fit in check.fits])
    for sentence in check.left_out:
        page.add_paragraph(f"Left out: {sentence}")
    page.add_chart(
        fertility_chart(check.fits), "Pieces per word by vocabulary size: the fewer, the more text fits into a row."
    )
    page.add_chart(row_length_chart(check.fits), "Documents that fit uncut into a row, by row length in tokens.")
    for fit in [*(fit for fit in check.fits if fit.given and fit.name != check.chosen), chosen_fit(check)]:
        page.add_table(["word", "times", "pieces", "as"], worst_split_rows(fit), f"Words that {fit.name} splits worst.")
        for name, counts in (("unknown to", fit.unknown_texts), ("lost by", fit.lost_characters)):
            if counts:
                shown = ", ".join(f"{escape_and_truncate(text, 20)} ({n:,})" for text, n in counts)
                page.add_paragraph(f"Most often {name} {fit.name}: {shown}.")


def add_models_section(page: HtmlPage, check: CorpusCheck) -> None:
    page.add_heading("Models")
    rows = [
        (m["name"], m["architecture"], m["parameters"], f"{m['epochs']:.1f}", "fits" if m["fits"] else "")
        for m in check.models
    ]
    page.add_table(
        ["preset", "architecture", "parameters", "epochs", ""],
        rows,
        f"With the vocabulary of {check.chosen}: epochs over this text for {TOKENS_PER_PARAMETER} tokens per "
        f"parameter. Up to {MAX_USEFUL_EPOCHS} epochs, repeated text is nearly worth new text.",
    )


# --- charts --------------------------------------------------------------------------------------------------------


def merge_small_shares(shares: dict[str, float]) -> dict[str, float]:
    """Return the visible shares, the rest merged into "others".

    >>> merge_small_shares({"Latin": 0.75, "Greek": 0.2495, "Thai": 0.0005})
    {'Latin': 0.75, 'Greek': 0.2495}
    """
    visible = {name: share for name, share in list(shares.items())[:7] if share >= MIN_VISIBLE_SHARE}
    rest = sum(shares.values()) - sum(visible.values())
    return {**visible, "others": rest} if rest >= MIN_VISIBLE_SHARE else visible


def share_chart(shares: dict[str, float]) -> Chart:
    """Return a bar for each share, the largest on top."""
    rows = [Row(name, share) for name, share in shares.items()]
    return row_chart(
        rows,
        Axis("share of the letters", low=0.0, high=1.0, format=format_share, tick_format=format_share),
        columns=("", "share", ""),
    )


def format_share(value: float) -> str:
    """
    >>> format_share(0.2), format_share(0.98765)
    ('20%', '98.77%')
    """
    return f"{100 * value:.4g}%"


def zipf_chart(zipf: dict[str, Any]) -> Chart:
    series = [Series("words", to_points(zipf["points"]))]
    if zipf["exponent"] is not None:
        ends = [float(zipf["from_rank"]), float(zipf["to_rank"])]
        fitted = [(rank, zipf["factor"] * rank ** -zipf["exponent"]) for rank in ends]
        name = f"rank to the power of −{zipf['exponent']:.2f}"
        series.append(Series(name, fitted, line="dashed", has_marks=False))
    return line_chart(series, Axis("rank of the word", 10), Axis("times", 10))


def heaps_chart(heaps: dict[str, Any]) -> Chart:
    points = to_points(heaps["points"])
    series = [Series("different words", points)]
    if heaps["exponent"] is not None:
        words = [words for words, _ in points if words >= 1000]
        fitted = [(end, heaps["factor"] * end ** heaps["exponent"]) for end in (words[0], words[-1])]
        name = f"words to the power of {heaps['exponent']:.2f}"
        series.append(Series(name, fitted, line="dashed", has_marks=False))
    return line_chart(series, Axis("words read", 10), Axis("different words", 10))


def to_points(points: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


def quantile_chart(lengths: dict[str, float]) -> Chart:
    """Return the cumulative distribution of document lengths, at a few quantiles."""
    names = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "largest": 1.0}
    points = [(max(lengths[name], 1), share) for name, share in names.items()]
    y = Axis("share of the documents", low=0.0, high=1.05, format=format_share, tick_format=format_share)
    return line_chart([Series("", points, dot="circle")], Axis("words", 10), y)


def fertility_chart(fits: Sequence[TokenizerFit]) -> Chart:
    kinds = dict.fromkeys(fit.kind for fit in fits if not fit.given)
    series = [
        Series(
            kind,
            sorted((fit.vocab_size, fit.pieces_per_word) for fit in fits if fit.kind == kind and not fit.given),
            dot="circle",
        )
        for kind in kinds
    ]
    for fit in (fit for fit in fits if fit.given):
        point = (fit.vocab_size, fit.pieces_per_word)
        series.append(Series(f"{fit.name} (given)", [point], line="none", dot="diamond"))
    return line_chart(series, Axis("tokens in the vocabulary", 2), Axis("pieces per word"))


def row_length_chart(fits: Sequence[TokenizerFit]) -> Chart:
    best = {fit.kind: fit for fit in sorted(fits, key=lambda fit: fit.vocab_size) if not fit.given}
    shown = [*best.values(), *(fit for fit in fits if fit.given)]
    series = [Series(fit.name, list(fit.rows.items()), dot="circle") for fit in shown]
    y = Axis("share of the documents", low=0.0, high=1.05, format=format_share, tick_format=format_share)
    return line_chart(series, Axis("tokens in a row", 2), y)
