"""`firth adapt`: continued pretraining on a domain, measured before and after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.commands.arguments import flatten_keys
from firth.commands.data_source import DataOptions, check_same_source, pop_corpus_options
from firth.commands.pretrain_plan import next_run_seed, plan_pretraining, read_saved_fields
from firth.commands.results import AdaptResult
from firth.commands.shards import write_shards
from firth.core.console import report_errors, say, warn
from firth.core.errors import UserError, quote
from firth.core.files import find_corruption, format_bytes, write_results
from firth.core.serialization import to_dict
from firth.models.hf.config_io import read_stored_objective
from firth.text import HELD_OUT_FRACTION, Corpus, load_salient_finder
from firth.text.corpus import STDIN_PATH
from firth.tokens import Tokenizer, is_shards_folder, load_tokenizer, open_shards
from firth.tokens import prepare as prepare_shards
from firth.tokens.shard_writer import remove_finished_journal
from firth.tokens.shards import find_shard_damage, remember_verified
from firth.train.clock import RunClock
from firth.train.launch_env import require_single_process
from firth.train.recipe import read_yaml_mapping

if TYPE_CHECKING:
    from firth.lab.adapt import AdaptStart
    from firth.lab.adapt_texts import CorpusText, SplitText, TextSample
    from firth.text import SalientSpanFinder

REPLAY_SHARE = 0.1  # of the training tokens
MIN_REPLAY_BYTES = 4_000_000  # bytes of general text to draw replay from, where there are as many
AUTO_TOKENS = "auto"
START_FOLDER = "start-adapted"  # the checkpoint with new tokens, before training
STATE_FILE = "adapt.json"


def adapt(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    general: str | Path | Sequence[str | Path] = (),
    new_tokens: str | int = AUTO_TOKENS,
    replay_share: float = REPLAY_SHARE,
    held_out: float = HELD_OUT_FRACTION,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
    dry_run: bool = False,
    **options: Any,
) -> AdaptResult:
    """Continue the pretraining of a checkpoint on a domain; measure both it and general text before and after.

    `data` is text of the domain, of which `held_out` is kept to measure on; the run is written to `output_dir`.
    `general` is text of the kind that the checkpoint was trained on; by default the text of its own run, where that
    still exists. `replay_share` of the training tokens come from it. `new_tokens` is "auto", which adds tokens to the
    tokenizer where they pay, or their number. `options` are fields of the recipe, and arguments of Corpus. The
    objective is that of `checkpoint`. `config`, `overrides`, `resume`, `overwrite`, `allow_change`, `rewind` and
    `dry_run` are as in `pretrain`.

    The results have bits per byte and tokens per word of `domain` and `general` `before` and `after`, and `forgetting`:
    by how much the bits per byte of general text have risen.
    """
    start_time = time.monotonic()
    require_single_process("adapt runs in one process. For several, extend the tokenizer and pretrain with torchrun.")
    requested, source, path = parse_new_tokens(new_tokens), Path(checkpoint), Path(output_dir)
    check_shares(replay_share, held_out)
    from firth.evaluate.companions import COMPANIONS
    from firth.lab.adapt import check_adaptable
    from firth.lab.adapt_page import write_adaptation_report
    from firth.lab.adapt_texts import CorpusText, replay_epochs
    from firth.train import pretrain_in_folder, run_folder
    from firth.train.folder import check_run_folder

    check_adaptable(source)
    texts, general_texts = as_paths(data), as_paths(general)
    check_adapt_texts([*texts, *general_texts])
    reading = pop_corpus_options(options)
    fields, changes = own_fields(source, config, options, overrides)
    saved = {} if overwrite else read_saved_fields(path)

    def plan(model: Path, sources: Sequence[str | Path], **more: Any) -> Any:
        data_options = DataOptions(0, False, held_out, reading)
        return plan_pretraining(
            model, sources, path, None, None, data_options, config, changes, {**fields, **more}, saved
        )

    checked = plan(source, texts)
    domain_text = CorpusText(Corpus(texts, **reading), held_out)
    general_text, general_name = open_general(source, general_texts, reading, held_out)
    inputs = [*texts, *general_texts, source]
    resume = resume or rewind is not None
    if dry_run:
        check_run_folder(path, resume, overwrite, inputs)
        about = {"general": general_name or None, "replay_share": replay_share if general_text else 0.0}
        return AdaptResult({"dry_run": True, **checked.describe(), **about, "new_tokens": new_tokens})
    with run_folder(path, resume, overwrite, inputs) as folder, RunClock(path, resume, start_time) as clock:
        record = {
            "data": list(map(str, texts)),
            "bytes": domain_text.corpus.total_bytes,
            **reading,
            "tokenizer": load_tokenizer(source).fingerprint,
            "held_out": held_out,
            "general": list(map(str, general_texts)),
            "general_from": "" if general_texts or general_text is None else str(source.absolute().parent),
            "new_tokens": str(new_tokens),
            "replay_share": replay_share,
        }
        check_same_source(folder / "source.json", record)
        begun, samples = begin(folder, source, domain_text, general_text, general_name, requested)
        start = folder / START_FOLDER if begun.new_tokens else source
        clock.save()
        salient = load_salient_finder("default") if checked.data_source.marks_salient else None
        replayed = general_text if "general" in samples and replay_share > 0 else None
        shards = make_adapt_shards(folder / "data", domain_text, replayed, samples, load_tokenizer(start), salient)
        clock.save()
        if replayed is not None:
            num_tokens = {name: open_shards(Path(shard)).num_tokens for name, shard in shards.items()}
            epochs = replay_epochs(num_tokens["domain"], num_tokens["general"], replay_share)
            planned = plan(start, [f"{name}={shard}" for name, shard in shards.items()], mix_epochs=epochs)
            recipe = planned.resolve_recipe(shards)
        else:
            recipe = plan(start, [shards["domain"]]).resolve_recipe({"": shards["domain"]})
        # The measurement after training takes as long as the one before it: it is a part of the minutes.
        start_time = clock.start_time - begun.seconds
        results = pretrain_in_folder(folder, recipe, resume, start_time, allow_change, rewind, companions=COMPANIONS)
        if "domain" not in results:
            replay = {"share": 0.0} if replayed is None else {"share": replay_share, "source": general_name}
            about = {"checkpoint": str(source), "data": ", ".join(Path(text).name for text in texts)}
            found = measure_end(folder, begun, samples, replay)
            results = {**results, **about, **found, "seconds": clock.elapsed_seconds}
            write_results(folder / "results.json", results)
        report: dict[str, str] = {}
        with report_errors():
            report = write_adaptation_report(folder, results)
        return AdaptResult({**results, **report})


def check_shares(replay_share: float, held_out: float) -> None:
    if not 0 <= replay_share < 1:
        raise UserError(f"--replay-share is {replay_share:g}, and must be at least 0 and less than 1.")
    if not 0 < held_out < 1:
        raise UserError(f"--held-out is {held_out:g}, and must be between 0 and 1: the model is measured on this text.")


def check_adapt_texts(texts: Sequence[str | Path]) -> None:
    for text in texts:
        if str(text) == STDIN_PATH:
            raise UserError("adapt reads its text several times, and standard input only once. Give a file.")
        if is_shards_folder(Path(text)):
            raise UserError(f"{text} holds shards, and bits per byte need text. Give the text that they were made of.")


def as_paths(given: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [given] if isinstance(given, str | Path) else list(given)


def parse_new_tokens(given: str | int) -> int | None:
    """Return a number of new tokens; None for "auto"."""
    if given == AUTO_TOKENS:
        return None
    text = str(given)
    if not text.isdecimal():
        raise UserError(f"--new-tokens: {quote(text)} is neither a whole number nor auto.")
    return int(text)


def own_fields(
    checkpoint: Path, config: str | Path | None, options: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options and overrides of the recipe, with the objective, row length and next seed of the checkpoint.

    What the user has set, in a file as well, comes first.
    """
    from firth.lab.adapt import read_own_run_fields

    in_file = flatten_keys(read_yaml_mapping(Path(config))) if config else {}
    given = {name for name, value in options.items() if value is not None} | {*in_file} | {*(overrides or {})}
    own = {**read_own_run_fields(checkpoint), **next_run_seed(checkpoint)}
    fields = {name: value for name, value in own.items() if name not in given} | dict(options)
    objective = {} if any(name.startswith("objective") for name in in_file) else read_stored_objective(checkpoint)
    return fields, {**({"objective": objective} if objective else {}), **(overrides or {})}


