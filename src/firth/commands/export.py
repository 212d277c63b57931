"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from firth.commands.results import ExportResult
from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import check_output_folder

VECTOR_FORMATS = ("word2vec", "glove", "firth")
CHECKED_FORMATS = ("huggingface", "onnx", "gguf")
EXPORT_FORMATS = (*CHECKED_FORMATS, *VECTOR_FORMATS)
FOLDER_KINDS = {"huggingface": "model", "firth": "model", "onnx": "onnx", "gguf": "gguf"}  # others are vectors
GGUF_DTYPES = ("f32", "f16", "q8_0")
DEFAULT_GGUF_DTYPE = "f16"


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    check: bool = False,
    overwrite: bool = False,
    format: str = "huggingface",
    task: str = "",
    quantize: str = "",
    data: str | Path | None = None,
    dtype: str = "",
) -> ExportResult:
    """Write a checkpoint for other programs: a Hugging Face folder, ONNX, GGUF, or word vectors.

    `check` runs the export in transformers, onnxruntime or llama.cpp and returns the largest difference of a logit as
    `max_difference`, and the other side as `compared_with`; without `output_dir` in a temporary folder, so that nothing
    is written. `format` "huggingface" is a folder that `AutoModel...from_pretrained` opens. "onnx" writes graphs, with
    `quantize="int8"` also quantized ones; `data` are labelled examples, on which both are scored. "gguf" writes a file
    for llama.cpp, with weights of the type `dtype`: "f32", "f16" (default) or "q8_0". "word2vec" and "glove" write word
    vectors as gensim reads them, "firth" a checkpoint of them for `finetune`; the checkpoint can then be a file of
    vectors. `task` names one of several tasks with heads: the export is a model for it alone.
    `overwrite` replaces an earlier export.
    """
    check_export_options(format, check, task, quantize, data, dtype)
    settings: dict[str, Any] = {
        "check": check,
        "task": task,
        "quantize": quantize,
        "data": data,
        "dtype": dtype or DEFAULT_GGUF_DTYPE,
    }
    from firth.evaluate.export import import_transformers

    if format == "onnx":
        from firth.evaluate.onnx_export import import_onnx

        import_onnx("--format onnx")
    elif check and format == "gguf":
        from firth.evaluate.gguf_check import import_llama_cpp

        import_llama_cpp()
    elif check:
        import_transformers()
    if output_dir is None:
        if not check:
            raise UserError("--output-dir is missing: name the folder to write, or pass --check to compare only.")
        with TemporaryDirectory(prefix="firth-export-") as folder:
            return ExportResult(write_format(Path(checkpoint), Path(folder) / "export", format, **settings))
    path = Path(output_dir)
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise UserError(f"{path} is the checkpoint itself. Name another --output-dir.")
    check_output_folder(path, "--output-dir", overwrite, FOLDER_KINDS.get(format, "vectors"))
    return ExportResult({"output_dir": str(path), **write_format(Path(checkpoint), path, format, **settings)})


def check_export_options(
    format: str, check: bool, task: str, quantize: str, data: str | Path | None, dtype: str
) -> None:
    """Refuse options that the format does not have."""
    if format not in EXPORT_FORMATS:
        raise UserError(f"Unknown format {quote(format)} (--format). {did_you_mean(format, EXPORT_FORMATS)}")
    if check and format not in CHECKED_FORMATS:
        raise UserError(f"--check compares logits in transformers, and {format} has none. Leave it out.")
    if task and format in (*VECTOR_FORMATS, "gguf"):
        raise UserError(f"--task selects a head, and {format} has none. Leave it out.")
    if quantize not in ("", "int8"):
        raise UserError(f"--quantize: {quote(quantize)} is not one of int8.")
    if dtype and dtype not in GGUF_DTYPES:
        raise UserError(f"--dtype: {quote(dtype)} is not one of {', '.join(GGUF_DTYPES)}.")
    for name, value, owner in (("--quantize", quantize, "onnx"), ("--data", data, "onnx"), ("--dtype", dtype, "gguf")):
        if value and format != owner:
            raise UserError(f"{name} is for --format {owner}, not for {format}. Leave it out.")


def write_format(
    checkpoint: Path,
    folder: Path,
    format: str,
    check: bool,
    task: str,
    quantize: str,
    data: str | Path | None,
    dtype: str,
) -> dict[str, Any]:
    """Write the export, and compare it if `check` says so; return what `export` returns."""
    if format == "onnx":
        from firth.evaluate.onnx_export import write_onnx

        return write_onnx(checkpoint, folder, task, quantize, check, data)
    if format == "gguf":
        from firth.evaluate.gguf_export import write_gguf_folder

        return write_gguf_folder(checkpoint, folder, dtype, check)
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
