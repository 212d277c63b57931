"""The door to every evaluation: what is written, what is refused, and files without answers."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from markupsafe import escape
from safetensors.torch import load_file

from firth import api
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, write_json
from firth.core.serialization import to_dict
from firth.evaluate import evaluate
from firth.evaluate.card import non_default_fields, training_section, write_model_card
from firth.evaluate.examples_page import confidence_margin, is_mistake
from firth.evaluate.export import write_export
from firth.evaluate.likelihood import aggregate_likelihoods, make_scorer
from firth.evaluate.report import write_run_report
from firth.metrics import format_metric, mean_and_std
from firth.models import Distillation, Model, load_model, make_model
from firth.models.config import DetectorConfig
from firth.models.presets import bert, modernbert
from firth.objectives import MLM, OBJECTIVES
from firth.tasks import TASK_FILE, FinetuneRecipe, Prediction, finetune, make_task
from firth.text import Example, read_labelled
from firth.train import Recipe

LABELS = {"cat": "animal", "dog": "animal", "river": "place", "garden": "place"}
ROWS = [
    {"text": f"{start} the {word}", "label": label}
    for start in ("We saw", "Anna found", "They like", "You know")
    for word, label in LABELS.items()
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tuned(saved: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of a short fine-tuning, in which little was learned."""
    folder = tmp_path_factory.mktemp("tuned")
    train, dev = write_jsonl(folder / "train.jsonl", ROWS), write_jsonl(folder / "dev.jsonl", ROWS[:8])
    recipe = FinetuneRecipe(
        checkpoint=str(saved("bert")),
        task="classify",
        train=str(train),
        dev=str(dev),
        output_dir=str(folder / "run"),
        seeds=1,
        max_steps=2,
        logging_steps=1,
        max_seq_length=16,
    )
    finetune(recipe)
    return folder / "run"


