"""Export a checkpoint as ONNX, and quantize it to 8 bits.

`torch.onnx` traces a model with example inputs and writes the operators that ran, for any batch size and length
(`onnx_graph.py`). The files run in onnxruntime, in a browser (onnxruntime-web) and wherever else ONNX is read, without
Python. The tokenizer's files and config.json stand beside them.

Dynamic quantization stores the matrices of linear layers as int8 with one scale each, and computes the scale of each
activation when it runs: w = scale * (q - zero). A file shrinks to about a quarter. Rounding changes the outputs, so
`onnx_check.py` measures the difference, and with labelled examples the score of both.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from firth.core.console import say
from firth.core.errors import UserError, reason
from firth.core.files import atomic_folder, copy_file, format_bytes, write_json
from firth.evaluate.export import keep_one_head, load_for_export
from firth.evaluate.export_card import describe_onnx_loading, write_export_card
from firth.evaluate.onnx_check import (
    MAX_ONNX_DIFFERENCE,
    check_scorable,
    compare_with_onnxruntime,
    runtime_name,
    score_onnx,
)
from firth.evaluate.onnx_graph import Graph, make_graphs
from firth.models.hf.checkpoint import write_config_files
from firth.tasks import TASK_FILE
from firth.tasks.recipe import read_task_file
from firth.text.open_text import import_optional

OPSET = 18  # of ai.onnx: onnxruntime reads it since 1.14, onnxruntime-web too
MAX_SINGLE_FILE_BYTES = 1_900_000_000  # protobuf ends at 2 GiB: larger weights get a file of their own
QUANTIZED_SUFFIX = "_quantized"


def import_onnx(feature: str) -> None:
    """Import the packages of the extra `export`. Call this before anything is written."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        import_optional(library, feature)


def write_onnx(
    checkpoint: Path,
    folder: Path,
    task: str = "",
    quantize: str = "",
    check: bool = False,
    data: str | Path | None = None,
) -> dict[str, Any]:
    """Write the graphs of a checkpoint with its config, tokenizer and task; return the facts of `export`.

    `check` compares the outputs in onnxruntime. `quantize` "int8" writes a second file of each graph, and measures the
    difference of its outputs; `data` are labelled examples, on which both are scored.
    """
    model = load_for_export(checkpoint)
    facts = keep_one_head(model, task, checkpoint) if task else None
    graphs = make_graphs(model.eval())
    task_facts = read_task_file(checkpoint) if facts is None else facts
    if data is not None:
        check_scorable(model.config, task_facts)
    with atomic_folder(folder, "onnx") as temporary:
        for graph in graphs:
            export_graph(graph, temporary / graph.file)
        if quantize:
            for graph in graphs:
                quantize_file(temporary / graph.file)
        write_config_files(model, temporary)
        if facts is not None:
            write_json(temporary / TASK_FILE, facts)
        elif (checkpoint / TASK_FILE).is_file():
            copy_file(checkpoint / TASK_FILE, temporary / TASK_FILE, checkpoint)
        if facts is None:  # the card of a checkpoint with several tasks is about all of them
            loading = describe_onnx_loading([graph.file for graph in graphs])
            write_export_card(checkpoint, temporary, folder, "onnx", loading)
    files = {file.name: file.stat().st_size for file in sorted(folder.glob("*.onnx*"))}
    result: dict[str, Any] = {
        "opset": OPSET,
        "inputs": describe_inputs(graphs),
        "outputs": describe_outputs(graphs),
        "bytes": files,
    }
    if check:
        difference = compare_with_onnxruntime(model, graphs, folder)
        result |= {"max_difference": difference, "tolerance": MAX_ONNX_DIFFERENCE, "compared_with": runtime_name()}
    if quantize:
        result["int8_difference"] = compare_with_onnxruntime(model, graphs, folder, quantized_file)
    if data is not None:
        scored = {"float32": folder / graphs[0].file}
        scored |= {quantize: folder / quantized_file(graphs[0].file)} if quantize else {}
        result["scores"] = score_onnx(model, task_facts, data, scored)
    return result


