"""The check of a corpus: its advice, its page, its terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from firth import api
from firth.cli.main import app
from firth.core.console import program
from firth.core.errors import UserError
from firth.lab.check import (
    CorpusCheck,
    candidate_vocab_sizes,
    check_corpus,
    choose_tokenizer,
    choose_vocab_size,
    compare_with_trained,
    decide_tokenizer,
    largest_fitting_models,
    read_leak_examples,
    row_length_advice,
    suggest_models,
    tokenizer_decision,
)
from firth.lab.check_commands import pretrain_commands
from firth.lab.check_page import make_check_page, save_check_page
from firth.lab.check_text import print_check
from firth.models import ARCHITECTURE_FAMILIES, shaped_model
from firth.recipes import pretraining_recipe, update_recipe
from firth.text import Corpus
from firth.tokens import load_tokenizer, train_tokenizer
from firth.tokens.fertility import TokenizerFit

ParseFn = Callable[[str], tuple[str, dict[str, Any]]]
FIT = TokenizerFit(
    name="byte-bpe 4,096",
    kind="byte-bpe",
    vocab_size=4096,
    given=False,
    words=100,
    tokens=150,
    characters=600,
    bytes=600,
    pieces_per_word=1.4,
    words_split=0.3,
    bytes_per_token=4.0,
    characters_per_token=4.0,
    unknown=0.0,
    unknown_texts=[],
    lost=0.0,
    lost_characters=[],
    exact=1.0,
    unused=0.0,
    times_seen=50.0,
    saved=0.1,
    document_tokens={},
    rows={64: 0.5, 128: 0.95},
    worst=[],
)


def fit(kind: str = "byte-bpe", size: int = 4096, bytes_per_token: float = 4.0, **changes: Any) -> TokenizerFit:
    named = f"{kind} {size:,}"
    return replace(FIT, name=named, kind=kind, vocab_size=size, bytes_per_token=bytes_per_token, **changes)


@pytest.fixture(scope="module")
def check(corpus_file: Path) -> CorpusCheck:
    given = train_tokenizer(["zebras quickly jump over lazy dogs and vex"] * 5, "byte-bpe", 280)
    return check_corpus(Corpus([corpus_file]), given, "other", ["byte-bpe", "wordpiece"], [20, 200, 300, 400])


# Rules


def test_a_larger_vocabulary_must_occur_often_and_save_tokens() -> None:
    small = fit(size=4096)
    assert choose_vocab_size([small, fit(size=8192, bytes_per_token=4.5, times_seen=20)]).vocab_size == 8192
    assert choose_vocab_size([fit(size=8192, bytes_per_token=4.5, times_seen=3), small]) is small
    assert choose_vocab_size([small, fit(size=8192, bytes_per_token=4.01, times_seen=20)]) is small


def test_the_kind_with_the_fewest_tokens_that_loses_nothing() -> None:
    bytes_, pieces = fit("byte-bpe"), fit("wordpiece", bytes_per_token=4.6)
    assert choose_tokenizer([bytes_, pieces]) is pieces
    assert choose_tokenizer([bytes_, replace(pieces, unknown=0.01)]) is bytes_
    assert choose_tokenizer([bytes_, replace(pieces, lost=0.01)]) is bytes_
    assert (
        choose_tokenizer([fit("unigram", bytes_per_token=4.05), bytes_]) is bytes_
    )  # about equal: the one without unknowns
    assert choose_tokenizer([]) is None


def test_a_tokenizer_is_compared_with_one_that_is_no_larger() -> None:
    given = fit(size=5000, bytes_per_token=2.0)
    small, large = fit(size=4096, bytes_per_token=3.0), fit(size=8192, bytes_per_token=4.0)
    assert compare_with_trained(given, [small, large]) == (small, 1.5)
    assert compare_with_trained(replace(given, vocab_size=100), [small, large]) == (small, 1.5)
    assert compare_with_trained(given, []) is None


@pytest.mark.parametrize(
    ("ratio", "unknown", "said"),
    [(1.15, 0.001, "keep"), (1.16, 0, "extend"), (1, 0.002, "extend"), (1.51, 0, "retrain"), (1, 0.011, "retrain")],
)
def test_keep_extend_or_retrain(ratio: float, unknown: float, said: str) -> None:
    assert tokenizer_decision(ratio, unknown) == said


def test_sizes_by_the_amount_of_text() -> None:
    assert candidate_vocab_sizes(10**6) == (2048, 4096, 8192)
    assert candidate_vocab_sizes(10**9) == (16384, 32768, 65536)


def test_the_largest_model_that_need_not_read_too_often() -> None:
    epochs = {"a": 0.1, "b": 3.9, "c": 4.1}
    models = [{"name": name, "architecture": "decoder", "epochs": n} for name, n in epochs.items()]
    assert largest_fitting_models(models) == ["b"]
    assert largest_fitting_models(models[2:]) == ["c"]


def test_model_sizes_count_the_vocabulary() -> None:
    text = {"characters": 4 * 10**8, "duplicate_share": 0.5}
    models = {m["name"]: m for m in suggest_models(text, FIT)}
    tiny = models["decoder-3x128"]
    assert tiny["epochs"] == pytest.approx(20 * tiny["parameters"] / (0.95 * 0.5 * 10**8))
    assert {m["name"] for m in models.values() if m["fits"]} == {
        "encoder-4x256",
        "decoder-4x256",
        "encoder-decoder-4x256",
    }


# The whole


def test_what_is_found(check: CorpusCheck) -> None:
    assert check.text["documents"] == 300
    assert [f.name for f in check.fits] == ["other", "byte-bpe 300", "byte-bpe 400", "wordpiece 200", "wordpiece 276"]
    assert len(check.left_out) == 3
    assert "too small" in check.left_out[0]
    assert check.sample["share"] == 1
    assert check.sample["measured_apart"]
    given, small, large, *_ = check.fits
    assert given.pieces_per_word > small.pieces_per_word > large.pieces_per_word > 1
    assert all(f.lost == 0 for f in (given, small, large))


def test_the_advice_says_why(check: CorpusCheck) -> None:
    advice = {a.about: a for a in check.advice}
    assert advice["other: retrain"].do.startswith("Train a new one")
    assert "Rule: keep up to 1.15" in advice["other: retrain"].why
    chosen = next(f for f in check.fits if f.name == check.chosen)
    assert advice["a new tokenizer"].do == f"`firth tokenizer --kind {chosen.kind} --vocab-size {chosen.vocab_size}`"
    assert advice["row length"].do == "--max-seq-length 128"
    assert "decoder-2x64" in advice["model size"].do


@pytest.fixture
def parse_command(monkeypatch: pytest.MonkeyPatch) -> ParseFn:
    """Parse a printed command as the shell and the command line do; return its name and the arguments of its call."""

    def parse(line: str) -> tuple[str, dict[str, Any]]:
        name, *words = shlex.split(line.removeprefix(shlex.join(program())), comments=True)
        called: list[dict[str, Any]] = []
        monkeypatch.setattr(api, name, lambda **options: called.append(options) or {})
        typer.main.get_command(app).main([name, *words, "--json"], standalone_mode=False)
        return name, called[0]

    return parse


def test_the_commands_can_be_pasted(
    check: CorpusCheck, corpus_file: Path, parse_command: ParseFn, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = [parse_command(line) for line in check.commands]
    chosen = next(f for f in check.fits if f.name == check.chosen)
    assert [name for name, _ in parsed][:3] == ["tokenizer", "prepare", "pretrain"]
    assert parsed[0][1]["kind"] == chosen.kind
    assert parsed[0][1]["texts"] == parsed[1][1]["texts"] == [str(corpus_file)]
    for name, options in parsed[2:]:
        assert name == "pretrain"
        assert options["model"] in ARCHITECTURE_FAMILIES
        assert options["minutes"] == 60
        recipe = update_recipe(pretraining_recipe(shaped_model(options["model"], 2, 64)), {"max_seq_length": 128})
        assert options["max_seq_length"] == 128
        recipe.check()
    capsys.readouterr()
    print_check(check)
    assert check.commands == capsys.readouterr().out.splitlines()[-len(check.commands) :], "lines are not wrapped"


def test_the_command_that_extends_a_tokenizer(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice names the command, and the command that is printed makes the tokenizer that `prepare` then reads."""
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    given = train_tokenizer(texts[:3] * 3, "byte-bpe", 400)
    given.save(tmp_path / "old tok")
    monkeypatch.chdir(tmp_path)
    found = check_corpus(Corpus([corpus_file]), given, "old tok", ["byte-bpe"], [400])
    advice = {a.about: a for a in found.advice}
    assert "`firth tokenizer --extend 'old tok' TEXT... --output-dir tok`" in advice["old tok: extend"].do
    extend, prepare = (shlex.split(line.removeprefix(shlex.join(program()))) for line in found.commands[:2])
    assert prepare[prepare.index("--tokenizer") + 1] == "tok"
    typer.main.get_command(app).main(extend, standalone_mode=False)
    made = load_tokenizer(tmp_path / "tok")
    assert made.vocab.size > given.vocab.size
    assert sum(len(made.encode(t)) for t in texts) < 0.8 * sum(len(given.encode(t)) for t in texts)


