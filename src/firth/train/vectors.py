"""Text to word vectors and n-gram models: what learns by counting and guessing neighbours.

W words of a stretch of text, V ids of the shards, N words of the model, D numbers of a vector.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from firth.console import Line, count, duration, say, warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_json
from firth.models import write_model
from firth.models.ngram import Ngram, count_ngrams, frame_of, possible
from firth.plain import to_plain
from firth.tokens import Shards, Vocabulary, open_shards
from firth.train.checkpoint import disk_errors, last_checkpoint, last_writes, list_checkpoints, remove_folder
from firth.train.counted import Counted, GloVe, NgramRecipe, V, Vectors, Word2Vec, same_counted, store
from firth.train.learners import FEWEST, Factors, Learner, OnGPU, SkipGramOrCBOW, count_meetings
from firth.train.log import Log, last_loss
from firth.train.loop import Interrupted, Speed, stop_asked
from firth.train.words import join_phrases, read_lexicon

ENOUGH, OFTENEST = 20_000_000, 50  # tokens of word2vec in all, and the most epochs, unless said
TRIAL = 4.0  # seconds at most that steps are timed for, where a run is to end on time
STATE = "state.safetensors"


def pretrain_vectors(folder: Path, recipe: Counted, resume: bool = False, began: float | None = None) -> dict[str, Any]:
    """Run a recipe of word2vec, GloVe or n-grams in a folder that is held already.

    `began` is when the clock of `minutes` started (time.monotonic).
    """
    began = time.monotonic() if began is None else began
    recipe.check()
    recipe = same_counted(folder, recipe, resume)
    if resume and (folder / "results.json").is_file() and damage(folder / "final") is None:
        say(f"{folder} is finished already.")
        return dict(read_json(folder / "results.json"))
    with last_writes(folder):
        if isinstance(recipe, NgramRecipe):
            results = count_text(folder, recipe)
        else:
            assert isinstance(recipe, Vectors)
            results = learn_vectors(folder, recipe, resume, began)
        results["seconds"] = time.monotonic() - began
        write_json(folder / "results.json", results)
    return results


def learn_vectors(folder: Path, recipe: Vectors, resume: bool, began: float) -> dict[str, Any]:
    shards = open_shards(recipe.data)
    text = shards.train
    lexicon = read_lexicon(text, shards.tokenizer, recipe.min_count)
    held_out = shards.held_out
    if isinstance(recipe, Word2Vec):
        if recipe.phrases and shards.tokenizer.kind != "word":
            raise UserError("phrases joins whole words: give text, or shards of a tokenizer of kind word.")
        for number in range(recipe.phrases):
            text, lexicon = join_phrases(text, lexicon, recipe, folder / f"phrases-{number + 1}")
            held_out = None  # its phrases are not joined
        if recipe.phrases:
            say("phrases are words to --similar, --analogy and files of vectors; texts that are read are not joined")
    warn_of_lonely_words(text)
    num = len(lexicon.counts) - len(lexicon.tokenizer.vocab.special)
    recipe = replace(recipe, epochs=recipe.epochs or epochs_for(text.num_tokens))
    say(f"{num:,} words with {recipe.vector_size} numbers each, {count(recipe.workers, 'worker')}")
    if isinstance(recipe, Word2Vec) and recipe.device == "cpu" and recipe.negative and torch.cuda.is_available():
        say("this machine has a GPU: device=cuda learns there, which is faster on a long text")
    if not (recipe.max_steps or recipe.minutes):
        say(f"{text.num_tokens:,} tokens, read {count(recipe.epochs, 'time')}")
    make: Callable[[Any], Learner] = partial(OnGPU if is_on_gpu(recipe) else SkipGramOrCBOW, text, lexicon)
    if isinstance(recipe, GloVe):
        make = partial(Factors, count_meetings(text, lexicon, recipe, folder / "counts"), lexicon)
    if not (folder / "log.jsonl").is_file():  # no step was taken yet
        recipe = settle(recipe, make, held_out, began) if recipe.minutes else recipe
        store(recipe, folder / "recipe.yaml")
    learner = make(recipe)
    loss, speed = fit_vectors(learner, folder, resume)
    model = learner.model()
    if damage(folder / "final") is not None:
        with whole_folder(folder / "final") as temporary:
            write_model(model, temporary)
    eval_loss = None
    if isinstance(learner, SkipGramOrCBOW) and held_out is not None:
        learner.state()
        eval_loss = learner.held_out_loss(held_out)
    return {
        "output_dir": str(folder),
        "steps": learner.steps,
        "loss": loss,
        "eval_loss": eval_loss,
        "words": num,
        "tokens": learner.tokens,
        "tokens_per_second": speed,
        "parameters": model.num_parameters,
    }


def epochs_for(tokens: int) -> int:
    """How often a text is read unless said: 5 times, and a small one oftener.

    >>> epochs_for(10**9), epochs_for(10**6), epochs_for(10**4)
    (5, 20, 50)
    """
    return min(max(FEWEST, -(-ENOUGH // max(tokens, 1))), OFTENEST)


def is_on_gpu(recipe: Vectors) -> bool:
    return isinstance(recipe, Word2Vec) and recipe.device == "cuda"


def settle(recipe: V, make: Callable[[V], Learner], held_out: Shards | None, began: float) -> V:
    """Fix the steps that end with the minutes: some are timed, of a learner that is thrown away.

    The rate of word2vec falls over just these, so that it ends where it should; `max_steps` says how many at most.
    """
    with ThreadPoolExecutor(max(recipe.workers, 1)) as pool:
        learner = make(replace(recipe, max_steps=2**30))
        learner.step(0, pool)  # compiles
        start, done = time.monotonic(), 0
        while not done or time.monotonic() - start < min(TRIAL, 6 * recipe.minutes):  # a tenth of the run at most
            done += 1
            learner.step(done, pool)
        seconds = (time.monotonic() - start) / done
        start = time.monotonic()
        if isinstance(learner, SkipGramOrCBOW) and held_out is not None:
            learner.held_out_loss(held_out)
        left = 60 * recipe.minutes - (time.monotonic() - began) - (time.monotonic() - start)
    steps = min(max(1, int(left / seconds)), recipe.max_steps or 2**30)
    say(f"{seconds:.3f}s a step: {count(steps, 'step takes', 'steps take')} {duration(steps * seconds)}")
    return replace(recipe, max_steps=steps)


def warn_of_lonely_words(text: Shards) -> None:
    """Say how many documents have one word only: nothing stands beside it."""
    lonely = int((np.diff(text.offsets) < 2).sum())
    if lonely == text.num_documents:
        raise UserError("Every document has one word: words are learned from those beside them. Give whole texts.")
    if lonely:
        warn(f"{lonely:,} of {text.num_documents:,} documents have one word or none, from which nothing is learned.")


def fit_vectors(learner: Learner, folder: Path, resume: bool) -> tuple[float, float]:
    """All steps, from the last whole checkpoint on when `resume`; the last loss, and tokens per second."""
    recipe, first = learner.recipe, 0
    if resume and (found := last_checkpoint(folder)):
        first = int(read_json(found / "training" / "state.json")["step"])
        saved = load_file(found / "training" / STATE)
        for name, array in learner.state().items():
            array[:] = saved[name]
        put_back(learner)
        say(f"going on from {found}")
    line, loss, per_second = Line(), math.nan, 0.0
    speed = Speed(first, first * learner.tokens_per_step)
    with (
        Log(folder / "log.jsonl", first) as log,
        stop_asked() as stop,
        ThreadPoolExecutor(max(recipe.workers, 1), thread_name_prefix="words") as pool,
    ):
        for number in range(first, learner.steps):
            total, guesses = learner.step(number, pool)
            loss, step = total / max(guesses, 1), number + 1
            if not math.isfinite(loss):
                raise UserError(f"The loss is {loss} at step {step}. Lower the rate (alpha of word2vec, eta of GloVe).")
            tokens = min(step * learner.tokens_per_step, learner.tokens)
            log.write(step=step, loss=loss, learning_rate=learner.rate(number), tokens=tokens)
            per_second, a_step = speed.until(step, tokens)
            left = duration(a_step * (learner.steps - step))
            line.show(f"step {step:,}/{learner.steps:,}  loss {loss:.3f}  {per_second:,.0f} tokens/s  {left} left")
            speed.settle(step, tokens)
            if step % recipe.save_steps == 0 or stop.is_set():
                try_to_save(learner, folder, step)
            if stop.is_set():
                line.close()
                raise Interrupted(f"stopped at step {step} of {learner.steps}")
    line.close()
    if first == learner.steps:
        loss = last_loss(folder / "log.jsonl")
    return loss, per_second


def put_back(learner: Learner) -> None:
    if isinstance(learner, OnGPU):
        learner.inputs.copy_(torch.from_numpy(learner.inputs_ND))
        learner.outputs.copy_(torch.from_numpy(learner.outputs_ND))


def try_to_save(learner: Learner, folder: Path, step: int) -> None:
    """Write a checkpoint; a disk that is full costs that, which is said, and not the run."""
    try:
        with disk_errors(folder):
            save_vectors(learner, folder, step)
    except OSError as e:
        warn(f"a checkpoint could not be written ({e.strerror or e}): those before it stay, and the run goes on.")


def save_vectors(learner: Learner, folder: Path, step: int) -> None:
    """Write `checkpoint-<step>`, a model with what a resumed run needs beside it, and remove older ones."""
    with whole_folder(folder / f"checkpoint-{step}", step=step) as temporary:
        write_model(learner.model(), temporary)
        training = temporary / "training"
        training.mkdir()
        save_file(learner.state(), training / STATE)
        write_json(training / "state.json", {"step": step, "recipe": to_plain(learner.recipe)})
    if learner.recipe.save_total_limit:
        for old in list_checkpoints(folder)[learner.recipe.save_total_limit :]:
            remove_folder(old)


# --- n-grams --------------------------------------------------------------------------------------------------------


def count_text(folder: Path, recipe: NgramRecipe) -> dict[str, Any]:
    """An n-gram model of the shards, into `final/`."""
    shards = open_shards(recipe.data)
    vocab = shards.tokenizer.vocab
    say(f"counting n-grams up to order {recipe.order}")
    ids_T, starts_T = framed(shards.train, vocab)
    model = count_ngrams(ids_T, starts_T, vocab.size, possible(vocab), recipe.order, recipe.discount)
    if model.order < recipe.order:
        warn(f"no document is long enough for order {recipe.order}: the model has order {model.order}.")
    model = replace(model, tokenizer=shards.tokenizer)
    if damage(folder / "final") is not None:
        with whole_folder(folder / "final") as temporary:
            model.save(temporary)
    parts = {"loss": shards.train, "eval_loss": shards.held_out}
    losses = {name: mean_loss(model, part, vocab) if part is not None else None for name, part in parts.items()}
    with Log(folder / "log.jsonl", 0) as log:
        log.write(step=1, learning_rate=0.0, tokens=shards.train.num_tokens, **losses)
    return {
        "output_dir": str(folder),
        "steps": 1,
        **losses,
        "unigram_entropy": shards.manifest.get("unigram_entropy"),
        "tokens": shards.train.num_tokens,
        "ngrams": [len(level.key) for level in model.levels],
        "parameters": sum(2 * len(level.key) for level in model.levels),
    }


def framed(shards: Shards, vocab: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """All documents end to end, each in its frame, and where each begins."""
    first, end = frame_of(vocab)
    size_D = np.diff(shards.offsets)
    begin_D = np.asarray(shards.offsets[:-1]) + 2 * np.arange(len(size_D))
    ids_T = np.full(shards.num_tokens + 2 * len(size_D), first, np.int64)
    ids_T[begin_D + size_D + 1] = end
    starts_T = np.zeros(len(ids_T), bool)
    starts_T[begin_D] = True
    text = np.ones(len(ids_T), bool)
    text[begin_D] = text[begin_D + size_D + 1] = False
    ids_T[text] = shards.tokens
    return ids_T, starts_T


def mean_loss(model: Ngram, shards: Shards, vocab: Vocabulary) -> float:
    """Nats per token, ends included, over at most a million tokens."""
    ids_T, starts_T = framed(shards, vocab)
    edges = [*np.flatnonzero(starts_T).tolist(), len(ids_T)]
    total, num = 0.0, 0
    for a, b in pairwise(edges):
        total -= float(model.logp(ids_T[a:b]).sum())
        num += b - a - 1
        if num > 1_000_000:
            break
    return total / num
