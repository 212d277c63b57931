"""Run exported ONNX files in onnxruntime, and compare them with the model that they were made of.

The comparison uses other shapes than those of tracing: one row and several, short and long, with padding. A decoder
generates in two steps, a prompt with an empty cache and more tokens after it, and must give the logits of one pass over
the whole text by the model itself. So an axis that was fixed, a mask or a cache that is wrong shows as a difference.

With labelled examples the files are scored as well: `OnnxModel` answers for the model inside the usual evaluation.

B rows, T positions, N texts, K target positions, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from firth.core.errors import UserError
from firth.evaluate.onnx_graph import (
    Graph,
    TextGraph,
    empty_cache,
    example_length,
    example_text,
    is_embedder,
    text_input_names,
)
from firth.models import Model, ModelConfig, MultipleChoiceHead, RegressionHead, SpanHead, TokenClassificationHead
from firth.models.config import LMHead
from firth.models.model import EncoderDecoder
from firth.objectives import Batch
from firth.tasks import make_task
from firth.tasks.head_task import HeadTask
from firth.text import read_labelled
from firth.text.open_text import import_optional
from firth.train import TrainingConfig, choose_compute

Array = np.ndarray
MAX_ONNX_DIFFERENCE = 1e-4  # of an output in float32, relative where outputs are above 1


class Session:
    """An ONNX file, opened by onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        ort = import_optional("onnxruntime", "--format onnx")
        options = ort.SessionOptions()
        options.log_severity_level = 3  # errors only
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.output_names = [output.name for output in self.session.get_outputs()]

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs by name."""
        values = self.session.run(self.output_names, {name: value.numpy() for name, value in inputs.items()})
        return dict(zip(self.output_names, map(torch.from_numpy, values), strict=True))


def runtime_name() -> str:
    return f"onnxruntime {import_optional('onnxruntime', '--check').__version__}"


def relative_difference(theirs: Tensor, ours: Tensor) -> float:
    """Return the largest absolute difference; where numbers are above 1, as a share of the largest."""
    return float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1))


@torch.no_grad()
def compare_with_onnxruntime(
    model: Model, graphs: list[Graph], folder: Path, file_name: Callable[[str], str] = str
) -> float:
    """Return the largest difference between the outputs of a model and those of its files.

    `file_name` maps the name of a graph's file to that of the file to run, as the quantized one.
    """
    sessions = [Session(folder / file_name(graph.file)) for graph in graphs]
    if isinstance(graphs[0].module, TextGraph):
        pairs = text_outputs(graphs[0], sessions[0], model.config)
    elif isinstance(model, EncoderDecoder):
        pairs = seq2seq_outputs(model, graphs[1], *sessions)
    else:
        pairs = decoder_outputs(model, graphs[0], sessions[0])
    return max(relative_difference(theirs, ours) for theirs, ours in pairs)


def check_lengths(config: ModelConfig) -> list[int]:
    """Return a length of one token, and one that is longer than that of tracing."""
    longest = 2 * example_length(config)
    return [1, min(longest, config.max_length or longest)]


def text_outputs(graph: Graph, session: Session, config: ModelConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield theirs and ours, without the positions of padding."""
    for num_rows, length in zip((1, 3), check_lengths(config), strict=True):
        inputs = dict(zip(text_input_names(config), example_text(config, num_rows, length), strict=False))
        theirs = session(inputs)
        for name, ours in zip(graph.outputs, graph.module(*inputs.values()), strict=True):
            has_positions = ours.ndim > 1 and ours.shape[1] == length and ours.shape[0] == num_rows
            has_positions = has_positions and not isinstance(config.head, MultipleChoiceHead)
            keep = inputs["attention_mask"].bool() if has_positions else ...
            yield theirs[name][keep], ours[keep]