def test_a_kind_that_cannot_be_extended_is_retrained() -> None:
    trained = fit(size=4096, bytes_per_token=4.0)
    for kind, decision in {"wordpiece": "extend", "word": "retrain", "char": "retrain"}.items():
        given = fit(kind, size=5000, bytes_per_token=3.2, given=True)
        assert decide_tokenizer(given, [given, trained]) == decision


def test_no_command_that_pretrain_refuses(parse_command: ParseFn) -> None:
    models = suggest_models({"characters": 4 * 10**6, "duplicate_share": 0}, FIT)
    long = replace(FIT, rows={64: 0.1, 2048: 0.5})
    assert row_length_advice(long, models).do == "--max-seq-length 512"
    assert "More than 512 are not advised" in row_length_advice(long, models).why
    texts = ["the cat and the dog"] * 5
    lengths = {}
    for kind, size in {"wordpiece": 60, "byte-bpe": 280, "unigram": 150}.items():
        parsed = [parse_command(c)[1] for c in pretrain_commands(train_tokenizer(texts, kind, size), models, 2048)]
        lengths[kind] = {options["model"]: options["max_seq_length"] for options in parsed}
    assert lengths == {
        "wordpiece": {"encoder": 512},
        "byte-bpe": {"encoder": 512, "decoder": 512},
        "unigram": {"encoder": 512, "decoder": 512, "encoder-decoder": 512},
    }


