"""Runs made sick on purpose and healthy runs, and what the doctor says about them: precision and recall.

    python benchmarks/doctor_runs.py                    # all runs: about an hour on 2 cores
    python benchmarks/doctor_runs.py rate-too-high bert # some of them
    python benchmarks/doctor_runs.py --record           # also write the logs that tests/lab/test_doctor.py reads
    python benchmarks/doctor_runs.py --seed 1           # other texts of the same kind, other weights, other rows
    python benchmarks/doctor_runs.py --text FILE        # the runs of UNSEEN, on a text whose lines are sentences

A sick run names the rules that must speak (`expected`), and consequences that may (`allowed`): a rate that is too high
also leaves the loss above word frequencies. A finding that is neither is a false alarm; so is any finding on a
healthy run. Precision is the share of all findings that are no false alarms, recall the share of the planted illnesses
that are found: consequences do not count for it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from firth.core.console import quiet
from firth.core.files import write_text
from firth.core.serialization import from_dict, to_dict
from firth.lab.doctor import ALL_RULES, Diagnosis, diagnose_run
from firth.models import ModelConfig, get_preset, make_model
from firth.models.presets import bert, deberta_v2, gpt2
from firth.objectives import OBJECTIVES, MLMAndCLM
from firth.recipes import pretraining_recipe
from firth.recipes.pretraining import SHAPE_RECIPES, default_objective, recommend_rate, tokenizer_kind
from firth.tasks import FinetuneRecipe
from firth.tasks.chat import CHAT_TEMPLATE_KEY
from firth.tasks.finetune import finetune
from firth.text import Corpus, is_held_out
from firth.tokens import ShardSet, Tokenizer, open_shards, prepare, train_tokenizer
from firth.train import Diverged, Recipe, load_recipe, pretrain, read_log, save_recipe
from firth.train.log_rules import LogFacts, References

LATIN, CYRILLIC = "bcdfghklmnprstvz aeiou", "бвгджзклмнпрст аеиоу"
RECORDED_LOGS = Path(__file__).parents[1] / "tests" / "lab" / "doctor_logs.json.xz"
LOGGED = ("step", "loss", "learning_rate", "tokens", "targets", "passes", "weight_rms", "skipped")  # recorded fields


# A chat template that forgets the assistant's text, and writes the end token alone.
NO_ANSWERS = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] if m['role'] == 'user' else eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# A chat template whose generation marks enclose every message.
ALL_ANSWERS = "{% for m in messages %}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% endfor %}"


# --- texts ----------------------------------------------------------------------------------------------------------


def make_words(count: int, seed: int, alphabet: str = LATIN) -> list[str]:
    """Return different words of two or three syllables."""
    rng, words = random.Random(seed), dict[str, None]()
    consonants, vowels = alphabet.split()
    while len(words) < count:
        words["".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.choice((2, 3))))] = None
    return list(words)


@dataclass
class Language:
    """Sentences in which each word has a few likely successors, and each document a topic with words of its own."""

    seed: int = 0
    alphabet: str = LATIN
    num_words: int = 240
    num_topics: int = 6

    def __post_init__(self) -> None:
        self.words = make_words(self.num_words, self.seed, self.alphabet)
        rng = random.Random(self.seed)
        self.successors = {word: rng.sample(self.words, 6) for word in self.words}
        self.topics = [rng.sample(self.words, 20) for _ in range(self.num_topics)]

    def sentence(self, rng: random.Random, topic: int) -> str:
        word = rng.choice(self.topics[topic])
        words = [word]
        for _ in range(rng.randint(6, 14)):
            likely = rng.random() < 0.75
            word = (
                rng.choices(self.successors[word], (8, 4, 2, 2, 1, 1))[0] if likely else rng.choice(self.topics[topic])
            )
            words.append(word)
        return " ".join(words).capitalize() + "."

    def document(self, rng: random.Random) -> str:
        topic = rng.randrange(self.num_topics)
        return " ".join(self.sentence(rng, topic) for _ in range(rng.randint(4, 10)))

    def documents(self, count: int, seed: int = 0) -> list[str]:
        rng = random.Random(seed)
        return [self.document(rng) for _ in range(count)]


class Source:
    """The text of the runs that need no other: made up with a seed, or sentences of a file."""

    seed = 0
    sentences: Sequence[str] = ()  # of --text


SENTENCES_PER_DOCUMENT = 8


def plain_text(count: int = 800) -> list[str]:
    if Source.sentences:
        starts = range(0, len(Source.sentences) - SENTENCES_PER_DOCUMENT, SENTENCES_PER_DOCUMENT)
        documents = [" ".join(Source.sentences[i : i + SENTENCES_PER_DOCUMENT]) for i in starts]
        return random.Random(Source.seed).sample(documents, min(count, len(documents)))
    return Language(Source.seed).documents(count, Source.seed)


def random_words(count: int = 800) -> list[str]:
    """Return documents whose words do not depend on each other: a model can learn frequencies alone."""
    rng, words = random.Random(0), make_words(240, 0)
    weights = [1 / (i + 1) for i in range(len(words))]
    return [" ".join(rng.choices(words, weights, k=60)) + "." for _ in range(count)]


def unrelated_sentences(count: int = 800) -> list[str]:
    """Return documents whose sentences come from different topics: the next sentence cannot be told from any other."""
    language, rng = Language(), random.Random(0)
    return [
        " ".join(language.sentence(rng, rng.randrange(language.num_topics)) for _ in range(rng.randint(4, 10)))
        for _ in range(count)
    ]


def topics(count: int = 1500) -> list[str]:
    """Return documents of four languages: sentences of one document clearly belong together."""
    languages = [Language(seed, num_words=40, num_topics=1) for seed in range(4)]
    rng = random.Random(0)
    return [languages[rng.randrange(4)].document(rng) for _ in range(count)]


def one_word(count: int = 600) -> list[str]:
    """Return documents in which nine of ten words are the same: a generator guesses it, and is right."""
    words, rng = make_words(6, 0), random.Random(0)
    return [" ".join(rng.choices(words, (45, 1, 1, 1, 1, 1), k=60)) + "." for _ in range(count)]


def text_with_noise(count: int = 800) -> list[str]:
    """Return plain text with three short documents of rare letters."""
    rng = random.Random(1)
    noise = [" ".join("".join(rng.choices("qxwjyQXWJY", k=3)) for _ in range(20)) for _ in range(3)]
    return plain_text(count) + noise


def repeated_lines(count: int = 200) -> list[str]:
    """Return documents of which every second sentence is one of eight."""
    language, rng = Language(), random.Random(0)
    stock = [language.sentence(rng, 0) for _ in range(8)]
    return [" ".join(rng.choice(stock) if i % 2 else language.sentence(rng, 1) for i in range(8)) for _ in range(count)]


def one_short_line(count: int = 400) -> list[str]:
    """Return documents of one sentence, repeated, that is too short to be a line of its own."""
    return [" ".join(["The cat sat on the mat."] * (5 + i % 40)) for i in range(count)]


def templates(count: int = 400) -> list[str]:
    rng, names = random.Random(0), make_words(200, 5)
    form = "The order of {} was sent to {} on the {} of {} and it is paid by {}."
    return [" ".join(form.format(*rng.choices(names, k=5)) for _ in range(3)) for _ in range(count)]


def with_special_tokens(count: int = 200) -> list[str]:
    return [document.replace(". ", ". [SEP] ", 2) for document in plain_text(count)]


def other_held_out(count: int = 300) -> list[str]:
    """Return documents of one language to train on, and of another one where `prepare` holds them out."""
    train = [d for d in plain_text(count) if not is_held_out(d, 0.1)]
    others = [d for d in Language(seed=9).documents(4 * count) if is_held_out(d, 0.1)]
    return train + others


# --- runs -----------------------------------------------------------------------------------------------------------


class Workshop:
    """Makes run folders below one folder; shards are made once for each text and tokenizer."""

    def __init__(self, folder: Path, speed: float = 1.0, **fields: Any) -> None:
        self.folder, self.speed = folder, speed  # speed: share of the steps that runs take
        self.fields = fields  # of every recipe
        self.shards: dict[Any, ShardSet] = {}

    def make_shards(
        self, text: Callable[[], list[str]], kind: str, vocab_size: int = 500, tokenizer_text: Any = None
    ) -> ShardSet:
        key = (repr(text), kind, vocab_size, repr(tokenizer_text))
        if key not in self.shards:
            folder = self.folder / f"shards-{len(self.shards)}"
            folder.mkdir(parents=True)
            write_text(folder / "text.txt", "\n\n".join(text()))
            corpus = Corpus([folder / "text.txt"], documents="blank-line")
            texts = [d.text for d in corpus] if tokenizer_text is None else tokenizer_text()
            tokenizer: Tokenizer = train_tokenizer(iter(texts), kind, vocab_size)
            prepare(corpus, tokenizer, folder / "shards", held_out_share=0.1)
            self.shards[key] = open_shards(folder / "shards")
        return self.shards[key]

    def recipe(
        self,
        name: str,
        preset: str | ModelConfig = "bert-tiny",
        text: Callable[[], list[str]] = plain_text,
        tokenizer_text: Callable[[], list[str]] | None = None,
        vocab_size: int = 500,
        kind: str = "",
        objective: Any = None,
        **fields: Any,
    ) -> Recipe:
        model = preset if isinstance(preset, ModelConfig) else get_preset(preset)
        objective = objective or OBJECTIVES[default_objective(model)]
        shards = self.make_shards(text, kind or tokenizer_kind(model, objective), vocab_size, tokenizer_text)
        settings: dict[str, Any] = {
            "objective": objective,
            "output_dir": str(self.folder / name),
            "data": str(shards.folder),
            "tokenizer": shards.tokenizer.fingerprint,
            "max_steps": 400,
            "max_seq_length": 32,
            "per_device_train_batch_size": 8,
            "save_steps": 10_000,
            "eval_rows": 48,
            "compile": False,
            "bf16": False,
            "seed": Source.seed,
        }
        settings |= fields | self.fields
        recipe = pretraining_recipe(replace(model, vocab_size=shards.tokenizer.vocab.size), **settings)
        return replace(recipe, max_steps=max(round(recipe.max_steps * self.speed), 1))

    def train(self, name: str, **options: Any) -> Path:
        recipe = self.recipe(name, **options)
        with suppress(Diverged):
            pretrain(recipe)
        return Path(recipe.output_dir)

    def untrained(self, name: str, **options: Any) -> Path:
        """Make the folder of a run that has not made a step: rules on text and batches need no more."""
        recipe = self.recipe(name, **options)
        folder = Path(recipe.output_dir)
        folder.mkdir()
        save_recipe(recipe, folder / "recipe.yaml")
        return folder

    def edited(self, name: str, changes: dict[str, Any], **options: Any) -> Path:
        """Make a run whose recipe was changed after it: its log no longer shows what the recipe promises."""
        folder = self.train(name, **options)
        save_recipe(self.recipe(name, **options | changes), folder / "recipe.yaml")
        return folder

    def finetune(
        self,
        name: str,
        train: Sequence[Mapping[str, Any]],
        task: str,
        is_trained: bool = False,
        chat_template: str = "",
        **fields: Any,
    ) -> Path:
        """Make the folder of a fine-tuning on these examples, of which every fifth is a dev example."""
        folder = self.folder / f"{name}-data"
        folder.mkdir(parents=True)
        parts = {"train": [x for i, x in enumerate(train) if i % 5], "dev": list(train[::5])}
        for part, rows in parts.items():
            write_text(folder / f"{part}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        make, kind = (gpt2, "byte-bpe") if task == "lm" else (bert, "wordpiece")
        tokenizer = train_tokenizer(iter(plain_text(100)), kind, 500)
        if chat_template:
            config = tokenizer.config | {CHAT_TEMPLATE_KEY: chat_template}
            tokenizer = Tokenizer(tokenizer.backend, tokenizer.special_tokens, config)
        model = make_model(make(1, 32, 2, tokenizer.vocab.size))
        model.tokenizer = tokenizer
        model.save(folder / "checkpoint")
        settings: dict[str, Any] = {
            "output_dir": str(self.folder / name),
            "checkpoint": str(folder / "checkpoint"),
            "task": task,
            "train": str(folder / "train.jsonl"),
            "dev": str(folder / "dev.jsonl"),
            "max_seq_length": 64,
            "max_steps": 200,
            "seeds": 1,
            "compile": False,
        }
        recipe = FinetuneRecipe(**settings | fields)
        if is_trained:
            finetune(recipe)
        else:
            (self.folder / name).mkdir()
            save_recipe(recipe, self.folder / name / "recipe.yaml")
        return self.folder / name


@dataclass(frozen=True)
class Case:
    """A run, the rules that must speak, and those that may."""

    make: Callable[[Workshop, str], Path]
    expected: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()
    needs_training: bool = True


def trained(expected: str = "", allowed: str = "", **options: Any) -> Case:
    return Case(lambda shop, name: shop.train(name, **options), frozenset(expected.split()), frozenset(allowed.split()))


def untrained(expected: str, allowed: str = "", **options: Any) -> Case:
    return Case(
        lambda shop, name: shop.untrained(name, **options),
        frozenset(expected.split()),
        frozenset(allowed.split()),
        needs_training=False,
    )


def finetuned(
    expected: str, rows: Callable[[], list[dict[str, Any]]], task: str, is_trained: bool = False, **fields: Any
) -> Case:
    return Case(
        lambda shop, name: shop.finetune(name, rows(), task, is_trained, **fields),
        frozenset(expected.split()),
        needs_training=is_trained,
    )


def mlm_and_clm(rate: float, rate_end: float) -> MLMAndCLM:
    return MLMAndCLM(mlm=replace(MLM, rate=rate, rate_end=rate_end))


def topic_labels(count: int = 400, noise: bool = False) -> list[dict[str, Any]]:
    """Return sentences with their topic as the label, or with a random one."""
    language, rng = Language(num_topics=2), random.Random(0)
    rows = []
    for i in range(count):
        topic = i % 2
        label = rng.randrange(2) if noise else topic
        rows.append({"text": language.sentence(rng, topic), "label": f"topic {label}"})
    return rows


def one_label(count: int = 400) -> list[dict[str, Any]]:
    return [row | {"label": "rare" if i % 100 < 2 else "usual"} for i, row in enumerate(topic_labels(count))]


def dialogues(count: int = 200) -> list[dict[str, Any]]:
    """Return dialogues of two messages."""
    language, rng = Language(), random.Random(0)
    found = []
    for _ in range(count):
        found.append({"messages": [{"role": r, "content": language.sentence(rng, 0)} for r in ("user", "assistant")]})
    return found


MLM, NSP = OBJECTIVES["mlm"], OBJECTIVES["nsp"]
# What `firth pretrain encoder` and `firth pretrain decoder` train, in small.
ENCODER: dict[str, Any] = {"preset": "encoder-2x64", **SHAPE_RECIPES["encoder"]}
DECODER: dict[str, Any] = {"preset": "decoder-2x64", **SHAPE_RECIPES["decoder"]}
PAIR_ROWS = {"max_seq_length": 48, "per_device_train_batch_size": 16, "max_steps": 2000}
STUCK = "plateau above-unigrams"
cyrillic = partial(Language(alphabet=CYRILLIC).documents, 200)
tiny_text, small_text, some_text = (partial(plain_text, count) for count in (20, 40, 200))

SICK: dict[str, Case] = {
    "plateau": trained("plateau", preset="gpt2-tiny", text=random_words, kind="word"),
    "above-unigrams": trained(
        "above-unigrams", "rate-too-low plateau", preset="gpt2-tiny", max_steps=3, warm_start="none"
    ),
    "rate-too-high": trained(
        "rate-too-high", f"{STUCK} loss-spikes growing-weights", preset="gpt2-tiny", optim="adamw", learning_rate=0.5
    ),
    "rate-too-low": trained("rate-too-low", STUCK, preset="gpt2-tiny", optim="adamw", learning_rate=1e-6),
    "warmup-too-short": trained(
        "warmup-too-short",
        f"{STUCK} loss-spikes growing-weights",
        preset="gpt2-tiny",
        optim="adamw",
        learning_rate=2e-2,
        warmup_steps=0,
    ),
    "divergence": trained(
        "divergence", f"{STUCK} rate-too-high", preset="gpt2-tiny", optim="adamw", learning_rate=1e18
    ),
    "loss-spikes": trained(
        "loss-spikes", preset="gpt2-tiny", text=text_with_noise, max_steps=400, per_device_train_batch_size=4
    ),
    "overfitting": trained("overfitting", "repeated-data", preset="gpt2-tiny", text=small_text, max_steps=400),
    "repeated-data": trained("repeated-data", preset="gpt2-tiny", text=small_text, learning_rate=1e-3, max_steps=350),
    "dead-pair-head": trained(
        "dead-pair-head", preset="bert-tiny", objective=NSP, text=unrelated_sentences, **PAIR_ROWS
    ),
    "dead-detection-head": trained(
        "dead-detection-head", f"{STUCK} rate-too-low", preset="electra-tiny", learning_rate=1e-6, max_steps=450
    ),
    "strong-generator": trained(
        "strong-generator", f"{STUCK} dead-detection-head", preset="electra-tiny", text=one_word, max_steps=200
    ),
    "growing-weights": trained(
        "growing-weights",
        f"{STUCK} rate-too-high",
        preset="gpt2-tiny",
        weight_decay=0.0,
        learning_rate=5e-2,
        max_steps=400,
    ),
    "mask-rate": Case(
        lambda shop, name: shop.edited(name, {"objective": replace(MLM, rate=0.4)}, preset="bert-tiny", objective=MLM),
        frozenset({"mask-rate"}),
    ),
    "encoder-rate-too-high": trained(
        "rate-too-high", f"{STUCK} loss-spikes growing-weights", **ENCODER, optim="adamw", learning_rate=0.5
    ),
    "encoder-overfitting": trained("overfitting", "repeated-data", **ENCODER, text=tiny_text, max_steps=400),
    "encoder-mask-rate": Case(
        lambda shop, name: shop.edited(name, {"objective": mlm_and_clm(0.5, 0.25)}, **ENCODER, max_steps=100),
        frozenset({"mask-rate"}),
    ),
    "encoder-all-labels": untrained("all-labels", **ENCODER | {"objective": mlm_and_clm(0.9, 0.8)}, text=some_text),
    "decoder-rate-too-high": trained(
        "rate-too-high", f"{STUCK} loss-spikes growing-weights", **DECODER, optim="adamw", learning_rate=0.5
    ),
    "decoder-overfitting": trained("overfitting", "repeated-data", **DECODER, text=tiny_text, max_steps=200),
    "domain-shift": untrained("domain-shift", text=other_held_out),
    "duplicated-lines": untrained("duplicated-lines", text=repeated_lines),
    "one-short-line": untrained("duplicated-lines", text=one_short_line, vocab_size=100),
    "templated-lines": untrained("templated-lines", text=templates),
    "unknown-tokens": untrained("unknown-tokens", "untrained-embeddings", text=cyrillic, tokenizer_text=some_text),
    "short-pieces": untrained(
        "short-pieces", "untrained-embeddings", preset="gpt2-tiny", text=cyrillic, tokenizer_text=some_text
    ),
    "special-in-text": untrained("special-in-text", text=with_special_tokens),
    "untrained-embeddings": untrained(
        "untrained-embeddings",
        preset="gpt2-tiny",
        text=some_text,
        tokenizer_text=lambda: some_text() + Language(seed=7, num_words=600).documents(400),
        vocab_size=1500,
    ),
    "few-labels": untrained(
        "few-labels", "mask-rate", text=some_text, objective=replace(MLM, rate=0.01), max_seq_length=128
    ),
    "all-labels": untrained("all-labels", text=some_text, objective=replace(MLM, rate=0.9)),
    "empty-assistant-mask": finetuned("empty-assistant-mask", dialogues, "lm", chat_template=NO_ANSWERS),
    "full-assistant-mask": finetuned("full-assistant-mask", dialogues, "lm", chat_template=ALL_ANSWERS),
    "one-label": finetuned("one-label", one_label, "classify"),
    "failed-seeds": finetuned("failed-seeds", partial(topic_labels, noise=True), "classify", is_trained=True),
}

HEALTHY: dict[str, Case] = {
    "encoder": trained(**ENCODER),
    "encoder-long": trained(**ENCODER, max_steps=1200, text=partial(plain_text, 2000)),
    "decoder": trained(**DECODER),
    "bert": trained(preset="bert-tiny", objective=MLM),
    "bert-adamw": trained(preset="bert-tiny", objective=MLM, optim="adamw"),
    "bert-nsp": trained(preset="bert-tiny", objective=NSP, text=topics, **PAIR_ROWS),
    "bert-nsp-short": trained(preset="bert-tiny", objective=NSP),
    "bert-whole-word": trained(preset="bert-tiny", objective=OBJECTIVES["whole-word"]),
    "bert-static": trained(preset="bert-tiny", objective=OBJECTIVES["static"]),
    "bert-mask-40": trained(preset="bert-tiny", objective=replace(MLM, rate=0.4)),
    "bert-falling-rate": trained(preset="bert-tiny", objective=replace(MLM, rate=0.3, rate_end=0.15)),
    "roberta": trained(preset="roberta-tiny"),
    "spanbert": trained(preset="spanbert-tiny"),
    "albert": trained(preset="albert-tiny", max_steps=400),
    "distilbert": trained(preset="distilbert-tiny"),
    "electra": trained(preset="electra-tiny", max_steps=400),
    "deberta": trained(preset="deberta-tiny"),
    "deberta-v3": trained(preset="deberta-v3-tiny"),
    "modernbert": trained(preset="modernbert-tiny"),
    "unilm": trained(preset="unilm-tiny", max_steps=400),
    "xlnet": trained(preset="xlnet-tiny", max_steps=400),
    "masked-next-token": trained(preset="llama-tiny", objective=OBJECTIVES["masked-next-token"], max_steps=400),
    "clm-then-mlm": trained(preset="bert-tiny", objective=OBJECTIVES["clm-then-mlm"], max_steps=400),
    "gpt": trained(preset="gpt-tiny"),
    "gpt2": trained(preset="gpt2-tiny"),
    "gpt2-adamw": trained(preset="gpt2-tiny", optim="adamw"),
    "gpt2-long": trained(preset="gpt2-tiny", max_steps=1200, text=partial(plain_text, 2000)),
    "gpt2-ramp": trained(preset="gpt2-tiny", batch_ramp=0.3, length_ramp=0.2),
    "gpt2-short": trained(preset="gpt2-tiny", max_steps=150),
    "llama": trained(preset="llama-tiny"),
    "ulmfit": trained(preset="ulmfit-tiny", max_steps=400),
    "elmo": trained(preset="elmo-tiny", max_steps=400),
    "t5": trained(preset="t5-tiny", max_steps=400),
    "t5gemma": trained(preset="t5gemma-tiny", max_steps=400),
    "bart": trained(preset="bart-tiny", max_steps=400),
    "classify": finetuned("", topic_labels, "classify", is_trained=True),
    "chat": finetuned("", dialogues, "lm", is_trained=True),
    "bert-long": trained(preset="bert-tiny", objective=MLM, max_steps=1200, text=partial(plain_text, 2000)),
    "xlm": trained(preset="xlm-tiny", max_steps=300),
    "xlm-roberta": trained(preset="xlm-roberta-tiny", max_steps=300),
    "afriberta": trained(preset="afriberta-tiny", max_steps=300),
    "rembert": trained(preset="rembert-tiny", max_steps=300),
    "deberta-v2": trained(preset=deberta_v2(2, 128, 2), max_steps=300),
    "mobilebert": trained(preset="mobilebert-tiny", max_steps=300),
    "ib-bert": trained(preset="ib-bert-tiny", max_steps=300),
    "labse": trained(preset="labse-tiny", max_steps=300),
    "bilstm": trained(preset="bilstm-tiny", max_steps=300),
    "gpt3": trained(preset="gpt3-tiny", max_steps=300),
    "firth-t5": trained(preset="firth-t5-tiny", max_steps=400),
    "rnn": trained(preset="rnn-tiny", max_steps=400),
    "rnn-attention": trained(preset="rnn-attention-tiny", max_steps=400),
}
# Runs on a text on which no threshold was set (--text): some healthy, and the illnesses that are not in the text.
REAL_TEXT: dict[str, Any] = {"max_seq_length": 64}
GPT2: dict[str, Any] = {"preset": "gpt2-tiny", "optim": "adamw"}
LONG: dict[str, Any] = {"vocab_size": 1000, "text": partial(plain_text, 1500), "max_steps": 400}
FEW: dict[str, Any] = {"vocab_size": 1000, "text": partial(plain_text, 60)}  # fewer may leave no held-out document
UNSEEN: dict[str, Case] = {
    "sick-encoder-rate": trained(
        "rate-too-high", f"{STUCK} growing-weights", **ENCODER, **LONG, optim="adamw", learning_rate=0.5
    ),
    "sick-decoder-rate": trained(
        "rate-too-high", f"{STUCK} growing-weights", **DECODER, **LONG, optim="adamw", learning_rate=0.5
    ),
    "sick-gpt2-low-rate": trained("rate-too-low", STUCK, **GPT2, **LONG, learning_rate=1e-6),
    "sick-gpt2-warmup": trained(
        "warmup-too-short", f"{STUCK} rate-too-high", **GPT2, **LONG, learning_rate=2e-2, warmup_steps=0
    ),
    "sick-gpt2-divergence": trained("divergence", f"{STUCK} rate-too-high", **GPT2, **LONG, learning_rate=1e18),
    "sick-encoder-overfitting": trained("overfitting", "repeated-data", **ENCODER, **FEW, max_steps=1500),
    "sick-decoder-overfitting": trained("overfitting", "repeated-data", **DECODER, **FEW, max_steps=1000),
    "sick-encoder-labels": untrained("all-labels", **ENCODER | {"objective": mlm_and_clm(0.9, 0.8)}, **FEW),
    "healthy-encoder": trained(**ENCODER, **LONG),
    "healthy-decoder": trained(**DECODER, **LONG),
    "healthy-bert": trained(preset="bert-tiny", objective=MLM, **LONG),
    "healthy-electra": trained(preset="electra-tiny", **LONG),
    "healthy-gpt2": trained(**GPT2, **LONG),
    "healthy-t5": trained(preset="t5-tiny", **LONG),
}


# --- recorded logs --------------------------------------------------------------------------------------------------


def record_log(name: str, folder: Path, diagnosis: Diagnosis) -> None:
    """Add what the rules read of a run to the file of the tests: recipe, references and log, with four digits."""
    recipe = replace(load_recipe(folder / "recipe.yaml", Recipe), output_dir="run", data="shards")
    lines = [{k: round_number(v) for k, v in x.items() if is_recorded(k)} for x in read_log(folder / "log.jsonl")]
    known = read_recorded() if RECORDED_LOGS.is_file() else {}
    is_finished = (folder / "results.json").is_file()
    facts = {"recipe": to_dict(recipe), "references": diagnosis.references.to_dict(), "is_finished": is_finished}
    known[name] = {**facts, "lines": lines}
    RECORDED_LOGS.write_bytes(lzma.compress(json.dumps(known, sort_keys=True).encode(), preset=9))


def read_recorded() -> dict[str, Any]:
    return dict(json.loads(lzma.decompress(RECORDED_LOGS.read_bytes())))


def is_recorded(name: str) -> bool:
    return name in LOGGED or "loss" in name or "accuracy" in name or name == "rtd_replaced"


def round_number(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def recorded_facts(record: Mapping[str, Any]) -> LogFacts:
    """Return the facts of a recorded log, as `firth doctor` has them."""
    recipe = from_dict(record["recipe"], Recipe, "recipe")
    references = References(**record["references"])
    return LogFacts(recipe, record["lines"], references, record["is_finished"], recommend_rate(recipe))


# --- results --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Findings, false alarms, planted illnesses and those that were found."""

    findings: int = 0
    wrong: int = 0
    planted: int = 0
    found: int = 0

    def add(self, case: Case, diagnosis: Diagnosis) -> tuple[set[str], set[str]]:
        """Count the findings of a run; return the missing and the wrong ones."""
        found = {finding.rule for finding in diagnosis.findings}
        missing, wrong = set(case.expected - found), set(found - case.expected - case.allowed)
        self.findings += len(found)
        self.wrong += len(wrong)
        self.planted += len(case.expected)
        self.found += len(case.expected & found)
        return missing, wrong

    @property
    def precision(self) -> float:
        return 1 - self.wrong / max(self.findings, 1)

    @property
    def recall(self) -> float:
        return self.found / max(self.planted, 1)


