"""Tiny models that have learned nothing, each with a tokenizer, and the same models in `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from firth.models import Model, ModelConfig, get_eos_token_ids, make_model, make_sequence_template, write_model
from firth.models.config import LearnedPosition
from firth.models.presets import bart, bert, gpt2, llama, t5_v1_1
from firth.tokens import Tokenizer, train_tokenizer

FAMILIES: dict[str, tuple[str, Callable[[int], ModelConfig]]] = {
    "bert": ("wordpiece", lambda size: bert(2, 32, 2, size, position=LearnedPosition(24))),
    "gpt2": ("byte-bpe", lambda size: gpt2(2, 32, 2, size, position=LearnedPosition(24))),
    "llama": ("byte-bpe", lambda size: llama(2, 32, 4, 48, size, num_kv_heads=2)),
    "bart": ("byte-bpe", lambda size: bart(2, 32, 2, size)),
    "t5": ("unigram", lambda size: t5_v1_1(2, 32, 2, 48, size)),  # an untrained tied head repeats itself
}


@pytest.fixture(scope="session")
def tokenizers(corpus_file: Path) -> dict[str, Tokenizer]:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    return {kind: train_tokenizer(texts, kind, 400) for kind in ("wordpiece", "byte-bpe", "unigram")}


@pytest.fixture
def untrained(tokenizers: dict[str, Tokenizer]) -> Any:
    """`untrained("gpt2")`: a random model whose choices differ from position to position."""

    def make(family: str | ModelConfig, seed: int = 0) -> Model:
        kind, config = FAMILIES[family] if isinstance(family, str) else ("byte-bpe", lambda size: family)
        torch.manual_seed(seed)
        model = make_model(config(tokenizers[kind].vocab.size)).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        model.tokenizer = tokenizers[kind]
        return model

    return make


@pytest.fixture
def by_transformers(tmp_path: Path) -> Any:
    """`by_transformers(model, prompts, num_beams=2)`: what its `generate` writes, and the scores of beams.

    Prompts are padded as it wants: on the left for decoders.
    """
    transformers = pytest.importorskip("transformers")

    def generate(model: Model, prompts: list[list[int]], **settings: Any) -> tuple[list[list[int]], list[float] | None]:
        write_model(model, tmp_path)
        decoder, vocab = model.config.architecture == "decoder", model.tokenizer.vocab
        kind = transformers.AutoModelForCausalLM if decoder else transformers.AutoModelForSeq2SeqLM
        theirs = kind.from_pretrained(tmp_path)
        ends, frame, width = (
            get_eos_token_ids(model, vocab),
            make_sequence_template(model.config, vocab),
            max(map(len, prompts)),
        )
        blank = [[vocab.pad] * (width - len(ids)) for ids in prompts]
        rows = [pad + ids if decoder else ids + pad for pad, ids in zip(blank, prompts, strict=True)]
        ones = [[1] * len(ids) for ids in prompts]
        seen = [[0] * len(p) + o if decoder else o + [0] * len(p) for p, o in zip(blank, ones, strict=True)]
        out = theirs.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(seen),
            **dict(do_sample=False, eos_token_id=list(ends), pad_token_id=vocab.pad, bos_token_id=None)
            | ({} if decoder else dict(decoder_start_token_id=frame.decoder_start_id))
            | dict(return_dict_in_generate=True, output_scores=True)
            | settings,
        )
        new = [ids[width if decoder else 1 :] for ids in out.sequences.tolist()]
        scores = getattr(out, "sequences_scores", None)
        cut = [list(takewhile(lambda token: token not in ends, ids)) for ids in new]
        return cut, None if scores is None else scores.tolist()

    return generate
