"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from firth.commands.results import ExportResult
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import check_output_folder

VECTOR_FORMATS = ("word2vec", "glove", "firth")
EXPORT_FORMATS = ("huggingface", "onnx", *VECTOR_FORMATS)
CHECKED_FORMATS = ("huggingface", "onnx")
FOLDER_KINDS = {"huggingface": "model", "firth": "model", "onnx": "onnx"}  # others are vectors


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    check: bool = False,
    overwrite: bool = False,
    format: str = "huggingface",
    task: str = "",
    quantize: str = "",
    data: str | Path | None = None,
) -> ExportResult:
    """Write a checkpoint for other programs: a Hugging Face folder, ONNX, or word vectors.

    `check` runs the export in transformers or onnxruntime and returns the largest difference of a logit as
    `max_difference`, and the other side as `compared_with`; without `output_dir` in a temporary folder, so that nothing
    is written. `format` "huggingface" is a folder that `AutoModel...from_pretrained` opens. "onnx" writes graphs, with
    `quantize="int8"` also quantized ones; `data` are labelled examples, on which both are scored. "word2vec" and
    "glove" write word vectors as gensim reads them, "firth" a checkpoint of them for `finetune`; the checkpoint can
    then be a file of vectors. `task` names one of several tasks with heads: the export is a model for it alone.
    """
    check_export_options(format, check, task, quantize, data)
    from firth.evaluate.export import import_transformers

    if format == "onnx":
        from firth.evaluate.onnx_export import import_onnx

        import_onnx("--format onnx")
    elif check:
        import_transformers()
    if output_dir is None:
        if not check:
            raise UserError("--output-dir is missing: name the folder to write, or pass --check to compare only.")
        with TemporaryDirectory(prefix="firth-export-") as folder:
            made = write_format(Path(checkpoint), Path(folder) / "export", format, check, task, quantize, data)
            return ExportResult(made)
    path = Path(output_dir)
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise UserError(f"{path} is the checkpoint itself. Name another --output-dir.")
    check_output_folder(path, "--output-dir", overwrite, FOLDER_KINDS.get(format, "vectors"))
    made = write_format(Path(checkpoint), path, format, check, task, quantize, data)
    return ExportResult({"output_dir": str(path), **made})


def check_export_options(format: str, check: bool, task: str, quantize: str, data: str | Path | None) -> None:
    """Refuse options that the format does not have."""
    if format not in EXPORT_FORMATS:
        raise UserError(f"Unknown format {quote(format)} (--format). {did_you_mean(format, EXPORT_FORMATS)}")
    if check and format not in CHECKED_FORMATS:
        raise UserError(f"--check compares logits in transformers, and {format} has none. Leave it out.")
    if task and format in VECTOR_FORMATS:
        raise UserError(f"--task selects a head, and {format} has none. Leave it out.")
    if quantize not in ("", "int8"):
        raise UserError(f"--quantize: {quote(quantize)} is not one of int8.")
    for name, value in (("--quantize", quantize), ("--data", data)):
        if value and format != "onnx":
            raise UserError(f"{name} is for --format onnx, not for {format}. Leave it out.")


def write_format(
    checkpoint: Path, folder: Path, format: str, check: bool, task: str, quantize: str, data: str | Path | None
) -> dict[str, Any]:
    """Write the export, and compare it if `check` says so; return what `export` returns."""
    if format == "onnx":
        from firth.evaluate.onnx_export import write_onnx

        return write_onnx(checkpoint, folder, task, quantize, check, data)
    if format in VECTOR_FORMATS:
        from firth.evaluate.neighbours import write_vectors
        from firth.evaluate.vectors import load_word_vectors

        return {"files": list(map(str, write_vectors(load_word_vectors(checkpoint), folder, format)))}
    from firth.evaluate.export import write_export

    write_export(checkpoint, folder, task)
    return check_export(folder) if check else {}


def check_export(folder: Path) -> dict[str, Any]:
    """The comparison of an exported folder with transformers, as `export` returns it."""
    from firth.evaluate.export import compare_with_transformers

    return {name: value for name, value in compare_with_transformers(folder)._asdict().items() if value is not None}