def decoder_outputs(model: Model, graph: Graph, session: Session) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits of two texts in two steps with the cache, and of each text in one pass.

    The second text is shorter and padded on the left, as in batched generation.
    """
    length = check_lengths(model.config)[1]
    split, num_padded = length - length // 3 - 1, length // 4
    input_ids, _, _ = example_text(model.config, 1, length)
    input_ids = input_ids.repeat(2, 1)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :num_padded] = 0
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    past = {name: value.expand(2, -1, -1, -1) for name, value in empty_cache(graph)}
    found = []
    for start, stop in ((0, split), (split, length)):
        outputs = session(
            {
                "input_ids": input_ids[:, start:stop],
                "attention_mask": attention_mask[:, :stop],
                "position_ids": position_ids[:, start:stop],
                **past,
            }
        )
        found.append(outputs["logits"])
        past = {name.replace("present", "past_key_values"): v for name, v in outputs.items() if name != "logits"}
    logits = torch.cat(found, 1)
    for row, first in enumerate((0, num_padded)):
        yield logits[row, first:], model(input_ids=input_ids[row : row + 1, first:]).logits[0]


def seq2seq_outputs(
    model: EncoderDecoder, graph: Graph, encoder: Session, decoder: Session
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the decoder's logits in two steps with the cache, and in one pass, for two sources."""
    config = model.config
    length = check_lengths(config)[1]
    input_ids, attention_mask, _ = example_text(config, 2, length)
    decoder_ids, _, _ = example_text(config, 2, 7)
    source = encoder({"input_ids": input_ids, "attention_mask": attention_mask})
    ours = model(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_ids)
    real = attention_mask.bool()
    assert ours.encoder_last_hidden_state is not None
    yield source["last_hidden_state"][real], ours.encoder_last_hidden_state[real]
    cross = {n.replace("present", "past_key_values"): v for n, v in source.items() if n != "last_hidden_state"}
    past = {name: value.expand(2, -1, -1, -1) for name, value in empty_cache(graph)}
    for start, stop in ((0, 4), (4, 7)):
        inputs = {"input_ids": decoder_ids[:, start:stop], "encoder_attention_mask": attention_mask, **past, **cross}
        outputs = decoder(inputs)
        yield outputs["logits"], ours.logits[:, start:stop]
        past = {name.replace("present", "past_key_values"): v for name, v in outputs.items() if name != "logits"}


# --- scores ---------------------------------------------------------------------------------------------------------


class OnnxModel(nn.Module):
    """The logits of an ONNX file, in place of a model's own, for batches of packed rows.

    A graph reads one text per row. So the texts of a batch are unpacked, padded and run, and the outputs are put where
    the packed row expects them.
    """

    def __init__(self, config: ModelConfig, session: Session) -> None:
        super().__init__()
        self.config, self.session = config, session

    def logits(self, batch: Batch) -> Tensor:
        doc_BT = batch.document_ids
        texts = [
            (b, (doc_BT[b] == i).nonzero()[:, 0]) for b in range(len(doc_BT)) for i in doc_BT[b].unique() if i >= 0
        ]
        N, T = len(texts), max(len(positions) for _, positions in texts)
        inputs = {name: torch.zeros((N, T), dtype=torch.long) for name in text_input_names(self.config)}
        for n, (b, positions) in enumerate(texts):
            inputs["input_ids"][n, : len(positions)] = batch.input_ids[b, positions]
            inputs["attention_mask"][n, : len(positions)] = 1
            if "token_type_ids" in inputs and batch.token_type_ids is not None:
                inputs["token_type_ids"][n, : len(positions)] = batch.token_type_ids[b, positions]
        outputs, head = self.session(inputs), self.config.head
        if isinstance(head, SpanHead):
            pair_NT2 = torch.stack([outputs["start_logits"], outputs["end_logits"]], -1)
            return repack(pair_NT2, texts, doc_BT.shape)
        logits = outputs["sentence_embedding" if is_embedder(head) else "logits"]
        row_B1 = torch.arange(len(doc_BT))[:, None]
        if isinstance(head, TokenClassificationHead):
            return repack(logits, texts, doc_BT.shape)[row_B1, batch.target_positions]
        text_BT = torch.zeros_like(doc_BT)
        for n, (b, positions) in enumerate(texts):
            text_BT[b, positions] = n
        logits = logits[:, 0] if isinstance(head, RegressionHead) else logits
        return logits[text_BT[row_B1, batch.target_positions]]


def repack(values_NTC: Tensor, texts: list[tuple[int, Tensor]], shape: torch.Size) -> Tensor:
    """Return (B, T, C): the values of each text at its positions of a packed row."""
    packed_BTC = values_NTC.new_zeros((*shape, values_NTC.shape[2]))
    for n, (b, positions) in enumerate(texts):
        packed_BTC[b, positions] = values_NTC[n, : len(positions)]
    return packed_BTC


def check_scorable(config: ModelConfig, facts: Mapping[str, Any]) -> None:
    """Refuse `--data` for a model without the head of a task."""
    if not facts or isinstance(config.head, LMHead):
        raise UserError("--data scores the head of a task, and this checkpoint has none. Leave it out.")


def score_onnx(
    model: Model, facts: Mapping[str, Any], data: str | Path, files: Mapping[str, Path]
) -> dict[str, dict[str, float]]:
    """Return the metrics of each file on labelled examples; `facts` is the task.json of the model."""
    examples = read_labelled(data, facts["task"], None, "dev")
    assert model.tokenizer is not None
    task = make_task(facts["task"], facts, model.tokenizer, model.config)
    assert isinstance(task, HeadTask)
    items, compute = task.encode(examples), choose_compute(TrainingConfig(device="cpu"))
    scores = {}
    for name, path in files.items():
        answering = cast(Model, OnnxModel(model.config, Session(path)))
        scores[name] = dict(task.score(examples, task.predict(answering, items, compute, batch_size=32)))
    return scores