def main(arguments: list[str] | None = None) -> Tally:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; default: all")
    parser.add_argument("--record", action="store_true", help="write the logs that the tests read")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of made-up texts, weights and rows")
    parser.add_argument("--text", type=Path, help="train the runs of UNSEEN on this text")
    options = parser.parse_args(arguments)
    cases = {**SICK, **{f"healthy-{name}": case for name, case in HEALTHY.items()}}
    Source.seed, fields = options.seed, dict[str, Any]()
    if options.text is not None:
        lines = options.text.read_text("utf-8").splitlines()
        Source.sentences, fields, cases = [line for line in lines if line.strip()], REAL_TEXT, UNSEEN
    if options.record and (options.seed or options.text):
        parser.error("--record is for the texts of seed 0")
    chosen, tally = options.cases or list(cases), Tally()
    with tempfile.TemporaryDirectory() as temporary:
        shop = Workshop(options.folder or Path(temporary), **fields)
        for name in chosen:
            start = time.monotonic()
            with quiet():
                folder = cases[name].make(shop, name)
            diagnosis = diagnose_run(folder)
            missing, wrong = tally.add(cases[name], diagnosis)
            if options.record and cases[name].needs_training and diagnosis.kind == "pretraining":
                record_log(name, folder, diagnosis)
            found = [f"{f.rule} ({f.numbers})" for f in diagnosis.findings]
            verdict = "".join(
                [f"  MISSING {sorted(missing)}" * bool(missing), f"  WRONG {sorted(wrong)}" * bool(wrong)]
            )
            loss = "" if diagnosis.loss is None else f"loss {diagnosis.loss:.2f}"
            print(
                f"{name} {time.monotonic() - start:.0f}s {loss} {diagnosis.references.to_dict()}{verdict}", flush=True
            )
            for line in found:
                print(f"    {line}", flush=True)
    print(
        json.dumps(
            {
                "runs": len(chosen),
                "rules": len(ALL_RULES),
                **vars(tally),
                "precision": tally.precision,
                "recall": tally.recall,
            }
        )
    )
    return tally


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
