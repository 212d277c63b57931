"""XLNet is pretrained in the form in which it is fine-tuned, and its segment encodings learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from firth.evaluate.likelihood import make_scorer
from firth.models import Model, load_model, make_sequence_template
from firth.models.presets import xlnet
from firth.objectives import OBJECTIVES
from firth.recipes.pretraining import complete_recipe
from firth.tasks.template import TaskTemplate
from firth.tokens import ShardSet, open_shards
from firth.train import Recipe, pretrain
from firth.train.dataloader import make_batch, make_row_dataset
from firth.train.pretrain import build_pretrain_model


@pytest.fixture
def recipe(recipe_of: Callable[..., Recipe], shards_of: Callable[[str], ShardSet]) -> Recipe:
    model = xlnet(2, 32, 2, shards_of("bert").tokenizer.vocab.size, dropout=0.0, attention_dropout=0.0)
    like = recipe_of("bert", max_seq_length=64, warm_start="none")
    return complete_recipe(replace(like, model=model, objective=OBJECTIVES["permutation-lm"]))


def segment_parameters(model: Model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if "score.segment" in name}


@pytest.mark.parametrize("order", ["packed", "stream"])
def test_fine_tuning_reads_what_pretraining_read(recipe: Recipe, order: str) -> None:
    """One text and a pair: the documents of a pretraining row are what a task encodes of the same texts."""
    recipe = replace(recipe, order=order)  # type: ignore[arg-type]
    shards = open_shards(Path(recipe.data))
    vocab, dataset = shards.tokenizer.vocab, make_row_dataset(recipe, shards, held_out=False)
    batch = make_batch(recipe, dataset, np.arange(64), vocab)
    template = TaskTemplate(shards.tokenizer, recipe.model, 64)
    own = OBJECTIVES["permutation-lm"].build_template(vocab)
    assert all(own.apply(*texts) == template.sequence_template.apply(*texts) for texts in ([[9]], [[9], [8]]))
    num_texts = set()
    for ids_L, doc_L, types_L in zip(batch.input_ids, batch.document_ids, batch.token_type_ids, strict=True):
        first = 32 if order == "stream" else 0
        for d in range(doc_L.max() + 1):
            ids, types = (x[first:][doc_L[first:] == d] for x in (ids_L, types_L))
            texts = [ids[types == t].tolist()[:-1] for t in (0, 1) if (types == t).any()]
            texts = [text for text in texts if vocab.sep not in text]
            if len(texts) != len({*types.tolist()} & {0, 1}):
                continue  # a document ends inside of this text, which no task can write
            encoded = template.build_inputs(*texts)
            assert (ids.tolist(), types.tolist()) == (encoded.ids, encoded.token_type_ids)
            assert ids[-1] == vocab.cls
            assert encoded.target_positions == (len(ids) - 1,)
            num_texts.add(len(texts))
    assert 2 in num_texts


def test_segment_encodings_learn(recipe: Recipe) -> None:
    """Today's steps give them a gradient, with and without memory; the exported model opens in `transformers`."""
    transformers = pytest.importorskip("transformers")
    for changes in ({}, {"order": "stream", "memory": 16, "output_dir": recipe.output_dir + "-memory"}):
        run = replace(recipe, max_steps=2, **changes)
        shards = open_shards(Path(run.data))
        before = segment_parameters(build_pretrain_model(run, shards.tokenizer))
        assert len(before) == 4
        pretrain(run)
        model = load_model(Path(run.output_dir) / "final")
        assert all(not torch.equal(p, before[name]) for name, p in segment_parameters(model).items())
        vocab = shards.tokenizer.vocab
        ids, types = (torch.tensor([x]) for x in make_sequence_template(run.model, vocab).apply([9, 10, 11], [12, 13]))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(run.output_dir) / "final")
        with torch.no_grad():
            logits = theirs.eval()(ids, token_type_ids=types).logits
            torch.testing.assert_close(model(ids, token_type_ids=types).logits, logits, rtol=1e-4, atol=1e-5)


def test_scores_read_the_same_form(recipe: Recipe) -> None:
    shards = open_shards(Path(recipe.data))
    model = build_pretrain_model(recipe, shards.tokenizer).eval()
    scorer = make_scorer(model)
    (text,) = scorer.tokenize(["the cat slept"])
    query = next(scorer.text_queries(text))
    assert (query.input_ids, query.token_type_ids) == make_sequence_template(model.config, scorer.vocab).apply(text.ids)
