"""Draw the sample that a tokenizer is trained on by tasks: the passages that one process would draw.

A first stage computes a keyed hash and the size of each passage, 12 bytes. This process reads them in order and decides
with the `PassageSample` of one process. A second stage returns the text of the passages that were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import say
from firth.tokens.cluster.engine import Engine
from firth.tokens.cluster.prepare import DOCUMENT_TIMEOUT_S, open_job, report_skipped, summarize_reading
from firth.tokens.cluster.store import read_array
from firth.tokens.cluster.tasks import DRAWN, task_name, write_bits
from firth.tokens.train import PassageSample


def sample_by_tasks(
    texts: Sequence[str | Path],
    output_dir: str | Path,
    engine: Engine,
    max_bytes: int,
    seed: int = 0,
    resume: bool = False,
    document_timeout: float = DOCUMENT_TIMEOUT_S,
    **reading: Any,
) -> list[str]:
    """Return a random sample of at most `max_bytes` of the text; tasks commit beside `output_dir`."""
    header = {"sample_bytes": max_bytes, "seed": seed}
    with open_job(texts, output_dir, engine, header, resume, document_timeout, **reading) as job:
        specs = [{**spec, "seed": seed} for spec in job.text_specs()]
        entries = job.run_stage("passages", "reading", specs, job.task_sizes)
        corpus = summarize_reading(job, entries)
        corpus.check_has_documents()
        sample = PassageSample[int](max_bytes)
        for task, entry in enumerate(entries):
            arrays = (read_array(job.store, task_name("passages", task), entry, key) for key in ("keys", "sizes"))
            for key, size in zip(*(array.tolist() for array in arrays), strict=True):
                sample.add(key, size, sample.num_seen)
        is_drawn = np.zeros(sample.num_seen, bool)
        is_drawn[sample.finish()] = True
        bits = write_bits(job.store, DRAWN, is_drawn)
        firsts = np.cumsum([0, *(entry["passages"] for entry in entries)]).tolist()
        specs = [
            {**spec, "bits": bits, "first_passage": first, "num_passages": entry["passages"], "skip": entry["skip"]}
            for spec, entry, first in zip(job.text_specs(), entries, firsts[:-1], strict=True)
        ]
        taken = job.run_stage("sample", "drawing a sample", specs, job.task_sizes, inputs=bits)
        report_skipped([skipped for entry in entries for skipped in entry["skipped"]])
        passages = list[str]()
        for task, entry in enumerate(taken):
            name = task_name("sample", task)
            text, sizes = (read_array(job.store, name, entry, key) for key in ("text", "sizes"))
            ends = np.cumsum(sizes).tolist()
            passages += [text[end - size : end].tobytes().decode() for end, size in zip(ends, sizes, strict=True)]
        job.store.clear()
        say(corpus.describe())
        return passages
