"""The command `export`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from firth.commands.results import ExportResult
from firth.core.errors import UserError
from firth.core.files import check_output_folder


def export(
    checkpoint: str | Path,
    output_dir: str | Path | None = None,
    check: bool = False,
    overwrite: bool = False,
    format: str = "huggingface",
    task: str = "",
) -> ExportResult:
    """Write a Hugging Face folder that `AutoModel...from_pretrained` opens.

    `check` opens it in transformers and returns the largest difference of a logit as `max_difference`, and the other
    side as `compared_with`; without `output_dir` in a temporary folder, so that nothing is written. `format` "word2vec"
    or "glove" writes word vectors as gensim reads them, "firth" a checkpoint of them for `finetune`; the checkpoint can
    then be a file of vectors. `task` names one of several tasks with heads: the folder is a model for it alone.
    """
    if check and format != "huggingface":
        raise UserError(f"--check compares logits in transformers, and {format} has none. Leave it out.")
    from firth.evaluate.export import import_transformers, write_export
    from firth.evaluate.neighbours import write_vectors
    from firth.evaluate.vectors import load_word_vectors

    if check:
        import_transformers()
    if output_dir is None:
        if not check:
            raise UserError("--output-dir is missing: name the folder to write, or pass --check to compare only.")
        with TemporaryDirectory(prefix="firth-export-") as folder:
            write_export(Path(checkpoint), Path(folder) / "export", task)
            return ExportResult(check_export(Path(folder) / "export"))
    path = Path(output_dir)
    if path.exists() and Path(checkpoint).exists() and path.samefile(checkpoint):
        raise UserError(f"{path} is the checkpoint itself. Name another --output-dir.")
    kind = "model" if format in ("huggingface", "firth") else "vectors"
    check_output_folder(path, "--output-dir", overwrite, kind)
    if format != "huggingface":
        files = write_vectors(load_word_vectors(checkpoint), path, format)
        return ExportResult({"output_dir": str(path), "files": list(map(str, files))})
    write_export(Path(checkpoint), path, task)
    return ExportResult({"output_dir": str(path), **(check_export(path) if check else {})})


def check_export(folder: Path) -> dict[str, Any]:
    """The comparison of an exported folder with transformers, as `export` returns it."""
    from firth.evaluate.export import compare_with_transformers

    return {name: value for name, value in compare_with_transformers(folder)._asdict().items() if value is not None}