def describe_inputs(graphs: list[Graph]) -> dict[str, list[str]]:
    """Return the shape of each input: names of dynamic axes, else numbers; of the caches only the first layer's."""
    shapes: dict[str, list[str]] = {}
    for graph in graphs:
        for name, value in graph.inputs.items():
            if not name.startswith("past_key_values.") or name.startswith("past_key_values.0."):
                shapes[name] = [graph.axes[name].get(axis, str(size)) for axis, size in enumerate(value.shape)]
    return shapes


def describe_outputs(graphs: list[Graph]) -> list[str]:
    names = (name for graph in graphs for name in graph.outputs)
    return [name for name in names if not name.startswith("present.") or name.startswith("present.0.")]


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Hide the exporter's notes about itself; its errors stay."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export_graph(graph: Graph, path: Path) -> None:
    """Trace a graph and write it. A UserError says what the exporter could not translate."""
    num_bytes = sum(p.numel() * p.element_size() for p in graph.module.parameters())
    say(f"Writing {path.name}: {format_bytes(num_bytes)}, opset {OPSET} ...")
    try:
        with quiet_exporter(), torch.no_grad():
            inputs = tuple(graph.inputs.values())
            # AUTO: a bound on an axis, as the number of positions, is no error
            traced = torch.export.export(
                graph.module.eval(), inputs, dynamic_shapes=dynamic_shapes(graph, any_size=True)
            )
            check_axes(graph, traced)
            program = torch.onnx.export(
                traced,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(graph.inputs),
                output_names=list(graph.outputs),
                dynamic_shapes=dynamic_shapes(graph),
                verbose=False,
            )
            assert program is not None
            program.save(path, external_data=num_bytes > MAX_SINGLE_FILE_BYTES)
    except (UserError, OSError, MemoryError):
        raise
    except Exception as e:  # torch.export and torch.onnx raise many types for what they cannot trace
        raise UserError(
            f"{path.name}: torch.onnx could not translate this model ({reason(e) or type(e).__name__})."
        ) from None


def dynamic_shapes(graph: Graph, any_size: bool = False) -> tuple[Any, ...]:
    """Return the dynamic axes as `torch.export` takes them: one entry per parameter, a tuple for `*past`.

    They are names, or with `any_size` what makes the tracer find their bounds.
    """
    shapes: dict[str, Any] = dict(graph.axes)
    if any_size:
        shapes = {name: dict.fromkeys(axes, torch.export.Dim.AUTO) for name, axes in graph.axes.items()}
    own = tuple(axes for name, axes in shapes.items() if not name.startswith("past_key_values."))
    past = tuple(axes for name, axes in shapes.items() if name.startswith("past_key_values."))
    return (*own, past) if past else own


def check_axes(graph: Graph, traced: torch.export.ExportedProgram) -> None:
    """Make sure that no axis was fixed to the size of the example, as by an int() or len() on the way."""
    values = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"][-len(graph.inputs) :]
    for (name, axes), value in zip(graph.axes.items(), values, strict=True):
        fixed = [axes[axis] for axis in axes if isinstance(value.shape[axis], int)]
        assert not fixed, f"{graph.file}: {name} has a fixed axis {fixed}, {tuple(value.shape)}"


def quantized_file(file: str) -> str:
    """
    >>> quantized_file("model.onnx")
    'model_quantized.onnx'
    """
    return file.replace(".onnx", f"{QUANTIZED_SUFFIX}.onnx")


def quantize_file(path: Path) -> None:
    """Write NAME_quantized.onnx: the same graph with int8 weights in its matmuls and embeddings."""
    quantization = import_optional("onnxruntime.quantization", "--quantize")
    target = path.with_name(quantized_file(path.name))
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises a preprocessing step that changes nothing here
    try:
        quantization.quantize_dynamic(
            str(path),
            str(target),
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=sum_bytes(path) > MAX_SINGLE_FILE_BYTES,
        )
    finally:
        root.setLevel(level)
    say(f"Writing {target.name}: {format_bytes(sum_bytes(target))}, int8.")


def sum_bytes(path: Path) -> int:
    """Return the size of an ONNX file with its weights, which may be in NAME.onnx.data beside it."""
    return sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}.data")) if file.is_file())