def open_general(
    checkpoint: Path, given: Sequence[str | Path], reading: Mapping[str, Any], held_out: float
) -> tuple[SplitText | None, str]:
    """Return the general text and its name: the given one, or that of the checkpoint's own run."""
    from firth.lab.adapt_texts import CorpusText, find_own_text

    if given:
        return CorpusText(Corpus(given, **reading), held_out), ", ".join(map(str, given))
    if (found := find_own_text(checkpoint)) is not None:
        say(f"general text: {found[1]}, which {checkpoint} was trained on")
        return found
    warn(
        f"{checkpoint} does not say which text it was trained on, or that text is gone or has changed: forgetting "
        "cannot be measured, and nothing can be replayed. --general TEXT names text of that kind."
    )
    return None, ""


def sample_general(text: SplitText, measured_bytes: int, name: str) -> dict[str, TextSample]:
    """Return the held-out sample of a general text by its name; empty, with a warning, where nothing is held out."""
    from firth.lab.adapt_texts import check_sample, sample_held_out

    sample = sample_held_out(text, measured_bytes, "the general text")
    try:
        check_sample(sample, name)
    except UserError as e:
        warn(f"{e} Without it, forgetting is not measured and nothing is replayed.")
        return {}
    return {"general": sample}


def begin(
    folder: Path,
    checkpoint: Path,
    text: CorpusText,
    general_text: SplitText | None,
    general_name: str,
    requested: int | None,
) -> tuple[AdaptStart, dict[str, TextSample]]:
    """Measure the checkpoint, choose new tokens, and write the weights to start from; also return the measured texts.

    A resumed run takes all this from its earlier part.
    """
    from firth.lab.adapt import (
        AdaptStart,
        choose_measured_bytes,
        choose_new_tokens,
        list_new_tokens,
        measure_model,
        say_measures,
        write_start,
    )
    from firth.lab.adapt_texts import check_sample, sample_held_out
    from firth.train.resume import read_intermediate, write_intermediate

    earlier = read_intermediate(folder / STATE_FILE, AdaptStart)  # its bytes: that machine may have been faster
    measured_bytes = choose_measured_bytes(checkpoint) if earlier is None else earlier.measured_bytes
    samples = {"domain": sample_held_out(text, measured_bytes, "the domain text")}
    check_sample(samples["domain"], "--data")
    if general_text is not None:
        samples |= sample_general(general_text, measured_bytes, general_name)
    start = folder / START_FOLDER
    if earlier is not None and (not earlier.new_tokens or find_corruption(start) is None):
        return earlier, samples
    began = time.monotonic()
    before = measure_model(checkpoint, samples)
    seconds = time.monotonic() - began
    say_measures("before", before)
    choice = choose_new_tokens(load_tokenizer(checkpoint), text, samples["domain"], requested)
    say(choice.reason)
    if choice.tokens:
        write_start(checkpoint, choice.tokenizer, start)
    begun = AdaptStart(
        measured_bytes=measured_bytes,
        seconds=seconds,
        before=before,
        start=measure_model(start, samples) if choice.tokens else {},
        new_tokens=list_new_tokens(choice, samples["domain"].train_bytes),
        tokens_saved=choice.saved_share,
        decision=choice.reason,
    )
    say_measures("with new tokens, untrained", begun.start)
    write_intermediate(folder / STATE_FILE, to_dict(begun))
    return begun, samples


