"""Ask a fine-tuned model: labels, scores, spans, answers, texts or vectors for new inputs.

    predictor = Predictor("topics/final")
    predictor.predict(["The team won again."])  # [{"label": "sport", "probability": 0.97, "probabilities": {...}}]

An input is a text, a list of texts (a pair; question and context; context and choices) or a record with the columns of
the training file. Inputs are sorted by length before they are packed into rows, so batches have little padding. A text
that exceeds the model's row is read in windows: tags and answers come from the window with the most context;
probabilities, scores and vectors are averaged over the windows (`long_inputs.py`).

A checkpoint without task.json, such as one of `transformers`, is used by the head that its config names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.evaluate.embed import embed_texts, normalize_rows
from firth.evaluate.likelihood import resolve_max_length
from firth.evaluate.long_inputs import encode_in_windows, has_windows, split_at_words
from firth.evaluate.predict_input import TEXT_ROLES, InputReader, PredictInput, TaskInput
from firth.evaluate.predictions import PredictionRecord, Predictions
from firth.generate import GenerationConfig, generate_sequences
from firth.generate.decode_state import require_tokenizer
from firth.generate.loop import ended_by_choice
from firth.generate.text import make_prompt_texts
from firth.metrics.tagging import are_span_tags, extract_entity_spans
from firth.models import EmbeddingHead, EncoderDecoder, Head, Model, make_sequence_template
from firth.models.config import MultiTaskHead
from firth.tasks import Prediction
from firth.tasks.finetuned import load_finetuned
from firth.tasks.head_task import HeadTask
from firth.tasks.logits_runner import BATCH_TOKENS, AheadRunner
from firth.tasks.prompts import encode_dialogue_prompts
from firth.tasks.task import batch_indices_by_length
from firth.tasks.text_to_text import LabelRankingTask, TextToTextTask
from firth.train import ComputeConfig, TrainingConfig, choose_compute

BATCH_SIZES = {"cpu": 32, "cuda": 256}  # on a GPU, launching the kernels of a small batch takes longer than its work
CHUNK_BATCHES = 32  # batches of a file that are sorted by length together
SCORE_DIGITS = 6
DEFAULT_NEW_TOKENS = 256  # of an answer, where the task has no length of its own


class Predictor:
    """A fine-tuned checkpoint, loaded once, that predicts for new inputs.

    `task` selects one of several tasks of a checkpoint. `batch_size` inputs are computed together: by default 32 on a
    CPU; on a GPU as many as have 16,384 tokens, or 256 where answers are generated. `metadata` is the content of
    task.json, for a model that is already loaded. Generated answers have at most `max_new_tokens` tokens: by default
    those of the fine-tuning, for lm 256 or half of the model's positions.
    """

    def __init__(
        self,
        checkpoint: str | Path | Model,
        task: str = "",
        batch_size: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        model, self.task, self.facts = load_finetuned(checkpoint, task, metadata)
        self.reader = InputReader(self.task.name, *self.text_counts())
        compute = choose_compute(TrainingConfig(compile=False))  # a few batches do not repay a compilation
        self.model = self.place_model(model, compute, is_own=not isinstance(checkpoint, Model))
        is_cast = next(model.parameters()).dtype == torch.bfloat16
        self.compute = replace(compute, bf16=compute.bf16 and not is_cast)
        self.batch_size = batch_size or BATCH_SIZES.get(self.compute.device.type, BATCH_SIZES["cpu"])
        if self.compute.device.type == "cuda" and isinstance(self.task, HeadTask):
            self.task.logits_runner = AheadRunner(model, self.compute, 0 if batch_size else BATCH_TOKENS)
        self.num_windowed_inputs = self.num_cut_answers = 0
        self.generation_config = self.make_generation_config(max_new_tokens)

    def place_model(self, model: Model, compute: ComputeConfig, is_own: bool) -> Model:
        """Move the model to the device; where bf16 is chosen, cast its weights once.

        Autocast would cast them for every batch, and rules out CUDA graphs that generate. A model that the caller holds
        keeps its precision, and so do vectors, and the models that compute some parts in float32: LSTMs and CRFs.
        """
        config = model.config
        has_crf = any(getattr(head, "crf", False) for head in (config.head, *own_heads(config.head)))
        casts = compute.bf16 and is_own and self.task.name != "embed" and config.recurrent is None and not has_crf
        return model.to(compute.device, torch.bfloat16 if casts else None)

    def make_generation_config(self, max_new_tokens: int | None) -> GenerationConfig | None:
        """Return how answers are generated; None if the task has a head."""
        task = getattr(self.task, "base_task", self.task)  # of labels that are written as text
        if isinstance(task, TextToTextTask) and not isinstance(task, LabelRankingTask):
            if max_new_tokens is not None:
                task.generation_config = replace(task.generation_config, max_new_tokens=max_new_tokens)
            return task.generation_config
        if self.task.name == "lm":
            return GenerationConfig(max_new_tokens=max_new_tokens or default_new_tokens(self.model))
        if max_new_tokens is not None:
            raise UserError(f"max_new_tokens is for generated answers, and the task {self.task.name} has none.")
        return None

    def text_counts(self) -> tuple[int, int]:
        """Return the smallest and the largest number of texts of an input."""
        if self.task.name == "choice":
            return 3, sys.maxsize
        if self.task.name == "regress":
            return (self.facts.get("texts", 1),) * 2
        if self.task.name == "embed" or self.facts.get("is_inferred"):
            return 1, 2
        return (len(TEXT_ROLES.get(self.task.name, ())),) * 2

    @property
    def notices(self) -> list[str]:
        """Messages about long texts, complete after the last prediction."""
        count = format_count(self.num_windowed_inputs, "input was", "inputs were")
        windowed = f"{count} longer than a row: read in overlapping windows, and averaged over them."
        limit = self.generation_config.max_new_tokens if self.generation_config else 0
        answers = format_count(self.num_cut_answers, "answer was", "answers were")
        cut = f"{answers} cut at {format_count(limit, 'new token')}, or at the model's last position: --max-new-tokens."
        shown = ((windowed, self.num_windowed_inputs), (cut, self.num_cut_answers))
        return [*(notice for notice, count in shown if count), *self.task.notices]

    def predict(self, inputs: Iterable[PredictInput]) -> Predictions:
        """Return one record per input, in order."""
        sources = list(inputs)
        task_inputs = [self.reader.read(value, number) for number, value in enumerate(sources, 1)]
        records = Predictions(PredictionRecord(record) for _, record in self.predict_inputs(task_inputs))
        records.sources = sources
        for record, source in zip(records, sources, strict=True):
            record.source = source
        return records

    def predict_inputs(
        self, inputs: Iterable[TaskInput], chunk_batches: int = CHUNK_BATCHES
    ) -> Iterator[tuple[TaskInput, dict[str, Any]]]:
        """Yield each input with its record, in order; `chunk_batches` batches are read and computed at a time."""
        source = iter(inputs)
        while chunk := list(islice(source, self.batch_size * chunk_batches)):
            for task_input, prediction in zip(chunk, self.predict_chunk(chunk), strict=True):
                yield task_input, self.to_record(task_input, prediction)

    def predict_chunk(self, inputs: Sequence[TaskInput]) -> list[Any]:
        """Return the prediction of each input, computed in order of length."""
        if self.task.name == "embed":
            return self.embed(inputs)
        if self.task.name == "lm":
            return self.write(inputs)
        examples = [task_input.example for task_input in inputs]
        if isinstance(self.task, HeadTask) and has_windows(self.task):
            windows = encode_in_windows(self.task, examples)
        else:
            windows = [[item] for item in self.task.encode(examples)]
        self.num_windowed_inputs += sum(len(own) > 1 for own in windows)
        items = [window for own in windows for window in own]
        order = sorted(range(len(items)), key=lambda i: items[i].num_tokens)
        computed = self.task.predict(self.model, [items[i] for i in order], self.compute, self.batch_size)
        in_order = iter([p for _, p in sorted(zip(order, computed, strict=True), key=lambda pair: pair[0])])
        return [average_predictions([next(in_order) for _ in own]) for own in windows]

    def embed(self, inputs: Sequence[TaskInput]) -> list[Any]:
        """Return the vector of each text, or the cosine of two texts."""
        texts = [text for task_input in inputs for text in task_input.example.texts]
        vectors, found = iter(self.embed_in_windows(texts)), []
        for task_input in inputs:
            own = [next(vectors) for _ in task_input.example.texts]
            a, b = (normalize_rows(vector[None])[0] for vector in (own[0], own[-1]))
            found.append(own[0] if len(own) == 1 else float(a @ b))
        return found

    def embed_in_windows(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the vector of each text. That of a long text is the mean over its windows, weighted by their tokens.

        A head gives vectors of length 1, and so has their mean.
        """
        tokenizer, head = require_tokenizer(self.model), self.model.config.head
        trained_length = head.max_length if isinstance(head, EmbeddingHead) else 0
        special_tokens = make_sequence_template(self.model.config, tokenizer.vocab).num_special_tokens()
        max_tokens = resolve_max_length(self.model, trained_length) - special_tokens
        parts: list[list[str]] = [[text] for text in texts]
        sizes: list[list[int]] = [[1] for _ in texts]
        long = [i for i, text in enumerate(texts) if len(text.encode()) > max_tokens]
        encodings = tokenizer.encode_with_offsets([texts[i] for i in long]) if long else []
        for i, encoding in zip(long, encodings, strict=True):
            if len(encoding.ids) > max_tokens:
                self.num_windowed_inputs += 1
                windows = split_at_words(texts[i], encoding.offsets, max_tokens, overlaps=False)
                bounds = [(encoding.offsets[start][0], encoding.offsets[end - 1][1]) for start, end in windows]
                parts[i] = [texts[i][first:last] for first, last in bounds]
                sizes[i] = [end - start for start, end in windows]
        vectors = iter(embed_texts(self.model, [part for own in parts for part in own]))
        found = []
        for own in sizes:
            mean = np.average([next(vectors) for _ in own], axis=0, weights=own).astype(np.float32)
            is_unit = len(own) > 1 and isinstance(head, EmbeddingHead)
            found.append(normalize_rows(mean[None])[0] if is_unit else mean)
        return found

    def write(self, inputs: Sequence[TaskInput]) -> list[Prediction]:
        """Return the answers of a model that was fine-tuned on dialogues or texts, by greedy decoding.

        `complete` in `extra` is false for an answer that was cut.
        """
        assert self.generation_config is not None
        encoded = encode_dialogue_prompts(self.model, self.facts, [task_input.example for task_input in inputs])
        prompts = make_prompt_texts(self.model, encoded, self.generation_config)
        answers: dict[int, Prediction] = {}
        for indices in batch_indices_by_length(prompts, self.batch_size, lambda prompt: len(prompt.input_ids)):
            ids = [prompts[i].input_ids for i in indices]
            written = generate_sequences(self.model, ids, self.generation_config, logprobs=False)
            for i, sequence in zip(indices, written, strict=True):
                complete = ended_by_choice(self.model, sequence, self.generation_config.max_new_tokens)
                answers[i] = Prediction(prompts[i].new_text(sequence.tokens).strip(), extra={"complete": complete})
        return [answers[i] for i in range(len(inputs))]

    def to_record(self, task_input: TaskInput, prediction: Any) -> dict[str, Any]:
        """Return a prediction as a record; docs/predict.md lists the fields of each task."""
        name = self.task.name
        if name == "embed":
            is_pair = isinstance(prediction, float)
            return {"similarity": round_score(prediction)} if is_pair else {"vector": prediction.tolist()}
        assert isinstance(prediction, Prediction)
        if name == "tag":
            return self.tag_record(task_input, prediction)
        if name == "regress":
            return {"score": round_score(prediction.prediction)}
        if name == "reward":
            return reward_record(prediction.prediction)
        if self.generation_config is not None and "complete" in (prediction.extra or {}):
            self.num_cut_answers += not (prediction.extra or {})["complete"]
        if name in ("text-to-text", "lm"):
            return {"text": prediction.prediction, **(prediction.extra or {})}
        if name == "extract":
            complete = bool((prediction.extra or {}).get("complete"))
            value = json.loads(prediction.prediction) if complete else None
            return {"value": value, "text": prediction.prediction, "complete": complete}
        if name == "span-qa":
            return answer_record(task_input.example.texts[1], prediction)
        scores = {label: round_score(p) for label, p in (prediction.scores or {}).items()}
        if name == "choice":
            best = int(prediction.prediction)
            chosen = {"choice": best, "text": task_input.example.texts[1 + best], "probability": scores[str(best)]}
            return {**chosen, "probabilities": list(scores.values())}
        ranked = dict(sorted(scores.items(), key=lambda item: -item[1]))
        return {
            "label": prediction.prediction,
            "probability": scores[prediction.prediction],
            "probabilities": ranked,
        }

    def tag_record(self, task_input: TaskInput, prediction: Prediction) -> dict[str, Any]:
        """Return the entities with their character offsets in the text, or the tag of each word."""
        text, offsets = task_input.text, task_input.word_offsets
        if not are_span_tags([self.task.labels]):
            return {"words": [text[start:end] for start, end in offsets], "tags": list(prediction.prediction)}
        probabilities, spans = (prediction.extra or {}).get("probabilities"), []
        for entity in extract_entity_spans(prediction.prediction):
            start, end = offsets[entity.start][0], offsets[entity.end - 1][1]
            span = {"type": entity.type, "text": text[start:end], "start": start, "end": end}
            if probabilities:  # a CRF has none
                own = probabilities[entity.start : entity.end]
                span["probability"] = round_score(sum(own) / len(own))
            spans.append(span)
        return {"spans": spans}