def test_a_fine_tuned_checkpoint_is_scored(tuned: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "dev.jsonl", ROWS)
    result = evaluate(tuned / "final", "classify", data, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    hits = [line["prediction"] == line["reference"] for line in lines]
    assert len(lines) == len(ROWS) == result["examples"]
    assert result["metrics"]["accuracy"] == pytest.approx(sum(hits) / len(hits))
    assert json.loads((tmp_path / "out/results.json").read_text()) == result
    page = (tmp_path / "out/report.html").read_text(encoding="utf-8")
    assert "true \\ predicted" in page
    assert "Training" in page
    assert page.count('<svg class="chart') == 1
    assert ("Mistakes" in page) == (not all(hits))


def test_a_file_without_answers_gives_predictions_only(tuned: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "test.jsonl", [{"text": row["text"]} for row in ROWS])
    result = evaluate(tuned / "final", "classify", data, tmp_path / "out")
    assert result["metrics"] == {}
    lines = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert {line["prediction"] for line in lines} <= {"animal", "place"}
    assert {line["reference"] for line in lines} == {None}


def test_a_file_that_lacks_some_answers_says_which(tuned: Path, tmp_path: Path) -> None:
    rows = [{"text": "the cat", "label": "a"}, *[{"text": "the river"}] * 4, {"text": "the dog", "label": ""}]
    data = write_jsonl(tmp_path / "half.jsonl", rows)
    with pytest.raises(UserError, match=r"half.jsonl: 5 examples have no label \(id or line 2, 3, 4, \.\.\.\)"):
        evaluate(tuned / "final", "classify", data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_example_that_a_note_is_about_is_in_the_results(tuned: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "dev.jsonl", [row | {"text": row["text"] + "\ud800"} for row in ROWS[:4]])
    (note,) = evaluate(tuned / "final", "classify", data, tmp_path / "out")["notes"]
    assert (note["file"], note["examples"]) == (str(data), ["line 1", "line 2", "line 3", "line 4"])
    assert "notes" not in evaluate(tuned / "final", "classify", write_jsonl(data, ROWS), tmp_path / "other")


def test_the_most_confident_mistakes_come_first() -> None:
    example = Example(1, ("good one", "bad one"))
    close, far = (Prediction("bad", {"good": -9.0, "bad": bad}) for bad in (-8.5, -2.0))
    assert confidence_margin("minimal-pairs", example, close) == 0.5
    assert confidence_margin("minimal-pairs", example, far) == 7.0
    assert is_mistake("minimal-pairs", example, far)
    assert not is_mistake("minimal-pairs", example, Prediction("good"))
    assert not is_mistake("classify", Example(1, ("text",)), Prediction("a"))


def test_perplexity_of_files(saved: Any, untrained: Any, corpus_file: Path, tmp_path: Path) -> None:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")[:4]
    (tmp_path / "some.txt").write_text("\n\n".join(texts), encoding="utf-8")
    result = evaluate(saved("gpt2"), "perplexity", tmp_path / "some.txt", tmp_path / "out", stride=8)
    scorer = make_scorer(untrained("gpt2"), stride=8)
    wanted, _ = aggregate_likelihoods(scorer, list(scorer.score_texts(texts)))
    assert result["metrics"]["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-4)
    assert result["metrics"]["bits_per_byte"] == pytest.approx(wanted["bits_per_byte"], rel=1e-4)
    lines = [json.loads(line) for line in (tmp_path / "out/predictions.jsonl").read_text().splitlines()]
    assert sum(line["prediction"] for line in lines) == pytest.approx(-result["nats"])
    assert sum(line["bytes"] for line in lines) == sum(len(text.strip().encode()) for text in texts)
    pseudo = evaluate(saved("bert"), "pseudo-likelihood", tmp_path / "some.txt", tmp_path / "other")
    assert set(pseudo["metrics"]) == {"pseudo_perplexity", "pseudo_word_perplexity"}


FILES: dict[str, list[dict[str, Any]]] = {
    "minimal-pairs": [{"good": "The cat slept.", "bad": "The cat slepts.", "uid": "verbs"}],
    "cloze": [{"context": "The cat slept by the", "answer": "river"}],
    "choice": [{"context": "The cat", "choices": ["slept", "garden"], "gold": 0}],
    "embed": [{"text_a": "The cat", "text_b": "A cat"}, {"text_a": "The river", "text_b": "A river"}],
    "word-similarity": [
        {"word1": "the", "word2": "a", "score": 3},
        {"word1": "the", "word2": "I", "score": 1},
        {"word1": "hedgehogs", "word2": "I", "score": 1},
    ],
    "analogy": [{"section": "odd", "a": "the", "b": "a", "c": "I", "d": "s"}],
}


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@pytest.mark.parametrize("task", FILES)
def test_tasks_without_training(task: str, family: str, saved: Any, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", FILES[task])
    result = evaluate(saved(family), task, data, tmp_path / "out")
    assert result["metrics"]
    assert len((tmp_path / "out/predictions.jsonl").read_text().splitlines()) == len(FILES[task])
    assert (tmp_path / "out/report.html").is_file()


def test_an_ensemble_of_choices_is_scored_like_one(untrained: Any, tmp_path: Path) -> None:
    base = untrained("bert")
    task = make_task("choice", {"answer": "auto"}, base.tokenizer, base.config)
    torch.manual_seed(0)
    model = make_model(task.configure_model(base.config))
    model.tokenizer = task.tokenizer
    folder = tmp_path / "choice"
    model.save(folder)
    write_json(folder / TASK_FILE, task.metadata())
    rows = [{"context": "The cat", "choices": ["slept", f"saw {'it ' * i}"], "gold": i % 2} for i in range(6)]
    data = write_jsonl(tmp_path / "dev.jsonl", rows)
    one = evaluate(folder, "choice", data, tmp_path / "one")
    both = evaluate(folder, "choice", data, tmp_path / "both", ensemble=[folder])
    assert both["metrics"] == one["metrics"]
    predictions = [
        [json.loads(line)["prediction"] for line in (tmp_path / name / "predictions.jsonl").open()]
        for name in ("one", "both")
    ]
    assert predictions[0] == predictions[1]
    assert one["metrics"]["accuracy"] > 0


def test_senses_learn_their_threshold_from_a_file(saved: Any, tmp_path: Path) -> None:
    rows = [
        {"word": "cat", "text_a": "The cat slept", "text_b": "The cat slept", "label": True},
        {"word": "cat", "text_a": "The cat slept", "text_b": "Anna saw a cat", "label": False},
    ]
    data = write_jsonl(tmp_path / "wic.jsonl", rows)
    result = evaluate(saved("bert"), "word-in-context", data, tmp_path / "out", train=data)
    assert result["metrics"]["accuracy"] == 1.0


def test_what_cannot_work_is_refused_at_once(tuned: Path, saved: Any, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"of": "no task"}])
    cases: list[tuple[Path, str, dict[str, Any], str]] = [
        (saved("bert"), "clasify", {}, "Did you mean 'classify'"),
        (saved("bert"), "classify", {}, "was not fine-tuned for the task classify: fine-tune it first"),
        (tuned / "final", "pair", {}, "was fine-tuned for classify, not for pair"),
        (tuned / "final", "perplexity", {}, "has a task head"),
        (tuned / "final", "cloze", {}, "has a task head"),
        (saved("bert"), "text-to-text", {}, "text-to-text needs a model that writes"),
        (saved("bert"), "lm", {}, "lm needs a model that writes"),
        (
            saved("gpt2"),
            "minimal-pairs",
            {"method": "pseudo"},
            "has the architecture decoder, which has: left-to-right",
        ),
        (tmp_path / "nothing", "cloze", {}, "is not a checkpoint folder"),
        (data, "cloze", {}, "is not a checkpoint folder"),
        (saved("bert"), "minimal-pairs", {"layer": 3}, "layer is not a setting of the task minimal-pairs"),
        (tuned / "final", "classify", {"method": "pseudo"}, "method is not a setting"),
    ]
    for checkpoint, task, settings, problem in cases:
        with pytest.raises(UserError, match=problem):
            evaluate(checkpoint, task, data, tmp_path / "out", **settings)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(UserError, match="exists already"):
        evaluate(tuned / "final", "classify", data, tmp_path / "taken")


def test_a_card_says_what_is_known_and_no_more(tuned: Path, tmp_path: Path) -> None:
    evaluate(tuned / "final", "classify", write_jsonl(tmp_path / "x.jsonl", ROWS), tuned / "evaluate-x.jsonl")
    path = write_model_card(tuned / "final")
    card = path.read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: unknown\nlibrary_name: transformers\npipeline_tag: text-classification\n")
    assert "| labels | animal, place |" in card
    assert "| x.jsonl | accuracy |" in card
    assert "| dev.jsonl | accuracy |" in card
    assert "| learning_rate |" in card
    assert card.count("*Fill in.*") == 4
    assert find_corruption(tuned / "final") is None
    with pytest.raises(UserError, match="exists already, and may have been edited"):
        write_model_card(tuned / "final")
    with atomic_folder(tuned / "final") as temporary:  # as when a run is resumed
        (temporary / "config.json").write_text("{}")
    assert path.read_text(encoding="utf-8") == card


def test_a_card_counts_what_the_kept_weights_have_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """A run that went back to the weights of step 20 of 80 has a model that read a quarter of its text."""
    folder = tmp_path / "run" / "final"
    shutil.copytree(saved("bert"), folder)
    results = {"steps": 80, "best_step": 20, "words_seen": 4000, "eval_loss": 2.5}
    (folder.parent / "results.json").write_text(json.dumps(results))
    card = write_model_card(folder, overwrite=True).read_text(encoding="utf-8")
    assert "| weights of step | 20 |" in card
    assert "The model has read about 1,000 words" in card
    (folder.parent / "results.json").write_text(json.dumps(results | {"best_step": None}))
    card = write_model_card(folder, overwrite=True).read_text(encoding="utf-8")
    assert "weights of step" not in card
    assert "The model has read 4,000 words" in card


def test_a_card_shows_labels_and_names_as_they_are(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Markdown of another program finds no link, image or HTML in the card, and YAML finds one document."""
    hostile = "a\n---\n# b | <img src=x onerror=y> [c](http://d) ![e](f) **g** `h` \x1b[2J"
    folder = tmp_path / "<b>run<b> [x](y) *z*" / "final"
    shutil.copytree(saved("bert"), folder)
    task = {"task": "classify", "answer": "head", "labels": [hostile, "plain_label"]}
    (folder / "task.json").write_text(json.dumps(task))
    (folder.parent / "source.json").write_text(json.dumps({"data": [hostile]}))
    (folder.parent / "results.json").write_text(json.dumps({"metric": "f1", "scores": [{"f1": 0.5}], "best_seed": 0}))
    (folder.parent / "recipe.yaml").write_text(yaml.safe_dump({"task": "classify", "dev": hostile}))
    card = write_model_card(folder, overwrite=True).read_text(encoding="utf-8")
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["model-index"][0]["name"] == "<b>run<b> [x](y) *z*"
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in tokens + inline} & {"html_block", "html_inline", "link_open", "image"} == set()
    assert {child.markup for child in inline if child.type in ("em_open", "strong_open")} == {"*"}, "Fill in alone"
    shown = ["".join(child.content for child in token.children or ()) for token in tokens if token.type == "inline"]
    assert "<b>run<b> [x](y) *z*" in shown
    line = hostile.replace("\n", " ").replace("\x1b", "\\x1b")
    assert f"{line}, plain_label" in shown
    assert line in shown


def test_every_number_of_a_card_and_a_report_is_that_of_the_results(tuned: Path, tmp_path: Path) -> None:
    """Two seeds: the card tells of the model that is there, and what the seeds come to."""
    shutil.copytree(tuned, tmp_path / "run", ignore=shutil.ignore_patterns("final", "evaluate-*"))
    shutil.copytree(tuned / "seed-0" / "final", tmp_path / "run" / "final")
    results = json.loads((tuned / "results.json").read_text())
    other = {name: value / 2 for name, value in results["scores"][0].items()}
    results |= {"scores": [other, *results["scores"][:1]], "best_seed": 1, "steps": [3, 3], "seeds": [0.1, 0.2]}
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    write_model_card(tmp_path / "run" / "final", overwrite=True)
    card = (tmp_path / "run" / "final" / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---")[1])
    metrics = {m["type"]: m["value"] for m in front["model-index"][0]["results"][0]["metrics"]}
    assert metrics == results["scores"][1]
    for name, value in results["scores"][1].items():
        mean, deviation = mean_and_std([value / 2, value])
        cells = " | ".join(format_metric(name, x) for x in (value, mean, deviation))
        assert f"| dev.jsonl | {name} | {cells} |" in card
    assert "shots" not in card
    page = write_run_report(
        tmp_path / "run", results | {"failed": []}, read_labelled(tuned.parent / "dev.jsonl", "classify")
    )
    html = page.read_text(encoding="utf-8")
    for name, value in results["scores"][1].items():
        cells = "".join(
            rf"\s*<td[^>]*>{re.escape(format_metric(name, x))}</td>"
            for x in (*mean_and_std([value / 2, value]), value / 2)
        )
        shown = f"f1 of '{results['positive_label']}'" if name == "f1" else name
        assert re.search(rf"<td[^>]*>{re.escape(escape(shown))}</td>{cells}", html)


def test_a_report_says_of_a_baseline_what_the_terminal_says(tuned: Path) -> None:
    results = json.loads((tuned / "results.json").read_text())
    examples = read_labelled(tuned.parent / "dev.jsonl", "classify")
    unknown = {"metric": "accuracy", "baseline": "other", "examples": 4, "over": "seeds and examples"}
    unknown |= {"num_seeds": [5, 5], "paired_seeds": False, "degrees_of_freedom": 7.123}
    unknown |= dict.fromkeys(("difference", "low", "high", "p_value"), math.nan)
    better = unknown | {"difference": 0.03, "low": 0.01, "high": 0.05, "p_value": 0.0001}

    def page(test: dict[str, Any]) -> str:
        return write_run_report(tuned, results | {"comparison": test}, examples).read_text(encoding="utf-8")

    assert "accuracy cannot be compared with other: it is not a number" in page(unknown)
    said = (
        "p &lt; 0.001, over 5 and 5 seeds and 4 dev examples; t with 7.12 degrees of freedom): that is more than chance"
    )
    assert said in page(better)
    assert "accuracy is +3.0 points against other (95%: +1.0 to +5.0 points, " in page(better)
    assert "over 5 pairs of seeds" in page(better | {"paired_seeds": True})
    assert "that may be chance" in page(better | {"p_value": 0.05})
    few = page(better | {"over": "examples", "num_seeds": [2, 2]})
    assert "over 4 dev examples alone): 2 and 2 seeds are too few to judge whether other seeds agree." in few
    assert "more than chance" not in few


def test_a_card_lists_what_is_not_as_usual() -> None:
    recipe = FinetuneRecipe(
        train="t", output_dir="o", layer_decay=0.8, freeze="embeddings", early_stopping=3, load_best=False
    )
    assert non_default_fields(to_dict(recipe)) == {
        "layer_decay": 0.8,
        "freeze": "embeddings",
        "early_stopping": 3,
        "load_best": False,
    }
    tiny, teach = bert(1, 8, 1, 9), Distillation(soft=1.0)
    learned = Recipe(model=tiny, objective=MLM(rate=0.3), optim="muon", distillation=teach)
    assert non_default_fields(to_dict(learned)) == {"optim": "muon", "objective.rate": 0.3, "distillation.soft": 1.0}
    table = training_section(to_dict(learned), {}, {})
    assert "| objective | MLM |" in table
    assert "| objective.rate | 0.3 |" in table
    for objective in OBJECTIVES.values():
        assert "objective" not in non_default_fields(to_dict(Recipe(model=tiny, objective=objective)))


def test_a_card_of_a_checkpoint_without_a_run(untrained: Callable[[str], Model], tmp_path: Path) -> None:
    model = untrained("gpt2")
    model.save(tmp_path / "mine" / "gpt2")
    card = write_model_card(tmp_path / "mine" / "gpt2").read_text(encoding="utf-8")
    assert "# gpt2" in card
    assert "Not evaluated yet" in card
    assert "pipeline_tag: text-generation" in card
    assert f"| parameters | {model.num_parameters:,} |" in card
    again = load_model(tmp_path / "mine" / "gpt2")
    assert torch.equal(again.embed.tokens.weight, model.embed.tokens.weight)


def test_an_exported_checkpoint_still_knows_its_task(tuned: Path, tmp_path: Path) -> None:
    final = tuned / "seed-0" / "final"
    shutil.copytree(final, tmp_path / "final")
    write_model_card(tmp_path / "final", overwrite=True)
    write_export(tmp_path / "final", tmp_path / "out")
    assert find_corruption(tmp_path / "out") is None
    assert (tmp_path / "out" / "task.json").read_text() == (final / "task.json").read_text()
    assert (tmp_path / "out" / "README.md").is_file()
    data = write_jsonl(tmp_path / "dev.jsonl", ROWS)
    before = evaluate(final, "classify", data, tmp_path / "before")["metrics"]
    assert evaluate(tmp_path / "out", "classify", data, tmp_path / "after")["metrics"] == before


def test_an_export_has_no_detector_of_replaced_tokens(tmp_path: Path) -> None:
    """Only pretraining needs it, and `transformers` would list each of its tensors as unexpected."""
    model = make_model(modernbert(1, 16, 2, 32, 50, extras=(DetectorConfig(),)))
    model.save(tmp_path / "final")
    assert any(name.startswith("extras.") for name in load_file(tmp_path / "final" / "model.safetensors"))
    write_export(tmp_path / "final", tmp_path / "out")
    assert not any(name.startswith("extras.") for name in load_file(tmp_path / "out" / "model.safetensors"))
    exported, ids = load_model(tmp_path / "out"), torch.randint(5, 50, (2, 7))
    assert exported.config == replace(model.config, extras=())
    assert torch.equal(exported(ids).logits, model(ids).logits)


def test_a_score_that_is_no_number_is_null_in_what_others_read(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """One example has no correlation; the run, its card and its JSON are whole for all that."""
    train, dev = tmp_path / "train.jsonl", tmp_path / "dev.jsonl"
    rows = [json.dumps({"text": f"the cat sat {i}", "score": i}) for i in range(4)]
    train.write_text("\n".join(rows))
    dev.write_text(rows[1])
    api.finetune(saved("bert"), "regress", train, dev, tmp_path / "run", seeds=2, max_steps=1)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    kept = json.loads((tmp_path / "run" / "results.json").read_text(), parse_constant=refuse)
    assert (kept["mean"], kept["seeds"]) == (None, [None, None])
    assert "nan" not in (tmp_path / "run" / "final" / "README.md").read_text()