def measure_end(
    folder: Path, begun: AdaptStart, samples: Mapping[str, TextSample], replay: Mapping[str, Any]
) -> dict[str, Any]:
    """Measure the trained model, and compare it with the start."""
    from firth.lab.adapt import collect_results, measure_model, say_measures

    after = measure_model(folder / "final", samples)
    say_measures("after", after)
    return collect_results(begun, after, replay)


def make_adapt_shards(
    folder: Path,
    text: CorpusText,
    replayed: SplitText | None,
    samples: Mapping[str, TextSample],
    tokenizer: Tokenizer,
    salient: SalientSpanFinder | None,
) -> dict[str, str]:
    """Return the shards of the domain, and of the general text that is replayed."""
    shards = {"domain": make_domain_shards(folder / "domain", text, tokenizer, salient)}
    if replayed is not None:
        shards["general"] = make_replay_shards(folder / "general", replayed, samples, tokenizer, salient)
    return shards


def make_domain_shards(folder: Path, text: CorpusText, tokenizer: Tokenizer, salient: SalientSpanFinder | None) -> str:
    """Write the shards of the domain, unless they are there."""
    if is_complete(folder):
        return str(folder)
    write_shards(text.corpus, tokenizer, folder, text.held_out, salient)
    return str(folder)


def make_replay_shards(
    folder: Path,
    text: SplitText,
    samples: Mapping[str, TextSample],
    tokenizer: Tokenizer,
    salient: SalientSpanFinder | None,
) -> str:
    """Write the shards of a random part of the general text, about as large as the domain, unless they are there."""
    if is_complete(folder):
        return str(folder)
    from firth.lab.adapt_texts import ReplayDocuments

    wanted = max(samples["domain"].train_bytes, MIN_REPLAY_BYTES)
    share = min(1.0, wanted / samples["general"].train_bytes)
    say(f"replay: {share:.0%} of {format_bytes(samples['general'].train_bytes)} of general text")
    prepare_shards(ReplayDocuments(text, share), tokenizer, folder, text.held_out, salient=salient, resume=True)
    remember_verified(folder)
    return str(folder)


def is_complete(shards: Path) -> bool:
    if not is_shards_folder(shards) or find_shard_damage(shards) is not None:
        return False
    remove_finished_journal(shards)
    return True
