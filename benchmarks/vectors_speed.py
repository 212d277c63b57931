"""Compare word2vec training with gensim: speed and quality, with the same words, settings and machine.

    python benchmarks/vectors_speed.py TEXT... [--megabytes N] [--repeats N] [--workers N] [--pairs FILE ...] \\
        [--analogies FILE] [--json]

Skip-gram with 5 negative samples, 100 dimensions, window 5, 5 epochs. gensim reads a file by its fast path
(`corpus_file`), Firth reads its shards; building the vocabulary is not timed. The sides alternate, so that other load
on the machine slows both; the ratio is the median over the repeats. Words per second are counted before subsampling;
those per CPU second hardly depend on other load. `--pairs` are files of word pairs with human scores (word1, word2,
score): the mean Spearman correlation over the repeats, one seed each. `--analogies` is a file of questions (a, b, c,
d): the mean accuracy. Both are printed with their standard deviation.

With W workers gensim's fast path gives other vectors at the same settings (better ones on small text), because its
learning rate does not fall as far: each worker compares the sentences of its own part of the file with the total
(`get_next_alpha` in word2vec_corpusfile.pyx). So in every epoch the rate falls by 1/W of what it should, and the last
epoch ends at alpha (1 - 1/W) / epochs. `--min-alpha` sets the end of our schedule (2 workers, 5 epochs: 0.0025).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gensim.models import Word2Vec as GensimWord2Vec

from firth.core.console import format_count, progress, show_table
from firth.evaluate import WordVectors, evaluate_word_similarity
from firth.evaluate.vectors import evaluate_analogies
from firth.metrics import mean_and_std
from firth.static.learners import Word2VecTrainer
from firth.static.recipe import Word2VecRecipe
from firth.static.vocabulary import WordVocabulary, build_word_vocabulary
from firth.text import Corpus, read_labelled
from firth.tokens import Shards, Tokenizer, open_shards, prepare, train_tokenizer

TARGET_RATIO = 1.2
SETTINGS: dict[str, Any] = {
    "vector_size": 100,
    "window": 5,
    "min_count": 5,
    "negative": 5,
    "sg": 1,
    "sample": 1e-3,
    "alpha": 0.025,
    "epochs": 5,
}


class TrainingResult(NamedTuple):
    """Wall-clock and CPU seconds of one run, and its vectors."""

    seconds: float
    cpu_seconds: float
    vectors: WordVectors


def main() -> None:
    args = parse_arguments()
    SETTINGS["epochs"] = args.epochs
    with tempfile.TemporaryDirectory(prefix="firth-vectors-") as folder:
        shards, tokenizer = prepare_text(args.texts, int(args.megabytes * 1e6), Path(folder))
        word_vocab = build_word_vocabulary(shards, tokenizer, SETTINGS["min_count"])
        file = Path(folder) / "words.txt"
        write_gensim_corpus(shards, word_vocab, file)
        words = int(word_vocab.counts.sum()) * SETTINGS["epochs"]
        runs: dict[str, list[TrainingResult]] = {"firth": [], "gensim": []}
        train_ours(shards, word_vocab, args.workers, 0, args.min_alpha, epochs=0)  # compiles
        with progress("training", "repeats", args.repeats) as bar:
            for seed in range(1, args.repeats + 1):
                runs["firth"].append(train_ours(shards, word_vocab, args.workers, seed, args.min_alpha))
                runs["gensim"].append(train_gensim(file, word_vocab, args.workers, seed))
                bar.advance()
    result = summarize(runs, words, args.pairs, args.analogies)
    result |= {"words": words, "vocabulary": int((word_vocab.counts > 0).sum()), "workers": args.workers}
    if args.json:
        print(json.dumps(result))
        return
    rows = [[name, *(f"{value:,.4g}" for value in side.values())] for name, side in result["sides"].items()]
    show_table(
        f"Skip-gram, {words:,} words, {format_count(args.workers, 'worker')}", ["", *result["sides"]["firth"]], rows
    )
    print(f"ratio {result['ratio']:.2f}, by CPU time {result['cpu_ratio']:.2f} (target: {TARGET_RATIO})")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="files or folders of text")
    parser.add_argument("--megabytes", type=float, default=12.0, help="read this much of the text (12)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side (3)")
    parser.add_argument("--workers", type=int, default=2, help="threads of each side (2)")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of both sides (5)")
    parser.add_argument("--min-alpha", type=float, default=0.0001, help="our final learning rate (0.0001)")
    parser.add_argument("--pairs", nargs="*", default=[], help="files of word pairs with scores (none)")
    parser.add_argument("--analogies", default="", help="file of questions: a is to b as c is to d (none)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def prepare_text(texts: Sequence[str], size: int, folder: Path) -> tuple[Shards, Tokenizer]:
    """Prepare the first `size` characters of the text, lowercased, as shards of whole words."""
    part, done = folder / "part.jsonl", 0
    with open(part, "w", encoding="utf-8") as file:
        for document in Corpus(texts):
            file.write(json.dumps({"text": document.text}) + "\n")
            done += len(document.text)
            if done > size:
                break
    corpus = Corpus([part])
    tokenizer = train_tokenizer(corpus.texts(), "word", 2**20, lowercase=True)
    prepare(corpus, tokenizer, folder / "shards", 0.0)
    return open_shards(folder / "shards").train, tokenizer


def write_gensim_corpus(shards: Shards, word_vocab: WordVocabulary, file: Path) -> None:
    """Write the same word ids for gensim, one document per line."""
    with open(file, "w", encoding="utf-8") as out:
        for begin, end in zip(shards.offsets[:-1], shards.offsets[1:], strict=True):
            words = word_vocab.word_ids[shards.tokens[begin:end]]
            out.write(" ".join(map(str, words[words >= 0].tolist())) + "\n")


def train_ours(
    shards: Shards, word_vocab: WordVocabulary, workers: int, seed: int, min_alpha: float, **changes: Any
) -> TrainingResult:
    settings = SETTINGS | {"workers": workers, "seed": seed, "min_alpha": min_alpha} | changes
    trainer = Word2VecTrainer(shards, word_vocab, Word2VecRecipe(**settings | {"epochs": max(settings["epochs"], 1)}))
    start, cpu_start = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        for number in range(trainer.num_steps if settings["epochs"] else 1):
            trainer.step(number, pool)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return TrainingResult(
        seconds, cpu_seconds, to_word_vectors(range(len(word_vocab.counts)), trainer.inputs_ND, word_vocab)
    )


def train_gensim(file: Path, word_vocab: WordVocabulary, workers: int, seed: int) -> TrainingResult:
    model = GensimWord2Vec(**SETTINGS, workers=workers, seed=seed)
    model.build_vocab(corpus_file=str(file))
    start, cpu_start = time.perf_counter(), time.process_time()
    total = {"total_words": model.corpus_total_words, "total_examples": model.corpus_count}
    model.train(corpus_file=str(file), epochs=SETTINGS["epochs"], **total)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    ids = map(int, model.wv.index_to_key)
    return TrainingResult(seconds, cpu_seconds, to_word_vectors(list(ids), model.wv.vectors, word_vocab))


def to_word_vectors(ids: Sequence[int], vectors_ND: np.ndarray, word_vocab: WordVocabulary) -> WordVectors:
    """Return vectors by word; `ids` are the word ids of the rows."""
    return WordVectors([str(word_vocab.tokenizer.backend.id_to_token(i)) for i in ids], vectors_ND)


def summarize(
    runs: dict[str, list[TrainingResult]], words: int, pairs: Sequence[str], analogies: str
) -> dict[str, Any]:
    sides: dict[str, dict[str, float]] = {}
    tests = [(file, "word-similarity", evaluate_word_similarity, "spearman") for file in pairs]
    tests += [(analogies, "analogy", evaluate_analogies, "accuracy")] if analogies else []
    for name, side_runs in runs.items():
        sides[name] = {
            "words/s": statistics.median(words / run.seconds for run in side_runs),
            "words/CPU second": statistics.median(words / run.cpu_seconds for run in side_runs),
        }
        for file, task, test, metric in tests:
            examples, name_of_test = read_labelled(file, task, None, "dev"), Path(file).name.split(".")[0]
            mean, std = mean_and_std([test(run.vectors, examples).metrics[metric] for run in side_runs])
            sides[name] |= {name_of_test: mean, f"{name_of_test} ±": std}
    pairs_of_runs = list(zip(runs["firth"], runs["gensim"], strict=True))
    return {
        "sides": sides,
        "ratio": statistics.median(b.seconds / a.seconds for a, b in pairs_of_runs),
        "cpu_ratio": statistics.median(b.cpu_seconds / a.cpu_seconds for a, b in pairs_of_runs),
    }


if __name__ == "__main__":
    main()
