"""A check-up as one page of HTML that needs nothing else: advice first, then tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firth.console import count
from firth.lab.check import EPOCHS, TOKENS_PER_PARAMETER, Check
from firth.lab.check_text import (
    FIT_COLUMNS,
    LEAK_COLUMNS,
    chosen_fit,
    finding_rows,
    fit_row,
    found_rows,
    leak_rows,
    text_rows,
    visible,
    worst_rows,
)
from firth.page import COLOURS, INK, Page, axes_of, generator, html, legend, plain
from firth.tokens.fertility import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "check"
FREQUENT = 15  # words
VISIBLE = 0.001  # a smaller share cannot be seen
STYLE = """
body { max-width: 60rem; }
.advice { display: grid; gap: 0.75rem; margin: 1.5rem 0; }
.advice div { padding: 0.8rem 1.1rem; background: var(--card); border-radius: 8px;
  border-left: 4px solid var(--accent); }
.advice h3 { font-size: 0.8125rem; color: var(--quiet); font-weight: 600; margin: 0; }
.advice p { margin: 0.15rem 0 0.3rem; font-weight: 600; }
.advice small { color: var(--quiet); font-size: 0.875rem; line-height: 1.45; display: block; }
td { overflow-wrap: anywhere; }
td:first-child:not(.number) { min-width: 8rem; }
th.number { white-space: normal; vertical-align: bottom; }
"""


def save_page(check: Check, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_page(check).save(path)


def make_page(check: Check) -> Page:
    """Advice, the text, what to look at, tokenizers, models."""
    page = Page("Check-up of a text", STYLE, generator(VERB))
    page.text(check.reading)
    page.markup(advice(check))
    add_text(page, check.text)
    add_findings(page, check.text)
    if check.leaks:
        add_leaks(page, check.leaks)
    if check.fits:
        add_tokenizers(page, check)
        add_models(page, check)
    return page


def advice(check: Check) -> str:
    cards = (
        f"<div><h3>{html(a.about)}</h3><p>{html(a.do)}</p><small>{html(a.why)}</small></div>" for a in check.advice
    )
    return '<div class="advice">' + "\n".join(cards) + "</div>"


def add_text(page: Page, text: dict[str, Any]) -> None:
    page.heading("The text")
    page.table(["", ""], text_rows(text))
    if len(shares := large(text["scripts"])) > 1:
        page.figure(bars(shares), "Of the letters, the share of each script.")
    page.figure(
        zipf_plot(text["zipf"]),
        "Zipf's law: how often a word occurs, by its rank. Natural text falls with an exponent near 1; a flat or "
        "broken line tells of lists, codes or text that was copied many times.",
    )
    page.figure(
        heaps_plot(text["heaps"]),
        "Heaps' law: different words against all words. The steeper, the more words a vocabulary will not know; a step "
        "tells of a part in another language or of another kind.",
    )
    page.figure(quantile_plot(text["document_words"]), "Words of a document: the share of documents up to this length.")
    share = 100 / max(text["words"], 1)
    rows = [(visible(w["word"]), w["count"], f"{share * w['count']:.2f}%") for w in text["frequent"][:FREQUENT]]
    page.table(["word", "times", "of all words"], rows, "The most frequent words.")


def add_findings(page: Page, text: dict[str, Any]) -> None:
    page.heading("To look at")
    if rows := finding_rows(text, len(text["repeated_lines"])):
        page.table(["", "times", "documents", "for example"], rows)
        page.table(
            ["", "what it usually is", "where"],
            [(item["name"], item["meaning"], item["examples"][0]["source"]) for item in text["suspicious"]],
        )
    else:
        page.text("Nothing suspicious was found.")
    columns = ["words", "characters", "where", "begins"]
    for name, caption in (("longest", "The longest documents."), ("emptiest", "The emptiest documents.")):
        rows = [(d["words"], d["characters"], d["source"], visible(d["text"], 60)) for d in text[name]]
        page.table(columns, rows, caption)
    if near := text["near_duplicates"]["examples"]:
        copies = [(item["source"], visible(item["text"], 80)) for item in near]
        page.table(["where", "begins"], copies, "Documents that are nearly the same as one before them.")
    if words := text["long_words"]:
        page.table(["word", "where"], [(visible(w["word"], 80), w["source"]) for w in words], "The longest words.")


def add_leaks(page: Page, leaks: dict[str, Any]) -> None:
    page.heading("Labelled examples in the text")
    page.text(
        "A text is word for word in the documents when all of its runs of 13 words are, whatever their case and "
        "punctuation; one of 5 to 12 words is compared whole, a shorter one not at all."
    )
    page.table(["", ""], leak_rows(leaks))
    if rows := found_rows(leaks["found"]):
        page.table(LEAK_COLUMNS, rows, "The worst of them; where they stand is the document that has most of each.")


def add_tokenizers(page: Page, check: Check) -> None:
    page.heading("Tokenizers")
    sample, on = check.sample, "that none of them was trained on" if check.sample["measured_apart"] else "in all"
    page.text(
        f"Trained on a sample of {sample['characters']:,} characters ({sample['share']:.1%} of the text), measured on "
        f"{count(sample['measured_documents'], 'document')} {on}. Unknown: share of the tokens. Lost: characters that "
        "do not come back. Unused: share of the vocabulary that the sample never needs. 95% seen: how often, at least, "
        "95% of the pieces that are used occur in the whole text. The star is the advice above."
    )
    page.table(FIT_COLUMNS, [fit_row(fit, fit.name == check.chosen) for fit in check.fits])
    for sentence in check.left_out:
        page.text(f"Left out: {sentence}")
    page.figure(
        fertility_plot(check.fits), "Pieces per word by size of the vocabulary: the fewer, the longer a row reaches."
    )
    page.figure(rows_plot(check.fits), "Documents that fit whole into a row, by its length in tokens.")
    for fit in [*(fit for fit in check.fits if fit.given and fit.name != check.chosen), chosen_fit(check)]:
        page.table(["word", "times", "pieces", "as"], worst_rows(fit), f"Words that {fit.name} splits worst.")
        for name, found in (("unknown to", fit.unknown_texts), ("lost by", fit.lost_characters)):
            if found:
                shown = ", ".join(f"{visible(text, 20)} ({n:,})" for text, n in found)
                page.text(f"Most often {name} {fit.name}: {shown}.")


def add_models(page: Page, check: Check) -> None:
    page.heading("Models")
    rows = [
        (m["name"], m["shape"], m["parameters"], f"{m['epochs']:.1f}", "fits" if m["fits"] else "")
        for m in check.models
    ]
    page.table(
        ["preset", "shape", "parameters", "epochs", ""],
        rows,
        f"With the vocabulary of {check.chosen}: how often this text is read for {TOKENS_PER_PARAMETER} tokens per "
        f"parameter. Up to {EPOCHS} epochs teach nearly as much as new text.",
    )


# Plots


def large(shares: dict[str, float]) -> dict[str, float]:
    """The shares that can be seen; the others together are one.

    >>> large({"Latin": 0.75, "Greek": 0.2495, "Thai": 0.0005})
    {'Latin': 0.75, 'Greek': 0.2495}
    """
    kept = {name: share for name, share in list(shares.items())[:7] if share >= VISIBLE}
    rest = sum(shares.values()) - sum(kept.values())
    return {**kept, "others": rest} if rest >= VISIBLE else kept


def bars(shares: dict[str, float]) -> Figure:
    """Shares as lying bars, the largest on top."""
    items = list(shares.items())
    figure, axes = axes_of("share of the letters", "")
    figure.set_figheight(1.1 + 0.3 * len(items))
    names = [name for name, _ in items][::-1]
    values = [share for _, share in items][::-1]
    drawn = axes.barh(names, values, color=COLOURS[0], height=0.6)
    axes.bar_label(drawn, [f" {value:.2%}" for value in values], color=INK, fontsize=9)
    axes.set_xlim(0, 1.12)
    axes.grid(visible=False)
    return figure


def zipf_plot(zipf: dict[str, Any]) -> Figure:
    figure, axes = axes_of("rank of the word", "times")
    ranks, heights = columns_of(zipf["points"])
    axes.loglog(ranks, heights, color=COLOURS[0], linewidth=2, label="words")
    if zipf["exponent"] is not None:
        ends = np.array([zipf["from_rank"], zipf["to_rank"]], dtype=float)
        line = zipf["factor"] * ends ** -zipf["exponent"]
        axes.loglog(ends, line, color=COLOURS[1], linestyle="--", label=f"rank to the power of −{zipf['exponent']:.2f}")
    legend(axes)
    return figure


def heaps_plot(heaps: dict[str, Any]) -> Figure:
    figure, axes = axes_of("words read", "different words")
    words, types = columns_of(heaps["points"])
    axes.loglog(words, types, color=COLOURS[0], linewidth=2, label="different words")
    if heaps["exponent"] is not None:
        ends = words[words >= 1000][[0, -1]].astype(float)
        line = heaps["factor"] * ends ** heaps["exponent"]
        axes.loglog(
            ends, line, color=COLOURS[1], linestyle="--", label=f"words to the power of {heaps['exponent']:.2f}"
        )
    legend(axes)
    return figure


def columns_of(points: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(points, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def quantile_plot(lengths: dict[str, float]) -> Figure:
    """The lengths that some shares of the documents do not exceed."""
    from matplotlib.ticker import NullFormatter

    figure, axes = axes_of("words", "share of the documents")
    names = {"p5": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "largest": 1.0}
    axes.plot([max(lengths[n], 1) for n in names], list(names.values()), color=COLOURS[0], linewidth=2, marker="o")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(whole)
    axes.xaxis.set_minor_formatter(whole if lengths["largest"] < 10 * max(lengths["p5"], 1) else NullFormatter())
    axes.set_ylim(0, 1.05)
    return figure


def whole(value: float, _: float | None = None) -> str:
    return f"{value:,.0f}"


def fertility_plot(fits: Sequence[Fit]) -> Figure:
    figure, axes = axes_of("tokens in the vocabulary", "pieces per word")
    kinds = list(dict.fromkeys(fit.kind for fit in fits if not fit.given))
    for kind, colour in zip(kinds, cycle(COLOURS)):
        line = sorted((fit.vocab_size, fit.pieces_per_word) for fit in fits if fit.kind == kind and not fit.given)
        axes.plot(*zip(*line, strict=True), color=colour, linewidth=2, marker="o", label=kind)
    for fit in (fit for fit in fits if fit.given):
        axes.plot([fit.vocab_size], [fit.pieces_per_word], "D", color=COLOURS[5], label=plain(f"{fit.name} (given)"))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(whole)
    legend(axes)
    return figure


def rows_plot(fits: Sequence[Fit]) -> Figure:
    figure, axes = axes_of("tokens in a row", "share of the documents")
    best = {fit.kind: fit for fit in sorted(fits, key=lambda fit: fit.vocab_size) if not fit.given}
    for fit, colour in zip([*best.values(), *(fit for fit in fits if fit.given)], cycle(COLOURS)):
        axes.plot(list(fit.rows), list(fit.rows.values()), color=colour, linewidth=2, marker="o", label=plain(fit.name))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(whole)
    axes.set_ylim(0, 1.05)
    legend(axes)
    return figure
