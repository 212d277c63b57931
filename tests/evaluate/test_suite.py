"""Suites: fine-tuned where there is something to learn from, averaged as GLUE does, and not done twice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.evaluate import suite as suite_module
from firth.evaluate.suite import (
    UNBOUNDED_METRICS,
    build_task_recipe,
    evaluate_suite,
    format_suite_rows,
    is_finetuned_on,
    suite_table,
    summarize_suite,
    summarize_task,
    superglue_extra_scores,
)
from firth.tasks import Prediction
from firth.tasks.results import FIXED_TASK_METRICS, LOWER_IS_BETTER_METRICS
from firth.text import Example, SuiteTask

WORDS = {"cat": 1, "dog": 1, "river": 0, "garden": 0}
FEW = {"max_steps": 2, "max_seq_length": 16}


def lines(header: str, rows: list[str]) -> str:
    return "\n".join([header, *rows]) + "\n"


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of GLUE, a few lines each."""
    folder = tmp_path_factory.mktemp("glue")
    single = lines(
        "sentence\tlabel", [f"{start} the {word}\t{y}" for start in ("I saw", "We see") for word, y in WORDS.items()]
    )
    (folder / "SST-2").mkdir()
    for part in ("train", "dev"):
        (folder / "SST-2" / f"{part}.tsv").write_text(single)
    names = ["contradiction", "entailment", "neutral"]
    rows = [
        f"{i}\t{word} is here\t{other} is there\t{names[i % 3]}"
        for i, (word, other) in enumerate(zip(WORDS, "abcd", strict=True))
    ]
    (folder / "MNLI").mkdir()
    for part in ("train", "dev_matched", "dev_mismatched"):
        (folder / "MNLI" / f"{part}.tsv").write_text(lines("index\tsentence1\tsentence2\tgold_label", rows))
    return folder


def test_a_suite_is_fine_tuned_scored_averaged_and_resumed(
    glue: Path, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, seeds=2, options=FEW)
    assert set(result["tasks"]) == {"sst-2", "mnli"}
    mnli = result["tasks"]["mnli"]
    assert set(mnli["metrics"]) == {"matched", "mismatched"}
    both = [mnli["metrics"][part]["accuracy"] for part in ("matched", "mismatched")]
    assert mnli["score"] == pytest.approx(sum(both) / 2)
    assert result["average"] == pytest.approx((result["tasks"]["sst-2"]["score"] + mnli["score"]) / 2)
    assert not result["complete"]
    assert {"cola", "wnli"} <= set(result["missing"])
    assert "incomplete: without cola" in suite_table(result)[-1][1]
    assert "incomplete" in (tmp_path / "out/report.html").read_text(encoding="utf-8")

    for task in result["tasks"]:
        assert (tmp_path / "out" / task / "run/report.html").is_file()
        assert "| accuracy |" in (tmp_path / "out" / task / "run/final/README.md").read_text(encoding="utf-8")

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("done twice")

    monkeypatch.setattr(suite_module, "finetune", never)
    again = evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, seeds=2, options=FEW, resume=True)
    assert again == result
    with pytest.raises(UserError, match="started with seeds=2, not 3"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, seeds=3, options=FEW, resume=True)
    with pytest.raises(UserError, match="exists already"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, seeds=2, options=FEW)

    tuned = tmp_path / "out/sst-2/run/final"
    sst = SuiteTask("sst-2", "classify", glue / "SST-2/train.tsv", {"dev": glue / "SST-2/dev.tsv"}, {}, ("accuracy",))
    assert is_finetuned_on(tuned, sst)
    assert not is_finetuned_on(saved("bert"), sst)
    assert not is_finetuned_on(tuned, SuiteTask("cola", "classify", glue / "SST-2/dev.tsv"))
    direct = evaluate_suite(tuned, "glue", tmp_path / "direct", glue, tasks=["SST-2"])
    assert direct["tasks"]["sst-2"]["how"] == "fine-tuned already"
    best = max(result["tasks"]["sst-2"]["seeds"])
    assert direct["tasks"]["sst-2"]["score"] == pytest.approx(best)