def test_spellings_that_look_the_same_get_an_option(tmp_path: Path, parse_command: ParseFn) -> None:
    words = "ng'ombe ng\u2019ombe \u00e9t\u00e9 e\u0301te\u0301 h\u043euse in\u00advisible well-known well\u2010known"
    (tmp_path / "a.csv").write_text("body\n" + "".join(f"{words} {i}\n" for i in range(20)), encoding="utf-8")
    found = check_corpus(Corpus([tmp_path], columns={"text": "body"}), kinds=["byte-bpe"], vocab_sizes=[300])
    advice = {a.about: a for a in found.advice}
    forms = "nfc,apostrophes,hyphens,lookalikes,invisible"
    assert advice["spellings"].do.startswith(f"--normalize {forms} joins")
    assert "ng'ombe (20) / ng\u2019ombe (20)" in advice["spellings"].why
    for name, options in map(parse_command, found.commands[:2]):
        assert (options["normalize"], options["columns"]) == (forms, {"text": "body"}), name
    cleaned = check_corpus(Corpus([tmp_path], columns={"text": "body"}, normalize=forms), kinds=[])
    assert not any(a.about == "spellings" for a in cleaned.advice)


def test_dirt_is_named(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"CafÃ© number {i} is open\nAll rights reserved.")
    (tmp_path / "copy.txt").write_text("CafÃ© number 0 is open\nAll rights reserved.")
    advice = {a.about: a for a in check_corpus(Corpus([tmp_path]), kinds=[]).advice}
    assert list(advice) == ["duplicates", "dirt", "repeated lines"]
    assert "mojibake" in advice["dirt"].do
    assert "100.0%" in advice["dirt"].why
    assert "'All rights reserved.' is in 7" in advice["repeated lines"].why


def test_text_alone(tmp_path: Path, corpus_file: Path) -> None:
    only = check_corpus(Corpus([corpus_file]), kinds=[])
    assert (only.fits, only.chosen, only.models) == ([], None, [])
    assert "Tokenizers" not in make_check_page(only).to_html()


def test_a_tokenizer_alone(corpus_file: Path) -> None:
    given = train_tokenizer(["the cat and the dog"] * 5, "byte-bpe", 280)
    only = check_corpus(Corpus([corpus_file]), given, "mine", kinds=[])
    assert only.chosen == "mine"
    assert not any(a.about.startswith(("mine", "a new")) for a in only.advice)
    assert "Words that mine splits worst" in make_check_page(only).to_html()


def test_a_single_short_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("<b>$1 & one</b> word")
    found = check_corpus(Corpus([tmp_path]), None, "", ["byte-bpe"], [270])
    assert not found.sample["measured_apart"]
    page = make_check_page(found).to_html()
    assert "<b>$1" not in page
    assert "&lt;b&gt;$1 &amp; one" in page
    print_check(found)
    assert "<b>$1 & one</b> word" in capsys.readouterr().out


