"""Run folders of the static models: train word vectors and n-gram models on shards, with checkpoints and resume.

T positions of a text, D documents.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from firth.core.console import StatusLine, format_count, format_duration, format_time_left, say, warn
from firth.core.errors import Interrupted, UserError
from firth.core.files import atomic_folder, find_corruption, write_json
from firth.core.memory import check_memory
from firth.core.serialization import to_dict
from firth.models import write_model
from firth.models.hf.tensors import translate_disk_errors
from firth.models.parameters import FLOAT_BYTES
from firth.static.learners import (
    GloVeTrainer,
    Word2VecCudaTrainer,
    Word2VecTrainer,
    WordVectorTrainer,
    count_cooccurrences,
    text_changed_error,
)
from firth.static.ngram import NgramModel, boundary_tokens, count_ngrams, predictable_tokens
from firth.static.recipe import (
    GloVeRecipe,
    NgramRecipe,
    StaticRecipe,
    Word2VecRecipe,
    WordVectorRecipe,
    WordVectorRecipeT,
    default_epochs,
    merge_static_recipe,
    save_static_recipe,
)
from firth.static.vocabulary import build_word_vocabulary, join_phrases
from firth.tokens import Shards, Vocabulary, open_shards
from firth.train.checkpoint import (
    explain_disk_errors,
    last_checkpoint,
    list_checkpoints,
    read_train_state,
    remove_folder,
)
from firth.train.log import RunLog, read_last_losses
from firth.train.recipe import describe_tracked_run
from firth.train.resume import read_results
from firth.train.speed import SpeedMeter
from firth.train.stop_signals import handle_stop_signals

MAX_TIMING_SECONDS = 4.0  # longest timing of steps for `minutes`
MAX_SCORED_TOKENS = 1_000_000  # of each part, for the loss of an n-gram model
DIVERGENCE_FACTOR = 3.0  # a loss above this multiple of that of untrained vectors is reported as divergence
RATE_NAMES: dict[type[WordVectorRecipe], str] = {Word2VecRecipe: "alpha", GloVeRecipe: "eta"}  # learning rates
VECTOR_STATE_FILE = "state.safetensors"


def run_static_recipe(
    folder: Path, recipe: StaticRecipe, resume: bool = False, start_time: float | None = None
) -> dict[str, Any]:
    """Run a recipe of word2vec, GloVe or n-grams in a run folder whose lock the caller holds.

    `start_time` is the start of `minutes` (time.monotonic).
    """
    start_time = time.monotonic() if start_time is None else start_time
    recipe.check()
    recipe = merge_static_recipe(folder, recipe, resume)
    if resume and find_corruption(folder / "final") is None and (done := read_results(folder / "results.json")):
        say(f"{folder} is finished already.")
        return done
    with explain_disk_errors(folder):
        if isinstance(recipe, NgramRecipe):
            results = train_ngram(folder, recipe)
        else:
            assert isinstance(recipe, WordVectorRecipe)
            results = train_word_vectors(folder, recipe, resume, start_time)
        results["seconds"] = time.monotonic() - start_time
        write_json(folder / "results.json", results)
    return results


def train_word_vectors(folder: Path, recipe: WordVectorRecipe, resume: bool, start_time: float) -> dict[str, Any]:
    shards = open_shards(recipe.data)
    text = shards.train
    lexicon = build_word_vocabulary(text, shards.tokenizer, recipe.min_count)
    held_out = shards.held_out
    if isinstance(recipe, Word2VecRecipe):
        if recipe.phrases and shards.tokenizer.kind != "word":
            raise UserError("phrases joins whole words: give text, or shards of a tokenizer of kind word.")
        for number in range(recipe.phrases):
            text, lexicon = join_phrases(text, lexicon, recipe, folder / f"phrases-{number + 1}")
            held_out = None  # its phrases are not joined
        if recipe.phrases:
            say("phrases are words to --similar, --analogy and files of vectors; texts that are read are not joined")
    warn_single_word_documents(text)
    num = len(lexicon.counts) - len(lexicon.tokenizer.vocab.special_ids)
    recipe = replace(recipe, epochs=recipe.epochs or default_epochs(text.num_tokens))
    say(f"{num:,} words with {recipe.vector_size} numbers each, {format_count(recipe.workers, 'worker')}")
    num_vectors = 2 * len(lexicon.counts) + recipe.bigrams
    check_memory(
        FLOAT_BYTES * num_vectors * recipe.vector_size,
        f"A table of {num_vectors:,} vectors of {recipe.vector_size:,} numbers",
        "Lower vector_size or bigrams, or raise min_count.",
    )
    is_word2vec_on_cpu = isinstance(recipe, Word2VecRecipe) and recipe.device == "cpu" and recipe.num_noise_words
    if is_word2vec_on_cpu and torch.cuda.is_available():
        say("this machine has a GPU: device=cuda learns there, which is faster on a long text")
    if not (recipe.max_steps or recipe.minutes):
        say(f"{text.num_tokens:,} tokens, read {format_count(recipe.epochs, 'time')}")
    make: Callable[[Any], WordVectorTrainer] = partial(
        Word2VecCudaTrainer if is_on_gpu(recipe) else Word2VecTrainer, text, lexicon
    )
    if isinstance(recipe, GloVeRecipe):
        make = partial(GloVeTrainer, count_cooccurrences(text, lexicon, recipe, folder / "counts"), lexicon)
    if not (folder / "log.jsonl").is_file():  # no step was taken yet
        recipe = resolve_vector_steps(recipe, make, held_out, start_time) if recipe.minutes else recipe
        save_static_recipe(recipe, folder / "recipe.yaml")
    learner = make(recipe)
    loss, speed = fit_word_vectors(learner, folder, resume)
    model = learner.to_model()
    if find_corruption(folder / "final") is not None:
        with atomic_folder(folder / "final") as temporary:
            write_model(model, temporary)
    eval_loss = None
    if isinstance(learner, Word2VecTrainer) and held_out is not None:
        learner.state_arrays()
        eval_loss = learner.held_out_loss(held_out)
    return {
        "output_dir": str(folder),
        "steps": learner.num_steps,
        "loss": loss,
        "eval_loss": eval_loss,
        "words": num,
        "tokens": learner.total_tokens,
        "tokens_per_second": speed,
        "parameters": model.num_parameters,
    }


def is_on_gpu(recipe: WordVectorRecipe) -> bool:
    return isinstance(recipe, Word2VecRecipe) and recipe.device == "cuda"


def resolve_vector_steps(
    recipe: WordVectorRecipeT,
    make_trainer: Callable[[WordVectorRecipeT], WordVectorTrainer],
    held_out: Shards | None,
    start_time: float,
) -> WordVectorRecipeT:
    """Set `max_steps` so that the run ends on time: some steps of a throwaway trainer are timed.

    word2vec's learning rate then decays over exactly these steps. A `max_steps` of the recipe is an upper limit.
    """
    with ThreadPoolExecutor(max(recipe.workers, 1)) as pool:
        learner = make_trainer(replace(recipe, max_steps=2**30))
        learner.step(0, pool)  # compiles
        start, done = time.monotonic(), 0
        limit = min(MAX_TIMING_SECONDS, 6 * recipe.minutes)  # 6 seconds a minute: a tenth of the run
        while not done or time.monotonic() - start < limit:
            done += 1
            learner.step(done, pool)
        seconds = (time.monotonic() - start) / done
        start = time.monotonic()
        if isinstance(learner, Word2VecTrainer) and held_out is not None:
            learner.held_out_loss(held_out)
        left = 60 * recipe.minutes - (time.monotonic() - start_time) - (time.monotonic() - start)
    steps = min(max(1, int(left / seconds)), recipe.max_steps or 2**30)
    say(f"{seconds:.3f}s a step: {format_count(steps, 'step takes', 'steps take')} {format_duration(steps * seconds)}")
    return replace(recipe, max_steps=steps)


def warn_single_word_documents(text: Shards) -> None:
    """Warn about documents of one word, which has no context; raise where there are no others."""
    lonely = int((np.diff(text.offsets) < 2).sum())
    if lonely == text.num_documents:
        raise UserError("Every document has one word: words are learned from those beside them. Give whole texts.")
    if lonely:
        warn(f"{lonely:,} of {text.num_documents:,} documents have one word or none, from which nothing is learned.")


def fit_word_vectors(trainer: WordVectorTrainer, folder: Path, resume: bool) -> tuple[float, float]:
    """Train all steps, with `resume` from the last valid checkpoint; return the last loss and tokens per second."""
    recipe, first = trainer.recipe, 0
    if resume and (checkpoint := last_checkpoint(folder)):
        first = read_train_state(checkpoint).step
        saved = load_file(checkpoint / "training" / VECTOR_STATE_FILE)
        for name, array in trainer.state_arrays().items():
            if saved[name].shape != array.shape:
                raise text_changed_error(checkpoint)
            array[:] = saved[name]
        upload_state(trainer)
        say(f"resuming from {checkpoint}")
    line, loss, per_second, diverged = StatusLine(), math.nan, 0.0, False
    speed = SpeedMeter(first, first * trainer.tokens_per_step)
    with (
        RunLog(folder / "log.jsonl", first, describe_tracked_run(recipe, folder)) as log,
        handle_stop_signals() as stop,
        ThreadPoolExecutor(max(recipe.workers, 1), thread_name_prefix="words") as pool,
    ):
        for number in range(first, trainer.num_steps):
            total, guesses = trainer.step(number, pool)
            loss, step = total / max(guesses, 1), number + 1
            if not math.isfinite(loss):
                raise UserError(f"The loss is {loss} at step {step}. Lower {RATE_NAMES[type(recipe)]}.")
            if loss > max(DIVERGENCE_FACTOR * trainer.untrained_loss, 1.0) and not diverged:
                warn(
                    f"The loss is {loss:.3g} at step {step}, and {trainer.untrained_loss:.3g} without training: "
                    f"the run diverges. Lower {RATE_NAMES[type(recipe)]}, which is {trainer.learning_rate(number):g}."
                )
                diverged = True
            tokens = min(step * trainer.tokens_per_step, trainer.total_tokens)
            log.write(step=step, loss=loss, learning_rate=trainer.learning_rate(number), tokens=tokens)
            per_second, a_step = speed.measure(step, tokens)
            left = format_time_left(a_step * (trainer.num_steps - step))
            line.show(f"step {step:,}/{trainer.num_steps:,}  loss {loss:.3f}  {per_second:,.0f} tokens/s  {left}")
            speed.end_warmup(step, tokens)
            if step % recipe.save_steps == 0 or stop.is_set():
                try_save_vectors(trainer, folder, step)
            if stop.is_set():
                line.close()
                raise Interrupted(f"stopped at step {step} of {trainer.num_steps}")
    line.close()
    if first == trainer.num_steps:
        loss, _ = read_last_losses(folder / "log.jsonl")
    return loss, per_second


def upload_state(trainer: WordVectorTrainer) -> None:
    if isinstance(trainer, Word2VecCudaTrainer):
        trainer.inputs.copy_(torch.from_numpy(trainer.inputs_ND))
        trainer.outputs.copy_(torch.from_numpy(trainer.outputs_ND))


def try_save_vectors(trainer: WordVectorTrainer, folder: Path, step: int) -> None:
    """Write a checkpoint; a full disk costs the checkpoint, with a warning, and not the run."""
    try:
        with translate_disk_errors(folder):
            save_vectors(trainer, folder, step)
    except OSError as e:
        warn(f"a checkpoint could not be written ({e.strerror or e}): earlier ones stay, and the run continues.")


def save_vectors(trainer: WordVectorTrainer, folder: Path, step: int) -> None:
    """Write `checkpoint-<step>`, a model and its training state, and remove older checkpoints."""
    with atomic_folder(folder / f"checkpoint-{step}", step=step) as temporary:
        write_model(trainer.to_model(), temporary)
        training = temporary / "training"
        training.mkdir()
        save_file(trainer.state_arrays(), training / VECTOR_STATE_FILE)
        write_json(training / "state.json", {"step": step, "recipe": to_dict(trainer.recipe)})
    if trainer.recipe.save_total_limit:
        for old in list_checkpoints(folder)[trainer.recipe.save_total_limit :]:
            remove_folder(old)


# --- n-grams --------------------------------------------------------------------------------------------------------


def train_ngram(folder: Path, recipe: NgramRecipe) -> dict[str, Any]:
    """Count an n-gram model of the shards and write it to `final/`."""
    shards = open_shards(recipe.data)
    vocab = shards.tokenizer.vocab
    say(f"counting n-grams up to order {recipe.order}")
    ids_T, starts_T = concat_documents(shards.train, vocab)
    model = count_ngrams(ids_T, starts_T, vocab.size, predictable_tokens(vocab), recipe.order, recipe.discount)
    if model.order < recipe.order:
        warn(f"no document is long enough for order {recipe.order}: the model has order {model.order}.")
    model = replace(model, tokenizer=shards.tokenizer)
    if find_corruption(folder / "final") is not None:
        with atomic_folder(folder / "final") as temporary:
            model.save(temporary)
    parts = {"loss": shards.train, "eval_loss": shards.held_out}
    losses = {name: ngram_mean_loss(model, part, vocab) if part is not None else None for name, part in parts.items()}
    with RunLog(folder / "log.jsonl", 0, describe_tracked_run(recipe, folder)) as log:
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


def concat_documents(shards: Shards, vocab: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """(T,) all documents, each between start and end token, and (T,) whether a token is a start token."""
    first, end = boundary_tokens(vocab)
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


def ngram_mean_loss(model: NgramModel, shards: Shards, vocab: Vocabulary) -> float:
    """Return nats per token, end tokens included, in a sample of a large text."""
    first, end = boundary_tokens(vocab)
    total, num = 0.0, 0
    for document in shards.sample_documents(MAX_SCORED_TOKENS).tolist():
        logp = model.log_probs(np.array([first, *shards.document_tokens(document).tolist(), end]))
        total, num = total - float(logp.sum()), num + len(logp)
    return total / num
