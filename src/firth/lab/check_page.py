"""The result of `firth check` as one self-contained HTML page: advice first, then tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firth.core.console import format_count
from firth.core.html import INK_SENTINEL_COLOUR, PLOT_COLOURS, HtmlPage, add_plot_legend, escape_mathtext, make_axes
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_FREQUENT_WORDS = 15  # rows of the table of frequent words
MIN_VISIBLE_SHARE = 0.001  # smaller shares are merged into "others"


def save_check_page(check: CorpusCheck, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_check_page(check).save(path)


def make_check_page(check: CorpusCheck) -> HtmlPage:
    """Return a page with advice, the text, findings, tokenizers and models."""
    page = HtmlPage("Check of a corpus", "check.css.j2", "check")
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
    page.add_table(["", ""], corpus_stat_rows(corpus_stats))
    if len(shares := merge_small_shares(corpus_stats["scripts"])) > 1:
        page.add_figure(share_bar_plot(shares), "Of the letters, the share of each script.")
    page.add_figure(
        zipf_plot(corpus_stats["zipf"]),
        "Zipf's law: how often a word occurs, by its rank. Natural text falls with an exponent near 1; a flat or "
        "broken line is a sign of lists, codes or text that was copied many times.",
    )
    page.add_figure(
        heaps_plot(corpus_stats["heaps"]),
        "Heaps' law: different words against all words. The steeper, the more words are missing from a vocabulary; a "
        "step is a sign of a part in another language or of another kind.",
    )
    page.add_figure(
        quantile_plot(corpus_stats["document_words"]), "Words of a document: the share of documents up to this length."
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
    page.add_table(["", ""], leak_rows(leaks))
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
    page.add_figure(
        fertility_plot(check.fits), "Pieces per word by vocabulary size: the fewer, the more text fits into a row."
    )
    page.add_figure(row_length_plot(check.fits), "Documents that fit uncut into a row, by row length in tokens.")
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


# --- plots --------------------------------------------------------------------------------------------------------


def merge_small_shares(shares: dict[str, float]) -> dict[str, float]:
    """Return the visible shares, the rest merged into "others".

    >>> merge_small_shares({"Latin": 0.75, "Greek": 0.2495, "Thai": 0.0005})
    {'Latin': 0.75, 'Greek': 0.2495}
    """
    visible = {name: share for name, share in list(shares.items())[:7] if share >= MIN_VISIBLE_SHARE}
    rest = sum(shares.values()) - sum(visible.values())
    return {**visible, "others": rest} if rest >= MIN_VISIBLE_SHARE else visible


def share_bar_plot(shares: dict[str, float]) -> Figure:
    """Return a horizontal bar plot, the largest share on top."""
    items = list(shares.items())
    figure, axes = make_axes("share of the letters", "")
    figure.set_figheight(1.1 + 0.3 * len(items))
    names = [name for name, _ in items][::-1]
    values = [share for _, share in items][::-1]
    bars = axes.barh(names, values, color=PLOT_COLOURS[0], height=0.6)
    axes.bar_label(bars, [f" {value:.2%}" for value in values], color=INK_SENTINEL_COLOUR, fontsize=9)
    axes.set_xlim(0, 1.12)
    axes.grid(visible=False)
    return figure


def zipf_plot(zipf: dict[str, Any]) -> Figure:
    figure, axes = make_axes("rank of the word", "times")
    ranks, heights = points_to_columns(zipf["points"])
    axes.loglog(ranks, heights, color=PLOT_COLOURS[0], linewidth=2, label="words")
    if zipf["exponent"] is not None:
        ends = np.array([zipf["from_rank"], zipf["to_rank"]], dtype=float)
        line = zipf["factor"] * ends ** -zipf["exponent"]
        axes.loglog(
            ends, line, color=PLOT_COLOURS[1], linestyle="--", label=f"rank to the power of −{zipf['exponent']:.2f}"
        )
    add_plot_legend(axes)
    return figure


def heaps_plot(heaps: dict[str, Any]) -> Figure:
    figure, axes = make_axes("words read", "different words")
    words, types = points_to_columns(heaps["points"])
    axes.loglog(words, types, color=PLOT_COLOURS[0], linewidth=2, label="different words")
    if heaps["exponent"] is not None:
        ends = words[words >= 1000][[0, -1]].astype(float)
        line = heaps["factor"] * ends ** heaps["exponent"]
        axes.loglog(
            ends, line, color=PLOT_COLOURS[1], linestyle="--", label=f"words to the power of {heaps['exponent']:.2f}"
        )
    add_plot_legend(axes)
    return figure


def points_to_columns(points: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(points, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def quantile_plot(lengths: dict[str, float]) -> Figure:
    """Return the cumulative distribution of document lengths, at a few quantiles."""
    from matplotlib.ticker import NullFormatter

    figure, axes = make_axes("words", "share of the documents")
    names = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "largest": 1.0}
    axes.plot([max(lengths[n], 1) for n in names], list(names.values()), color=PLOT_COLOURS[0], linewidth=2, marker="o")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(format_whole_number)
    axes.xaxis.set_minor_formatter(
        format_whole_number if lengths["largest"] < 10 * max(lengths["p5"], 1) else NullFormatter()
    )
    axes.set_ylim(0, 1.05)
    return figure


def format_whole_number(value: float, _: float | None = None) -> str:
    return f"{value:,.0f}"


def fertility_plot(fits: Sequence[TokenizerFit]) -> Figure:
    figure, axes = make_axes("tokens in the vocabulary", "pieces per word")
    kinds = list(dict.fromkeys(fit.kind for fit in fits if not fit.given))
    for kind, colour in zip(kinds, cycle(PLOT_COLOURS)):
        line = sorted((fit.vocab_size, fit.pieces_per_word) for fit in fits if fit.kind == kind and not fit.given)
        axes.plot(*zip(*line, strict=True), color=colour, linewidth=2, marker="o", label=kind)
    for fit in (fit for fit in fits if fit.given):
        axes.plot(
            [fit.vocab_size],
            [fit.pieces_per_word],
            "D",
            color=PLOT_COLOURS[5],
            label=escape_mathtext(f"{fit.name} (given)"),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(format_whole_number)
    add_plot_legend(axes)
    return figure


def row_length_plot(fits: Sequence[TokenizerFit]) -> Figure:
    figure, axes = make_axes("tokens in a row", "share of the documents")
    best = {fit.kind: fit for fit in sorted(fits, key=lambda fit: fit.vocab_size) if not fit.given}
    for fit, colour in zip([*best.values(), *(fit for fit in fits if fit.given)], cycle(PLOT_COLOURS)):
        axes.plot(
            list(fit.rows),
            list(fit.rows.values()),
            color=colour,
            linewidth=2,
            marker="o",
            label=escape_mathtext(fit.name),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(format_whole_number)
    axes.set_ylim(0, 1.05)
    add_plot_legend(axes)
    return figure