def test_page_and_terminal_say_the_same(check: CorpusCheck, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_check_page(check, tmp_path / "new" / "check.html")
    page = (tmp_path / "new" / "check.html").read_text(encoding="utf-8")
    assert page.count('<svg class="chart') == 5
    assert "http://" not in page.replace("http://www.w3.org", "")
    print_check(check)
    out = capsys.readouterr().out
    for words in ("Check of a corpus", "Zipf", "byte-bpe 400", "--max-seq-length 128"):
        assert words in page
    for words in ("The text", "documents", "300", "byte-bpe", "--max-seq-length 128", "retrain"):
        assert words in out


def test_every_number_is_plain(check: CorpusCheck) -> None:
    plain = json.loads(json.dumps(check.to_dict(), allow_nan=False))
    assert {
        "reading",
        "text",
        "sample",
        "tokenizers",
        "left_out",
        "chosen",
        "models",
        "advice",
        "leaks",
        "commands",
    } == plain.keys()
    assert plain["tokenizers"][0]["given"]


# Labelled examples in the text


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, list[str]]:
    """A text of 40 documents, and labelled texts: 3 verbatim, 2 nearly, 4 of its own, 1 too short."""
    documents = [" ".join(f"w{n}x{i}" for i in range(60)) for n in range(40)]
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    exact = [" ".join(d.split()[5:45]).upper() + "!" for d in documents[:3]]
    near = [d.replace("x50", "other") for d in documents[3:5]]
    others = [" ".join(f"new{n}x{i}" for i in range(30)) for n in range(4)]
    return tmp_path / "text.txt", [*others, *near, *exact, "too short"]


def test_planted_leaks_are_counted_and_shown(
    planted: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, rows = planted
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"id": f"e{i}", "text": row}) + "\n" for i, row in enumerate(rows)))
    check = check_corpus(Corpus([text]), kinds=[], labelled=read_leak_examples(str(file)))
    leaks = check.to_dict()["leaks"]
    assert leaks["task"] == "classify", "inferred from its columns, without labels"
    assert (leaks["examples"], leaks["compared"], leaks["exact"], leaks["near"]) == (10, 9, 3, 2)
    assert [(leak["id"], leak["share"] == 1) for leak in leaks["found"]] == [
        ("e6", True),
        ("e7", True),
        ("e8", True),
        ("e4", False),
        ("e5", False),
    ]
    assert leaks["found"][3]["source"] == f"{text}:7"
    assert check.advice[0].about == "leakage"
    assert "5 examples of" in check.advice[0].do
    print_check(check)
    shown = capsys.readouterr().out
    assert "word for word" in shown
    assert "W0X5 W0X6" in shown
    save_check_page(check, tmp_path / "check.html")
    assert "Labelled examples in the text" in (tmp_path / "check.html").read_text()


def test_a_text_without_leaks_says_so(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    text, rows = planted
    file = tmp_path / "test.csv"
    file.write_text("sentence,label\n" + "".join(f"{row},a\n" for row in rows[:4]))
    labelled = read_leak_examples(str(file), columns={"text": "sentence"})
    check = check_corpus(Corpus([text]), kinds=[], labelled=labelled)
    assert check.leaks is not None
    assert (check.leaks["exact"], check.leaks["near"], check.leaks["found"]) == (0, 0, [])
    assert not any(advice.about == "leakage" for advice in check.advice)


def test_words_with_tags_are_looked_for_as_sentences(planted: tuple[Path, list[str]], tmp_path: Path) -> None:
    text, rows = planted
    file = tmp_path / "test.conll"
    file.write_text("".join(f"{word} O\n" for word in rows[6].rstrip("!").split()) + "\nNew O\nYork O\n")
    check = check_corpus(Corpus([text]), kinds=[], labelled=read_leak_examples(str(file)))
    assert check.leaks is not None
    assert (check.leaks["task"], check.leaks["examples"], check.leaks["exact"]) == ("tag", 2, 1)


@pytest.mark.parametrize(
    ("record", "task"),
    [
        ({"question": "?", "context": "a", "answers": []}, "span-qa"),
        ({"context": "a", "choices": ["b", "c"], "gold": 0}, "choice"),
        ({"context": "a", "answer": "b"}, "cloze"),
        ({"source": "a", "target": "b"}, "text-to-text"),
        ({"messages": [{"role": "user", "content": "a"}]}, "lm"),
        ({"sentence_good": "a", "sentence_bad": "b"}, "minimal-pairs"),
        ({"tokens": ["a"], "tags": ["O"]}, "tag"),
        ({"text_a": "a", "text_b": "b", "label": "c"}, "pair"),
        ({"text_a": "a", "score": 1}, "regress"),
        ({"text": "a", "label": "c"}, "classify"),
    ],
)
def test_the_task_is_inferred_from_the_columns(record: dict[str, Any], task: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(record) + "\n")
    assert read_leak_examples(str(file)).task == task


def test_columns_of_no_task(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "a", "class": "b"}\n')
    with pytest.raises(UserError, match=r"its columns \(body, class\) match no task. Name it with --task"):
        read_leak_examples(str(file))
    assert read_leak_examples(str(file), columns={"text": "body"}).task == "classify"
