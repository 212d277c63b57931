"""report.html of an adaptation: both texts before and after, fragmentation, new tokens, the loss and samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.core.files import MODEL_CARD_FILE, read_utf8
from firth.core.html import HtmlPage
from firth.evaluate.card import write_model_card
from firth.evaluate.pretraining_report import add_loss_section, add_samples_section, next_commands
from firth.evaluate.report import format_commands
from firth.evaluate.text_bits import BitsChange
from firth.lab.adapt import describe_interval
from firth.tokens import load_tokenizer
from firth.train import Recipe, load_recipe, read_log
from firth.train.dataloader import open_recipe_shards

MAX_PAGE_TOKENS = 30  # new tokens on the page
METHODS = {
    "left-to-right": "Each token is predicted from those before it, so the figure is the exact code length of the text "
    "in bits, divided by its bytes. Tokenizers can be compared: bytes are the same for all of them.",
    "hidden words": "In each passage whole words are hidden until 15% of its bytes are reached, the same words for "
    "every tokenizer. The figure is the code length of the hidden words in bits, divided by their bytes. The tokens of "
    "a word are predicted one beside the other, and their number is given: between two tokenizers a part of the "
    "difference is the way of counting, and a task shows whether the model is better.",
}
FIGURES = {  # rows of the table, by the keys of results.json
    "bits_per_byte": "bits per byte",
    "byte_perplexity": "perplexity per byte",
    "tokens_per_word": "tokens per word",
    "words_split": "words that are split",
    "unknown": "unknown tokens",
}
SHARES = ("words_split", "unknown")


def write_adaptation_report(folder: Path, results: Mapping[str, Any]) -> dict[str, str]:
    """Write report.html, and README.md in final/ unless there is one; return the report and a next command."""
    recipe, final = load_recipe(folder / "recipe.yaml", Recipe), folder / "final"
    if not (final / MODEL_CARD_FILE).exists():  # it may have been edited
        write_model_card(final)
    page = HtmlPage(f"{Path(results['checkpoint']).parent.name} adapted to {results['data']}", "adapt")
    page.add_lead(f"{results['summary'][0].upper()}{results['summary'][1:]}.")
    add_measures(page, results)
    add_fragmentation(page, results, folder)
    shards, log = open_recipe_shards(recipe), read_log(folder / "log.jsonl")
    add_loss_section(page, recipe, results, log)
    add_samples_section(page, recipe, shards, final)
    commands = next_commands(recipe, final)
    page.add_heading("Next")
    page.add_code(format_commands(commands))
    page.add_heading("Recipe")
    page.add_code(read_utf8(folder / "recipe.yaml"), "Every setting of this run: recipe.yaml.")
    page.save(folder / "report.html")
    return {"report": str(folder / "report.html"), "next": next(iter(commands.values()))}


def add_measures(page: HtmlPage, results: Mapping[str, Any]) -> None:
    """Add the table of both texts before and after, and what its figures mean."""
    domain = results["domain"]
    columns, rows = measure_table(results)
    page.add_table(
        columns,
        rows,
        f"Held-out text: {domain['before']['texts']:,} texts of the domain"
        + (f", {results['general']['before']['texts']:,} general ones" if "general" in results else "")
        + ". ± is a 95% interval over texts.",
    )
    page.add_paragraph(
        f"{METHODS[domain['before']['method']]} Lower is better. Forgetting is the rise of this figure on general text."
    )
    if "general" not in results:
        page.add_paragraph(
            "There was no general text, so forgetting was not measured and nothing was replayed. --general TEXT names "
            "one."
        )
    elif results["replay"].get("share"):
        page.add_paragraph(
            f"Replay: {results['replay']['share']:.0%} of the training tokens are general text "
            f"({results['replay']['source']})."
        )
    else:
        page.add_paragraph("Nothing was replayed (--replay-share 0).")


def measure_table(results: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return columns and rows: each figure of each text before, with untrained new tokens, and after."""
    stages = {"before": "before", "with_new_tokens": "with new tokens", "after": "after"}
    shown = [stage for stage in stages if stage in results["domain"]]
    rows = []
    for text in ("domain", "general"):
        if text not in results:
            continue
        for key, title in FIGURES.items():
            values = [results[text][stage][key] for stage in shown]
            if key == "unknown" and not any(values):
                continue
            change = ""
            if key == "bits_per_byte":
                change = describe_interval(BitsChange(results[text]["change"], results[text]["interval"]))
            form = "{:.1%}" if key in SHARES else "{:.3f}"
            rows.append((f"{text}: {title}", *(form.format(value) for value in values), change))
    return ["", *(stages[stage] for stage in shown), "change"], rows


def add_fragmentation(page: HtmlPage, results: Mapping[str, Any], folder: Path) -> None:
    """Add the words that were split worst, and the new tokens."""
    page.add_heading("Words and tokens")
    new = results["new_tokens"]
    page.add_paragraph(f"{new['decision'][0].upper()}{new['decision'][1:]}.")
    if words := results["worst_words"]:
        tokenizer = load_tokenizer(folder / "final")
        after = tokenizer.encode_batch([f" {word['word']}" for word in words])
        rows = [
            (word["word"], word["count"], word["split"], f"{word['pieces']:.1f}", f"{len(ids)}")
            for word, ids in zip(words, after, strict=True)
        ]
        columns = ["word", "count", "split before", "tokens before", "tokens now"]
        page.add_table(columns, rows, "Words of held-out domain text whose splits cost the most tokens.")
    if new["best"]:
        best = [
            (one["token"], one["count"], round(one["saved_per_mb"]), " ".join(one["old_pieces"]))
            for one in new["best"][:MAX_PAGE_TOKENS]
        ]
        page.add_table(
            ["new token", "count", "tokens saved per MB", "old pieces"],
            best,
            f"The best of {new['added']:,} new tokens. Their vectors start at the mean of those of the old pieces.",
        )