def test_a_suite_of_ones_own_may_need_no_training(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"good": "The cat slept.", "bad": "The cat slepts."}\n')
    (tmp_path / "mine.yaml").write_text("tasks:\n  - {name: grammar, task: minimal-pairs, dev: pairs.jsonl}\n")
    result = evaluate_suite(saved("gpt2"), tmp_path / "mine.yaml", tmp_path / "out")
    assert result["complete"]
    assert result["tasks"]["grammar"]["how"] == "as it is"
    assert result["average"] in (0.0, 1.0)


@pytest.mark.parametrize(("family", "name"), [("gpt2", "perplexity"), ("bert", "pseudo_perplexity")])
def test_the_likelihood_of_plain_text_is_a_task(family: str, name: str, saved: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat slept by the river.\n")
    (tmp_path / "mine.yaml").write_text("tasks:\n  - {name: text, task: perplexity, dev: text.txt}\n")
    result = evaluate_suite(saved(family), tmp_path / "mine.yaml", tmp_path / "out")
    assert result["tasks"]["text"]["metrics"]["dev"] == {name: result["tasks"]["text"]["score"]}
    assert (result["average"], result["off_scale"]) == (None, ["text"])
    assert "unbounded score: text" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text("tasks:\n  - {name: text, task: perplexity, dev: text.txt, metric: accuracy}\n")
    with pytest.raises(UserError, match=f"has no metric 'accuracy' here, but {name}, "):
        evaluate_suite(saved(family), tmp_path / "mine.yaml", tmp_path / "other")


GRAMMAR = "{name: grammar, task: minimal-pairs, dev: pairs.jsonl}"


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("task: word-in-context", "later: no threshold for the cosine"),
        ("task: word-in-context, settings: {method: pseudo}", "later: method is not a setting of the task word-in"),
        ("task: word-in-context, settings: {train: pairs.jsonl}", r"later: .*pairs.jsonl:1: no column 'text_a'"),
        (
            "task: word-in-context, settings: {threshold: 0.5}, train: wic.jsonl",
            "later: the setting threshold is for a task without",
        ),
        ("task: word-in-context, settings: {threshold: 0.5}, metric: acuracy", "has no metric 'acuracy' here"),
        (
            "task: pseudo-likelihood, metric: [pseudo_perplexity, pseudo_word_perplexity]",
            "later: pseudo_perplexity has no bound and cannot be averaged",
        ),
        ("task: minimal-pairs", r"wic.jsonl:1: no column 'good'"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_computed(
    task: str, problem: str, saved: Any, tmp_path: Path
) -> None:
    wic_file(tmp_path)
    (tmp_path / "mine.yaml").write_text(f"tasks:\n  - {GRAMMAR}\n  - {{name: later, dev: wic.jsonl, {task}}}\n")
    with pytest.raises(UserError, match=problem):
        evaluate_suite(saved("bert"), tmp_path / "mine.yaml", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("setting", ["threshold: 0.5", "train: wic.jsonl"])
def test_a_suite_may_say_which_cosine_means_the_same_sense(setting: str, saved: Any, tmp_path: Path) -> None:
    wic_file(tmp_path)
    senses = f"{{name: senses, task: word-in-context, dev: wic.jsonl, settings: {{{setting}}}}}"
    (tmp_path / "mine.yaml").write_text(f"tasks:\n  - {senses}\n")
    result = evaluate_suite(saved("bert"), tmp_path / "mine.yaml", tmp_path / "out")
    assert result["tasks"]["senses"]["how"] == "as it is"
    (tmp_path / "mine.yaml").write_text("tasks:\n  - " + senses.replace(setting, "threshold: 0.9") + "\n")
    with pytest.raises(UserError, match="start over"):
        evaluate_suite(saved("bert"), tmp_path / "mine.yaml", tmp_path / "out", resume=True)


def wic_file(folder: Path) -> None:
    """Two pairs of texts with a word in them, and a pair of sentences."""
    rows = [{"word": "cat", "text_a": "a cat", "text_b": f"the {x} cat", "label": y} for x, y in (("old", 1), ("", 0))]
    (folder / "wic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pairs.jsonl").write_text('{"good": "The cat slept.", "bad": "The cat slepts."}\n')


def own_suite(folder: Path, metric: str, labels: dict[str, str]) -> Path:
    """A suite with one task; `labels` has a letter for each example of a file."""
    for name, letters in labels.items():
        rows = [f"{i}\tthe {word} is here\t{c}" for i, (word, c) in enumerate(zip([*WORDS] * 3, letters, strict=False))]
        (folder / f"{name}.tsv").write_text(lines("id\ttext\tlabel", rows))
    dev = ", ".join(f"{name}: {name}.tsv" for name in labels if name != "train")
    (folder / "mine.yaml").write_text(
        f"tasks:\n  - {{name: words, task: classify, train: train.tsv, dev: {{{dev}}}, metric: {metric}}}\n"
    )
    return folder / "mine.yaml"


@pytest.mark.parametrize(
    ("metric", "labels", "problem"),
    [
        ("[accuracy, f1]", {"train": "abab", "easy": "abab", "hard": "aaaa"}, r"hard.tsv: .* has no metric 'f1' here"),
        ("f1", {"train": "abcdef", "easy": "abcdef"}, r"easy.tsv: .* but accuracy, macro_f1, mcc. f1 is for .* two"),
        ("acuracy", {"train": "abab", "easy": "abab"}, "words: .* has no metric 'acuracy' here"),
    ],
)
def test_a_metric_that_a_file_cannot_have_is_named_before_any_training(
    metric: str, labels: dict[str, str], problem: str, saved: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        evaluate_suite(saved("bert"), own_suite(tmp_path, metric, labels), tmp_path / "out", options=FEW)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"), [({"maxsteps": 1}, "Did you mean 'max_steps'"), ({"lora_rank": -1}, "lora_rank is -1")]
)
def test_a_field_that_the_recipe_does_not_take_is_refused_before_the_folder_is_made(
    options: dict[str, Any], problem: str, saved: Any, glue: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, options=options)
    assert not (tmp_path / "out").exists()


def test_the_first_metric_of_a_task_decides_how_it_is_learned(saved: Any, tmp_path: Path) -> None:
    suite = own_suite(tmp_path, "[mcc, accuracy]", {"train": "abab", "dev": "abab"})
    evaluate_suite(saved("bert"), suite, tmp_path / "out", seeds=1, options=FEW)
    assert json.loads((tmp_path / "out/words/run/results.json").read_text())["metric"] == "mcc"
    record = SuiteTask("record", "choice", None, {"dev": tmp_path / "dev.tsv"}, {}, ("f1", "exact_match"))
    assert build_task_recipe(saved("bert"), record, tmp_path, 1, {}).metric == ""
    with pytest.raises(UserError, match="has no score 'pearson' here"):
        evaluate_suite(saved("bert"), suite, tmp_path / "other", seeds=1, options={"metric": "pearson"})
    assert not (tmp_path / "other").exists()


def test_the_score_of_a_task_is_the_mean_of_its_metrics_for_each_seed() -> None:
    task = SuiteTask("mrpc", "pair", None, {}, {}, ("accuracy", "f1"))
    found = summarize_task(
        task, {"dev": [{"accuracy": 0.5, "f1": 0.7, "mcc": 0.1}, {"accuracy": 0.7, "f1": 0.9, "mcc": 0.1}]}
    )
    assert found["seeds"] == pytest.approx([0.6, 0.8])
    assert found["score"] == pytest.approx(0.7)
    assert found["metrics"] == {"dev": {"accuracy": pytest.approx(0.6), "f1": pytest.approx(0.8)}}
    with pytest.raises(UserError, match="mrpc: the task pair has no metric 'f1'"):
        summarize_task(task, {"dev": [{"accuracy": 0.5}]})
    with pytest.raises(UserError, match="mrpc: the task pair has no metric 'f1' on hard"):
        summarize_task(task, {"dev": [{"accuracy": 0.5, "f1": 0.5}], "hard": [{"accuracy": 0.5}]})


def test_the_average_counts_every_task_once() -> None:
    done = {"cola": {"score": 0.2}, "wnli": {"score": 0.6}}
    assert summarize_suite({}, done, ("cola", "wnli"), Path("x"))["average"] == pytest.approx(0.4)
    assert summarize_suite({}, done, ("cola", "wnli"), Path("x"))["complete"]
    assert summarize_suite({}, {}, ("cola",), Path("x"))["average"] is None


def test_the_average_is_of_scores_on_one_scale() -> None:
    write, text = SuiteTask("write", "text-to-text", None, {}, {}, ("chrf", "exact_match")), SuiteTask("text", "lm")
    # metrics that have no bound are those of text, and these
    assert {*FIXED_TASK_METRICS["preference"][1:], *LOWER_IS_BETTER_METRICS} <= {*UNBOUNDED_METRICS}
    done = {
        "write": summarize_task(write, {"dev": [{"chrf": 60.0, "exact_match": 0.2}]}),
        "text": summarize_task(text, {"dev": [{"perplexity": 30.0, "bits_per_byte": 2.0}]}),
        "words": {"score": 0.6, "metrics": {"dev": {"accuracy": 0.6}}, "seeds": [0.6], "std": 0.0},
    }
    assert done["write"]["metrics"] == {"dev": {"chrf": 60.0, "exact_match": 0.2}}
    assert done["write"]["score"] == pytest.approx(0.4)
    assert done["text"]["score"] == 30.0
    result = summarize_suite({}, {name: {**task, "how": ""} for name, task in done.items()}, tuple(done), Path("x"))
    assert result["average"] == pytest.approx(0.5)
    assert (result["left_out"], result["off_scale"]) == ([], ["text"])
    assert suite_table(result)[-1][1:4] == ("excluded, unbounded: text", "", pytest.approx(0.5))
    rows = {name: (metrics, score) for name, metrics, _, score, _ in format_suite_rows(result)}
    assert rows["write"] == ("chrf 60, exact_match 20.0%", "40.0"), "percent, and scores as on the leaderboards"
    assert (rows["text"][1], rows["average"][1]) == ("30", "50.0")


def test_a_nan_score_is_not_in_the_average_and_named(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"one": 0.5, "two": math.nan}
    (tmp_path / "x.jsonl").write_text('{"good": "The cat slept.", "bad": "The cat slepts."}\n')
    entries = [f"  - {{name: {name}, task: minimal-pairs, dev: x.jsonl}}\n" for name in scores]
    (tmp_path / "mine.yaml").write_text("tasks:\n" + "".join(entries))

    def measured(_: Path, task: SuiteTask, __: Path, folder: Path) -> dict[str, float]:
        folder.mkdir(parents=True)
        return {"accuracy": scores[task.name]}

    monkeypatch.setattr(suite_module, "score_zero_shot", measured)
    result = evaluate_suite(saved("gpt2"), tmp_path / "mine.yaml", tmp_path / "out")
    assert (result["average"], result["left_out"], result["complete"]) == (0.5, ["two"], True)
    assert "two: the score is NaN, and not in the average" in capsys.readouterr().err
    assert suite_table(result)[-1] == ("average", "excluded, NaN: two", "", 0.5, 0.0)
    assert "NaN score: two" in (tmp_path / "out/report.html").read_text(encoding="utf-8")
    none = summarize_suite(
        {}, {"two": {"score": math.nan, "std": math.nan, "metrics": {}, "how": ""}}, ("two",), Path("x")
    )
    assert none["average"] is None
    assert math.isnan(suite_table(none)[-1][3])


def test_multirc_and_record_have_scores_of_their_own() -> None:
    answers = [("1-1-1", "1", "1"), ("1-1-2", "0", "0"), ("1-2-1", "1", "0"), ("1-2-2", "0", "0")]
    examples = [Example(i, ("p", "a"), true) for i, true, _ in answers]
    found = superglue_extra_scores("multirc", examples, [Prediction(said) for *_, said in answers])
    assert found == pytest.approx({"exact_match": 0.5, "f1": 2 / 3})
    choices = ("passage", "Old Mill is here", "Anna Grey is here")
    example = Example(1, choices, 0, ((0, 8), (0, 9)), ("Old Mill",))
    wrong = superglue_extra_scores("record", [example, example], [Prediction(0), Prediction(1)])
    assert wrong == pytest.approx({"exact_match": 0.5, "f1": 0.5})


def test_a_suite_that_starts_anew_learns_anew(glue: Path, saved: Any, tmp_path: Path) -> None:
    out, settings = tmp_path / "out", {"data": glue, "seeds": 1, "tasks": ["sst-2"]}
    evaluate_suite(saved("bert"), "glue", out, options=FEW, **settings)
    before = (out / "sst-2/run/log.jsonl"), (out / "sst-2/run/seed-0/log.jsonl").read_text()
    longer = evaluate_suite(saved("bert"), "glue", out, options=FEW | {"max_steps": 4}, overwrite=True, **settings)
    assert longer["tasks"]["sst-2"]["seeds"]
    assert len((out / "sst-2/run/seed-0/log.jsonl").read_text()) > len(before[1])
    inside = out / "sst-2/run/final"
    with pytest.raises(UserError, match="which --overwrite would remove"):
        evaluate_suite(inside, "glue", out, options=FEW, overwrite=True, **settings)
    assert (inside / "model.safetensors").is_file()
    assert (out / "sst-2/suite_task.json").is_file()


def test_a_suite_goes_on_only_with_the_files_that_it_began_with(glue: Path, saved: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"seeds": 1, "tasks": ["sst-2"], "options": FEW}
    evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, **settings)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/SST-2").symlink_to(glue / "SST-2")
    evaluate_suite(saved("bert"), "glue", tmp_path / "out", tmp_path / "other", resume=True, **settings)
    (tmp_path / "other/SST-2").unlink()
    (tmp_path / "other/SST-2").mkdir()
    for part in ("train.tsv", "dev.tsv"):
        (tmp_path / "other/SST-2" / part).write_text((glue / "SST-2" / part).read_text())
    with pytest.raises(UserError, match=r"sst-2 in .* was scored on other files"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", tmp_path / "other", resume=True, **settings)


def test_labels_that_are_not_learned_are_found_before_anything_is(saved: Any, tmp_path: Path) -> None:
    for name, label in (("train", "a"), ("dev", "a"), ("odd", "z")):
        rows = [{"text": "the cat", "label": label}, {"text": "the river", "label": "b"}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = tmp_path / "suite.yaml"
    suite.write_text("tasks: [{name: x, task: classify, train: train.jsonl, dev: {one: dev.jsonl, two: odd.jsonl}}]")
    with pytest.raises(UserError, match=r"odd.jsonl, example .* the label 'z' does not occur"):
        evaluate_suite(saved("bert"), suite, tmp_path / "out", options=FEW)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../x", "..", "a/b"])
def test_names_of_tasks_stay_in_the_folder(name: str, saved: Any, tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text('{"good": "a cat", "bad": "cat a"}\n')
    suite = tmp_path / "suite.yaml"
    suite.write_text(f"tasks: [{{name: {name}, task: minimal-pairs, dev: dev.jsonl}}]")
    with pytest.raises(UserError, match="becomes a folder name"):
        evaluate_suite(saved("bert"), suite, tmp_path / "out")


def test_the_suites_own_fields_are_no_options(glue: Path, saved: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"seeds is set by the suite: leave it out\. Use --seeds N"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, options={"seeds": 5})


def test_mistakes_are_named(saved: Any, glue: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'glue'"):
        evaluate_suite(saved("bert"), "gleu", tmp_path / "out", glue)
    with pytest.raises(UserError, match="--suite glue needs --data"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out")
    with pytest.raises(UserError, match="The suite has no task 'sst2' here"):
        evaluate_suite(saved("bert"), "glue", tmp_path / "out", glue, tasks=["sst2"])
