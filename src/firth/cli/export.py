"""The options of `export`, and what it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import typer

from firth.cli import render
from firth.cli.command import option
from firth.cli.options import OutputOptions
from firth.core.console import format_count, say
from firth.core.errors import quote

MAX_LOGIT_DIFFERENCE = 1e-3  # between logits: rounding explains less than this

EXPORT_EXAMPLES = """
firth export run/final --check                 # compare logits, write nothing
firth export run/final --output-dir hf --check
firth export run/final --output-dir web --format onnx --quantize int8 --check
firth export run/final --output-dir gguf --format gguf --dtype q8_0
firth export words/final --output-dir vectors --format word2vec
"""


@dataclass(kw_only=True)
class ExportOptions(OutputOptions):
    checkpoint: str = option(..., "A checkpoint folder; for word vectors also a file of them.", argument=True)
    output_dir: str | None = option(None, "Write to this folder; not needed with --check.", "FOLDER", required=True)
    format: Literal["huggingface", "onnx", "gguf", "word2vec", "glove", "firth"] = option(
        "huggingface",
        "Write huggingface, onnx, gguf, word2vec, glove or firth. onnx is for onnxruntime and browsers, gguf for "
        "llama.cpp and Ollama; word2vec and glove are word vectors as gensim reads them, firth is a checkpoint of word "
        "vectors for finetune.",
        "NAME",
    )
    check: bool = option(
        False,
        "Run the export in transformers, onnxruntime or llama.cpp and compare the logits; the first and the last also "
        "by the token ids of texts in 25 scripts.",
    )
    quantize: str = option(
        "", "With onnx: also write int8 graphs, a quarter of the size, and report how far outputs move.", "int8"
    )
    data: str | None = option(
        None, "With onnx: score the graphs of a task's head on this labelled file; with --quantize both.", "FILE"
    )
    dtype: str = option("", "With gguf: store matrices as f32, f16 or q8_0. Default: f16.", "NAME")
    task: str = option("", "Export one of several tasks with heads, as a model for this task alone.", "NAME")


def report_export(result: Mapping[str, Any], as_json: bool) -> None:
    """Print what was written; exit with 1 if the other program computes another model."""
    render.print_result(result, as_json, "Export")
    other, limit = result.get("compared_with", ""), result.get("tolerance", MAX_LOGIT_DIFFERENCE)
    other = "transformers" if "tolerance" not in result else other
    if result.get("max_difference", 0.0) > limit:
        say(f"The logits differ by more than {limit}: {other} computes another model.")
        raise typer.Exit(1)
    if texts := result.get("differing_texts"):
        count = format_count(len(texts), "text")
        say(f"{other} makes other token ids of {count}; the first: {quote(texts[0])}.")
        raise typer.Exit(1)
    if "max_difference" in result and not as_json:
        ids = " All texts have the same token ids." if "differing_texts" in result else ""
        say(f"The logits of both differ by {result['max_difference']:.1g} at most, which is rounding.{ids}")
    if texts := result.get("other_token_ids"):
        count = format_count(len(texts), "odd text")
        say(f"note: {other} makes other token ids of {count}; the first: {quote(texts[0])}.")