def own_heads(head: Head) -> list[Head]:
    """Return the heads of several tasks."""
    return [named.head for named in head.heads] if isinstance(head, MultiTaskHead) else []


def default_new_tokens(model: Model) -> int:
    """Return the default length of an answer; a decoder's prompt keeps at least half of the positions."""
    limit = model.config.max_length
    if limit is None:
        return DEFAULT_NEW_TOKENS
    return max(1, min(DEFAULT_NEW_TOKENS, limit if isinstance(model, EncoderDecoder) else limit // 2))


def average_predictions(predictions: Sequence[Prediction]) -> Prediction:
    """Average the probabilities, or the numbers, of the windows of a text."""
    if len(predictions) == 1:
        return predictions[0]
    if predictions[0].scores is None:
        return Prediction(sum(p.prediction for p in predictions) / len(predictions))
    labels = predictions[0].scores
    mean = {label: sum((p.scores or {})[label] for p in predictions) / len(predictions) for label in labels}
    return Prediction(max(mean, key=mean.__getitem__), mean)


def answer_record(context: str, prediction: Prediction) -> dict[str, Any]:
    """Return an answer with its character offsets in the context. An empty answer, at -1, means that there is none."""
    answer, nbest = prediction.prediction, (prediction.extra or {}).get("nbest", ())
    found = next((span for span in nbest if span["text"] == answer), None)
    start = found["start"] if found else context.find(answer) if answer else -1
    record = {"answer": answer, "start": start, "end": start + len(answer) if start >= 0 else -1}
    return record | ({"probability": round_score(found["probability"])} if found else {})


def reward_record(rewards: Sequence[float]) -> dict[str, Any]:
    """Return the reward of an answer; of two answers both rewards, and the preferred one.

    >>> reward_record([0.5]), reward_record([0.5, 2.0])["preferred"]
    ({'reward': 0.5}, 'rejected')
    """
    if len(rewards) == 1:
        return {"reward": round_score(rewards[0])}
    chosen, rejected = rewards
    return {
        "reward_chosen": round_score(chosen),
        "reward_rejected": round_score(rejected),
        "margin": round_score(chosen - rejected),
        "preferred": "chosen" if chosen > rejected else "rejected",
    }


def round_score(value: float) -> float:
    return round(float(value), SCORE_DIGITS)
