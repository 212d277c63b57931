"""How fast Firth learns word vectors beside gensim, and how good they are: the same words, settings and machine.

    python benchmarks/vectors_speed.py TEXT... [--megabytes N] [--turns N] [--workers N] [--pairs FILE ...] \\
        [--analogies FILE] [--json]

Skip-gram with 5 noise words, 100 numbers, window 5, 5 epochs. gensim reads a file with its fast path (`corpus_file`),
Firth its shards; reading the text and counting its words is left out on both sides. They take turns, so that whatever
else the machine does slows both; the ratio is the median over the turns. Words per second are counted before frequent
ones are left out, and per second of processor time too, which a busy machine does not change. `--pairs` are files of
word pairs with people's scores (word1, word2, score): the mean Spearman correlation over the turns, a seed each.
`--analogies` is a file of questions (a, b, c, d): the mean accuracy, and with either its deviation.

With W workers gensim's fast path gives other (on small text better) vectors at the same settings, because its rate does
not fall as far: each worker counts the sentences of its own part of the file against those of all of it (see
`get_next_alpha` in its word2vec_corpusfile.pyx), so that in every epoch the rate falls by 1/W of what it should, and
the last epoch ends at alpha (1 - 1/W) / epochs. `--min-alpha` sets where ours ends (2 workers, 5 epochs: 0.0025), and
`--epochs` how often both read the text.
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
from gensim.models import Word2Vec as Theirs

from firth.core.console import format_count, progress, show_table
from firth.evaluate import WordVectors, evaluate_word_similarity
from firth.evaluate.vectors import evaluate_analogies
from firth.metrics import mean_and_std
from firth.static.learners import Word2VecTrainer
from firth.static.recipe import Word2VecRecipe
from firth.static.vocabulary import WordVocabulary, build_word_vocabulary
from firth.text import Corpus, read_labelled
from firth.tokens import Shards, Tokenizer, open_shards, prepare, train_tokenizer

WANTED = 1.2
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


class Turn(NamedTuple):
    """What one run took, and its vectors."""

    seconds: float
    processor: float
    vectors: WordVectors


def main() -> None:
    args = arguments()
    SETTINGS["epochs"] = args.epochs
    with tempfile.TemporaryDirectory(prefix="firth-vectors-") as folder:
        shards, tokenizer = read(args.texts, int(args.megabytes * 1e6), Path(folder))
        lexicon = build_word_vocabulary(shards, tokenizer, SETTINGS["min_count"])
        file = Path(folder) / "words.txt"
        write_lines(shards, lexicon, file)
        words = int(lexicon.counts.sum()) * SETTINGS["epochs"]
        turns: dict[str, list[Turn]] = {"firth": [], "gensim": []}
        ours(shards, lexicon, args.workers, 0, args.min_alpha, epochs=0)  # compiles
        with progress("taking turns", "turns", args.turns) as shown:
            for seed in range(1, args.turns + 1):
                turns["firth"].append(ours(shards, lexicon, args.workers, seed, args.min_alpha))
                turns["gensim"].append(theirs(file, lexicon, args.workers, seed))
                shown.advance()
    result = summary(turns, words, args.pairs, args.analogies)
    result |= {"words": words, "vocabulary": int((lexicon.counts > 0).sum()), "workers": args.workers}
    if args.json:
        print(json.dumps(result))
        return
    rows = [[name, *(f"{value:,.4g}" for value in side.values())] for name, side in result["sides"].items()]
    show_table(
        f"Skip-gram, {words:,} words, {format_count(args.workers, 'worker')}", ["", *result["sides"]["firth"]], rows
    )
    print(f"ratio {result['ratio']:.2f}, by processor time {result['processor_ratio']:.2f} (wanted: {WANTED})")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="files or folders of text")
    parser.add_argument("--megabytes", type=float, default=12.0, help="how much of the text is read")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--min-alpha", type=float, default=0.0001)
    parser.add_argument("--pairs", nargs="*", default=[], help="files of word pairs with scores")
    parser.add_argument("--analogies", default="", help="file of questions: a is to b as c is to d")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def read(texts: Sequence[str], size: int, folder: Path) -> tuple[Shards, Tokenizer]:
    """The first part of the text, in small letters, as shards of whole words."""
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


def write_lines(shards: Shards, lexicon: WordVocabulary, file: Path) -> None:
    """The same words for gensim: a document on each line."""
    with open(file, "w", encoding="utf-8") as out:
        for begin, end in zip(shards.offsets[:-1], shards.offsets[1:], strict=True):
            words = lexicon.word_ids[shards.tokens[begin:end]]
            out.write(" ".join(map(str, words[words >= 0].tolist())) + "\n")


def ours(shards: Shards, lexicon: WordVocabulary, workers: int, seed: int, min_alpha: float, **changes: Any) -> Turn:
    settings = SETTINGS | {"workers": workers, "seed": seed, "min_alpha": min_alpha} | changes
    learner = Word2VecTrainer(shards, lexicon, Word2VecRecipe(**settings | {"epochs": max(settings["epochs"], 1)}))
    began, used = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(workers) as pool:
        for number in range(learner.num_steps if settings["epochs"] else 1):
            learner.step(number, pool)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    return Turn(seconds, processor, named(range(len(lexicon.counts)), learner.inputs_ND, lexicon))


def theirs(file: Path, lexicon: WordVocabulary, workers: int, seed: int) -> Turn:
    model = Theirs(**SETTINGS, workers=workers, seed=seed)
    model.build_vocab(corpus_file=str(file))
    began, used = time.perf_counter(), time.process_time()
    total = {"total_words": model.corpus_total_words, "total_examples": model.corpus_count}
    model.train(corpus_file=str(file), epochs=SETTINGS["epochs"], **total)
    seconds, processor = time.perf_counter() - began, time.process_time() - used
    ids = map(int, model.wv.index_to_key)
    return Turn(seconds, processor, named(list(ids), model.wv.vectors, lexicon))


def named(ids: Sequence[int], vectors_ND: np.ndarray, lexicon: WordVocabulary) -> WordVectors:
    """Vectors under their words; gensim has read the ids."""
    return WordVectors([str(lexicon.tokenizer.backend.id_to_token(i)) for i in ids], vectors_ND)


def summary(turns: dict[str, list[Turn]], words: int, pairs: Sequence[str], analogies: str) -> dict[str, Any]:
    sides: dict[str, dict[str, float]] = {}
    tests = [(file, "word-similarity", evaluate_word_similarity, "spearman") for file in pairs]
    tests += [(analogies, "analogy", evaluate_analogies, "accuracy")] if analogies else []
    for name, some in turns.items():
        sides[name] = {
            "words/s": statistics.median(words / turn.seconds for turn in some),
            "words/processor second": statistics.median(words / turn.processor for turn in some),
        }
        for file, task, test, metric in tests:
            examples, short = read_labelled(file, task, None, "dev"), Path(file).name.split(".")[0]
            mean, deviation = mean_and_std([test(turn.vectors, examples).metrics[metric] for turn in some])
            sides[name] |= {short: mean, f"{short} ±": deviation}
    both = list(zip(turns["firth"], turns["gensim"], strict=True))
    return {
        "sides": sides,
        "ratio": statistics.median(b.seconds / a.seconds for a, b in both),
        "processor_ratio": statistics.median(b.processor / a.processor for a, b in both),
    }


if __name__ == "__main__":
    main()
