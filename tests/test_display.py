"""What the API returns shows itself: as HTML in a notebook, in a few lines at a prompt."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import firth
from firth.commands.results import FinetuneResult, PretrainResult, Vectors
from firth.core.errors import UserError
from firth.core.files import replace_nonfinite
from firth.core.html import HtmlPage
from firth.core.notebook import Result, add_bars, add_heat_table, to_notebook_html

TINY = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64, "model.num_heads": 2}
SIZES: dict[str, Any] = {"max_steps": 3, "max_seq_length": 32, "per_device_train_batch_size": 4, "logging_steps": 1}
VOID = {"br", "meta", "img", "hr", "path", "rect", "use"}


class TagChecker(HTMLParser):
    """Every tag that is opened is closed; nothing is a script or a request."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name.startswith("on") or name in ("src", "srcset") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


def shown_text(value: Any) -> str:
    """The text that a notebook shows of an object, after checking its HTML."""
    html = value._repr_html_()
    assert len(html) < 100_000
    assert not re.search(r"url\((?!#)", html), "no request"
    checker = TagChecker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return " ".join(" ".join(checker.texts).split())


@pytest.fixture(scope="module")
def home(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    firth.tokenizer([corpus_file], folder / "tok", "wordpiece", 300)
    firth.prepare([corpus_file], folder / "tok", folder / "shards")
    return folder


@pytest.fixture(scope="module")
def run(home: Path) -> PretrainResult:
    return firth.pretrain("bert-tiny", home / "shards", home / "run", overrides=TINY, **SIZES)


@pytest.fixture(scope="module")
def tuned(home: Path, run: PretrainResult) -> FinetuneResult:
    (home / "train.csv").write_text("text,label\n" + "the <b>cat</b> slept,animal\nthe river is quiet,place\n" * 4)
    file, options = home / "train.csv", {"max_steps": 2, "max_seq_length": 16, "learning_rate": 1e-3}
    start = home / "run" / "final"
    return firth.finetune(start, "classify", file, file, home / "tuned", seeds=2, against="scratch", **options)


def test_a_run_shows_its_loss(run: PretrainResult) -> None:
    text = shown_text(run)
    assert "word frequencies" in text
    assert "held out" in text, "the legend of the curve"
    assert f"{run['parameters']:,}" in text
    assert [line["step"] for line in run.log if "loss" in line] == [1, 2, 3]
    assert "currentColor" in run._repr_html_(), "the colour of the notebook's text"
    lines = repr(run).splitlines()
    assert lines[0] == "Pretraining"
    assert any(re.fullmatch(r"  steps +3", line) for line in lines)
    gone = PretrainResult(run | {"output_dir": "gone"})
    assert gone.log == []
    assert "<svg" not in gone._repr_html_()
    assert f"{run['parameters']:,}" in shown_text(gone)


def test_a_result_is_still_the_dictionary_of_the_command(run: PretrainResult) -> None:
    assert isinstance(run, dict)
    assert run == dict(run)
    assert json.loads(json.dumps(replace_nonfinite(run)))["steps"] == 3
    assert firth.models() == list(firth.models())
    assert "bert-tiny" in shown_text(firth.models())


def test_a_fine_tuning_shows_scores_and_deviations(tuned: FinetuneResult) -> None:
    text = shown_text(tuned)
    assert re.search(r"finetuned: accuracy [\d.]+% ± [\d.]+%; scratch: accuracy [\d.]+% ± [\d.]+%, over 2 seeds", text)
    assert "guessing: 50.0" in text
    alone = FinetuneResult({name: value for name, value in tuned.items() if name != "against"})
    assert "seed 1" in shown_text(alone)


def test_predictions_and_scores(home: Path, tuned: FinetuneResult) -> None:
    model = home / "tuned" / "finetuned" / "final"
    found = firth.predict(model, ["the <i>fox</i> slept", "a bridge"])
    assert "the <i>fox</i> slept" in shown_text(found), "escaped, and shown as it is"
    assert "<i>fox" not in found._repr_html_()
    assert isinstance(found, list)
    one = firth.predict(model, "the fox")
    assert shown_text(one).count("%") == 2, "a bar for each class"
    assert repr(one).startswith("{'label': ")
    scores = firth.evaluate(model, data=home / "train.csv", output_dir=home / "scores")
    assert re.search(r"accuracy [\d.]+%", shown_text(scores))
    assert "8 examples" in shown_text(scores)


def test_attention_of_a_checkpoint_is_computed_on_the_gpu(
    home: Path, run: PretrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr("firth.commands.generate.move_for_generation", lambda model: moved.append(model) or model)
    folder = home / "run" / "final"
    assert repr(firth.attention(folder, "the cat")) == repr(firth.attention(firth.load(folder), "the cat"))
    assert len(moved) == 1, "a loaded model stays where it is"


def test_a_model_its_tokenizer_and_its_attention(home: Path, run: PretrainResult) -> None:
    model = firth.load(home / "run" / "final")
    assert all(name in shown_text(model) for name in ("bert", f"{model.num_parameters:,}", "MLM", "wordpiece"))
    tokenizer = firth.load_tokenizer(home / "tok")
    assert repr(tokenizer).startswith("Tokenizer(wordpiece, 276 tokens")
    assert "[MASK]" in shown_text(tokenizer)
    tokens = tokenizer.tokenize("the <b> cat")
    assert tokens.ids == tokenizer.encode("the <b> cat")
    assert "".join(token.text for token in tokens.shown_tokens()) == "the <b> cat"
    assert "tokens per word" in shown_text(tokens)
    seen = firth.attention(model, "the cat slept")
    assert seen.weights["encoder"].shape == (1, 2, len(seen.tokens), len(seen.tokens))
    assert "mask full" in shown_text(seen)
    head = seen.head(0, 1)
    np.testing.assert_allclose(head.weights.sum(1), 1, atol=1e-5)
    out = model(
        input_ids=torch.tensor([[tokenizer.vocab.cls, *tokens.ids, tokenizer.vocab.sep]]), output_attentions=True
    )
    again = firth.attention(model, "the <b> cat").head(0, 1)
    np.testing.assert_allclose(again.weights, out.attentions[0][0, 1].detach().numpy(), atol=1e-5)
    assert "[CLS]" in shown_text(head)
    with pytest.raises(UserError, match=r"There is no layer 1, head 0: the encoder has layers 0 to 0, heads 0 to 1"):
        seen.head(1, 0)
    with pytest.raises(UserError, match=r"no cross attention: there is"):
        seen.head(0, 0, "cross")


def test_blanks_vectors_and_comparisons(home: Path, run: PretrainResult) -> None:
    model = firth.load(home / "run" / "final")
    blanks = firth.fill(model, "the ___ slept")
    assert "the ___ slept" in shown_text(blanks)
    assert blanks[0].guesses[0].text in shown_text(blanks)
    vectors = firth.embed(model, ["the <b>cat</b>", "a dog"])
    assert "Cosine of each two texts" in shown_text(vectors)
    assert "<b>cat" not in vectors._repr_html_()
    for plain in (vectors @ vectors.T, vectors * 2, np.concatenate([vectors, vectors])):
        assert not isinstance(plain, Vectors) or plain._repr_html_() is None
    assert vectors[0]._repr_html_() is None, "a notebook shows a single vector as an array"
    assert torch.from_numpy(vectors).shape == (2, 32)
    compared = firth.compare("cat", ["the cat slept", "a cat saw the cat"], model)
    assert "Any two words of these texts" in shown_text(compared)


def test_what_a_model_will_see_and_what_is_wrong(home: Path, run: PretrainResult) -> None:
    shown = firth.show("bert-tiny", home / "shards", rows=1, output_dir=home, overrides=TINY, **SIZES)
    assert all(word in shown_text(shown) for word in ("[MASK]", "Expected and measured rates", "masked"))
    diagnosis = firth.doctor(home / "run")
    assert all(finding["title"] in shown_text(diagnosis) for finding in diagnosis["findings"])
    assert "unigram" in shown_text(diagnosis)


def test_a_check_and_a_dry_run(home: Path, corpus_file: Path) -> None:
    checked = firth.check(corpus_file, kinds=["byte-bpe"], vocab_sizes=[300], output_dir=home)
    assert "byte-bpe 300" in shown_text(checked)
    assert all(advice["do"] in shown_text(checked) for advice in checked["advice"] if "  " not in advice["do"])
    sizes = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
    dry = firth.pretrain("bert-tiny", home / "shards", home / "none", overrides=sizes, dry_run=True, **SIZES)
    assert "rows per step" in shown_text(dry)


def test_texts_are_escaped_everywhere() -> None:
    bad = "<script>alert(1)</script>\x1b[2J\udce9"
    page = HtmlPage(bad)
    add_bars(page, [(bad, 0.5)], bad)
    add_heat_table(page, [bad], [bad], [[0.5]], bad)
    html = to_notebook_html(page)
    assert "<script" not in html
    html.encode()
    assert "<script" not in Result({bad: bad})._repr_html_()
    assert "\x1b" not in repr(Result({bad: bad})), "a terminal does not obey it"
