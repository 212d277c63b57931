"""The routes behind the playground: single decisions of a model, what its heads do, what an objective hides."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import FastAPI, Request

from firth.evaluate.attention_heads import HeadKind, LayerMask, overview_heads, shrink
from firth.evaluate.salience import salience_of_input
from firth.evaluate.word_map import find_mapped_words, map_words
from firth.generate import GenerationConfig
from firth.generate.decode_state import check_can_generate
from firth.generate.next_token import next_tokens, search_beam_tree
from firth.generate.text import PromptText, make_prompt_texts
from firth.lab.objective_view import ObjectiveView, make_text_rows, view_objectives
from firth.lab.show_row import TOKEN_KINDS, downsample_mask, make_token_formatter
from firth.serve import play_schemas as schemas
from firth.serve.config import TASK_KINDS
from firth.serve.model_server import ModelServer
from firth.serve.served_model import ServedModel

PLAY_TAGS: Any = ["playground"]
MASK_CELLS = 48  # rows and columns of the picture of a mask
SALIENCE_KINDS = TASK_KINDS["/classify"]


def add_play_routes(app: FastAPI, server: ModelServer) -> None:
    add_decoding_routes(app, server)  # /next, /beams
    add_layer_routes(app, server)  # /attention/heads, /vectors
    add_analysis_routes(app, server)  # /objectives, /salience


def add_decoding_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/next", tags=PLAY_TAGS, response_model=schemas.NextAnswer)
    async def next_token(body: schemas.NextRequest, request: Request) -> Any:
        """Return the likeliest next tokens after a prompt, before temperature, top-k and top-p."""
        model = server.find(body.model, lambda model: model.can_generate)
        prompt = await server.read(encode_prompt, model, body.prompt, body.chat, body.new_tokens)
        ids = list(prompt.input_ids)
        settings = (body.top, body.temperatures, body.top_ps)
        found = await server.inspect(request, model, lambda: next_tokens(model.model, ids, body.new_tokens, *settings))
        show, end_ids = make_token_formatter(model.tokenizer), set(check_can_generate(model.model))
        tokens = [
            {"id": i, "text": show(i), "logprob": logprob, "is_end": i in end_ids}
            for i, logprob in zip(found.ids, found.logprobs, strict=True)
        ]
        return {
            "model": model.name,
            "prompt_tokens": [show(i) for i in ids],
            "text": prompt.new_text(body.new_tokens),
            "tokens": tokens,
            "num_rest": found.num_rest,
            "num_tied": found.num_tied,
            "rest_logsumexp": found.rest_logsumexp,
            "nucleus": found.nucleus,
            "entropy": found.entropy,
        }

    @app.post("/beams", tags=PLAY_TAGS, response_model=schemas.BeamsAnswer)
    async def beams(body: schemas.BeamsRequest, request: Request) -> Any:
        """Search by beams, and return every candidate as a tree."""
        model = server.find(body.model, lambda model: model.can_generate)
        prompt = await server.read(encode_prompt, model, body.prompt, body.chat, body.new_tokens)
        model.check_output_tokens(body.num_beams * body.max_new_tokens)
        config = GenerationConfig(
            max_new_tokens=body.max_new_tokens,
            num_beams=body.num_beams,
            num_return_sequences=body.num_beams,
            length_penalty=body.length_penalty,
            early_stopping=body.early_stopping,
        )
        ids = list(prompt.input_ids)
        tree = await server.inspect(request, model, lambda: search_beam_tree(model.model, ids, config, body.new_tokens))
        show = make_token_formatter(model.tokenizer)
        nodes = [{**node._asdict(), "text": show(node.token) if node.token >= 0 else ""} for node in tree.nodes]
        taken = prompt.new_text(body.new_tokens)
        sequences = [
            {
                "node": node,
                "text": prompt.new_text([*body.new_tokens, *sequence.tokens]).removeprefix(taken),
                "score": sequence.score,
            }
            for node, sequence in tree.sequences
        ]
        return {"model": model.name, "nodes": nodes, "sequences": sequences}


def add_layer_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/attention/heads", tags=PLAY_TAGS, response_model=schemas.HeadsAnswer)
    async def heads(body: schemas.HeadsRequest, request: Request) -> Any:
        """Describe every attention head on a text: a picture, a name, entropy and distance; and the masks."""
        model = server.find(body.model, lambda model: model.has_attention)
        model.check_input_tokens(await server.read(count_tokens, model, [body.text, body.target]))
        settings = (body.text, body.target, body.max_cells, body.permutation)
        found = await server.inspect(request, model, lambda: overview_heads(model.model, *settings))
        kinds = {kind: describe_kind(heads) for kind, heads in found.kinds.items()}
        return {"model": model.name, "tokens": found.tokens, "target_tokens": found.target_tokens, "kinds": kinds}

    @app.post("/vectors", tags=PLAY_TAGS, response_model=schemas.VectorsAnswer)
    async def vectors(body: schemas.VectorsRequest, request: Request) -> Any:
        """Map words in their context to two dimensions, in every layer."""
        model = server.find(body.model, lambda _: True)
        model.check_input_tokens(await server.read(count_tokens, model, body.texts))
        occurrences = find_mapped_words(body.texts, body.words)
        found = await server.inspect(request, model, lambda: map_words(model.model, body.texts, occurrences))
        layers = [
            {
                "points": np.round(layer.points, 4).tolist(),
                "shares": layer.shares.tolist(),
                "neighbours": [[(j, round(cosine, 4)) for j, cosine in near] for near in layer.neighbours],
            }
            for layer in found.layers
        ]
        return {"model": model.name, "words": [word._asdict() for word in found.occurrences], "layers": layers}


def add_analysis_routes(app: FastAPI, server: ModelServer) -> None:
    @app.post("/objectives", tags=PLAY_TAGS, response_model=schemas.ObjectivesAnswer)
    async def objectives(body: schemas.ObjectivesRequest) -> Any:
        """Show a text as each pretraining objective sees it: inputs, labels, masks."""
        model = server.find(body.model, lambda _: True)
        model.check_input_tokens(await server.read(count_tokens, model, [body.text]))

        def view() -> list[ObjectiveView]:
            rows = make_text_rows(body.text, model.tokenizer)
            return view_objectives(rows, model.model.config, body.objectives, body.rate, body.draw)

        found = await server.read(view)
        return {"model": model.name, "kinds": TOKEN_KINDS, "objectives": list(map(describe_objective_view, found))}

    @app.post("/salience", tags=PLAY_TAGS, response_model=schemas.SalienceAnswer)
    async def salience(body: schemas.SalienceRequest, request: Request) -> Any:
        """Tell which tokens speak for a label, or for one of several choices: gradient times input."""
        model = server.find(body.model, lambda model: any(kind in SALIENCE_KINDS for kind in model.tasks.values()))
        task = model.find_task(SALIENCE_KINDS, body.task)
        predictor = model.predictors[task]
        task_input = await server.read(predictor.reader.read, body.input, 1)
        model.check_input_tokens(await server.read(count_tokens, model, task_input.example.texts))
        found = await server.inspect(request, model, lambda: salience_of_input(predictor, task_input, body.label))
        show = make_token_formatter(predictor.task.tokenizer)
        return {
            "model": model.name,
            "task": task,
            "label": found.label,
            "logit": found.logit,
            "num_windows": found.num_windows,
            "tokens": [show(i) for i in found.token_ids],
            "values": found.values,
        }


def encode_prompt(model: ServedModel, text: str, chat: bool | None, new_tokens: list[int] | None = None) -> PromptText:
    """Return a prompt with its special tokens; refuse one that is too long, and ids that the model does not have."""
    check_can_generate(model.model)
    (prompt,) = make_prompt_texts(model.model, model.task_prompts([text], chat), GenerationConfig())
    model.check_token_ids(new_tokens or [], "new_tokens")
    model.check_input_tokens(len(prompt.input_ids) + len(new_tokens or []))
    return prompt


def count_tokens(model: ServedModel, texts: list[str]) -> int:
    return sum(len(ids) for ids in model.tokenizer.encode_batch(list(texts)))


def encode_cells(cells: np.ndarray) -> str:
    return base64.b64encode(cells.astype(np.uint8).tobytes()).decode()


def describe_kind(kind: HeadKind) -> dict[str, Any]:
    _, _, rows, columns = kind.pictures.shape
    return {
        "heads": [[head._asdict() for head in layer] for layer in kind.summaries],
        "rows": rows,
        "columns": columns,
        "pictures": encode_cells(np.round(np.clip(kind.pictures, 0, 1) * 255)),
        "masks": [describe_mask(mask) for mask in kind.masks],
    }


def describe_mask(mask: LayerMask) -> dict[str, Any]:
    cells = shrink(mask.mask.astype(float), MASK_CELLS)
    shape = {"rows": cells.shape[0], "columns": cells.shape[1]}
    return {"name": mask.name, "layers": mask.layers, **shape, "cells": encode_cells(cells > 0)}


def describe_objective_view(view: ObjectiveView) -> dict[str, Any]:
    row = view.row
    masks = []
    for mask in () if row is None else row.attention_masks:
        cells = downsample_mask(mask.mask, MASK_CELLS)
        shape = {"rows": cells.shape[0], "columns": cells.shape[1]}
        masks.append({"name": mask.title, "layers": [], **shape, "cells": encode_cells(cells)})
    sequences = [
        {
            "name": sequence.name,
            "tokens": [
                {
                    "text": token.text,
                    "kind": token.kind,
                    "original": token.original_text,
                    "id": token.id,
                    "is_target": token.is_target,
                }
                for token in sequence.tokens
            ],
        }
        for sequence in (() if row is None else row.sequences)
    ]
    return {
        "name": view.name,
        "description": view.description,
        "architectures": list(view.architectures),
        "rate": view.rate,
        "problem": view.problem,
        "notes": [] if row is None else row.notes,
        "sequences": sequences,
        "masks": masks,
        "rates": view.rates,
    }
