"""Labels in context: prompts, likelihoods, calibration, controls, and the laws that tie them together."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from firth import api
from firth.core.errors import UserError
from firth.evaluate import logprobs
from firth.evaluate.cloze import evaluate_choice
from firth.evaluate.in_context import (
    CONTENT_FREE_INPUTS,
    LabelledTask,
    PromptScorer,
    calibrate,
    compare_with_chance,
    evaluate_in_context,
    make_runs,
)
from firth.evaluate.induction import CopyLosses, copy_losses, evaluate_induction
from firth.evaluate.likelihood import make_scorer, text_likelihoods
from firth.evaluate.logprobs import LogprobQuery, compute_logprobs, score_query_batch
from firth.evaluate.prompt_template import BUILT_IN_TEMPLATES, parse_template, template_fields
from firth.text import Example

ALL = ["gpt2", "bert", "t5", "bart"]
TEMPLATE = "{text}: {label}"


def examples(n: int, first: int = 0) -> list[Example]:
    animals, verbs, labels = ["cat", "dog", "fox"], ["slept", "came"], ["river", "old mill", "garden"]
    return [Example(i, (f"{animals[i % 3]} {verbs[i % 2]} {i}",), labels[i % 3]) for i in range(first, first + n)]


# --- templates --------------------------------------------------------------------------------------------------------


def test_a_template_writes_prompt_and_demonstration() -> None:
    template = parse_template("{{a}} {text_a}\nQ: {text_b} {label}!", "pair")
    fields = template_fields("pair", Example(1, ("One.", "Two {text_a}?"), "yes"))
    assert template.prompt(fields) == "{a} One.\nQ: Two {text_a}? "  # a field's text is not a template
    assert template.demonstration(fields, "yes") == "{a} One.\nQ: Two {text_a}? yes!\n\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{text.__class__} {label}", r"{text.__class__} is not a field. This task has {text}, {label}"),
        ("{text[0]} {label}", r"{text\[0\]} is not a field"),
        ("{text!r} {label}", r"{text!r} is not a field"),
        ("{text:>9} {label}", r"{text:>9} is not a field"),
        ("{} {label}", r"{} is not a field"),
        ("{text_b} {label}", r"{text_b} is not a field"),
        ("{text", "expected '}' before end of string"),
        ("{text}", "has {label} 0 times. Write it once"),
        ("{label} {text} {label}", "has {label} 2 times"),
        ("so {label}", r"has no text|reads no text"),
        ("categry", "Did you mean 'category'"),
    ],
)
def test_a_template_has_named_fields_and_nothing_else(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_template(text, "classify")


@pytest.mark.parametrize("task", BUILT_IN_TEMPLATES)
def test_built_in_templates_can_be_read(task: str) -> None:
    assert all(parse_template(name, task).name == name for name in BUILT_IN_TEMPLATES[task])


# --- shared rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_queries_that_share_an_input_get_what_they_get_alone(family: str, untrained: Any) -> None:
    scorer = make_scorer(untrained(family))
    words = ["river", "old mill", "old garden", "river garden"]
    splits = [scorer.split_at_span(f"The cat: {word}", 8, 9 + len(word), "here") for word in words]
    queries = [query for split in splits for query in scorer.span_queries(split)]
    for query, found in compute_logprobs(scorer.model, queries):
        (alone,) = score_query_batch(scorer.model, [query])
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-5)
        assert found.top_ids.tolist() == alone.top_ids.tolist()


def test_labels_of_one_token_cost_one_row(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    monkeypatch.setattr(
        "firth.evaluate.logprobs.score_query_batch",
        lambda model, queries: rows.extend(queries) or score_query_batch(model, queries),
    )
    queries = [LogprobQuery([5, 6, 7], [2], [label]) for label in (8, 9, 10)] + [
        LogprobQuery([5, 6, 7, 8], [2, 3], [8, 9])
    ]
    found = [float(one.logprobs.sum()) for _, one in compute_logprobs(untrained("gpt2"), queries)]
    assert len(rows) == 1
    assert len(set(found)) == 4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_common_beginning_is_computed_once(
    family: str, untrained: Any, tokenizers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels of several tokens after prompts of several lengths: as when each row is computed alone."""
    monkeypatch.setattr("firth.evaluate.logprobs.MIN_PREFIX_TOKENS", 4)
    model = untrained(family)
    rng, lengths = np.random.default_rng(0), []
    ids = model.tokenizer.vocab.non_special_ids
    queries = []
    for length in (5, 9, 12):
        prompt = rng.choice(ids, length).tolist()
        for size in (1, 1, 2, 3, 4):
            label = rng.choice(ids, size).tolist()
            row = [*prompt, *label[:-1]]
            queries.append(LogprobQuery(row, list(range(length - 1, len(row))), label))
    queries.append(LogprobQuery(rng.choice(ids, 20).tolist(), [3], [int(ids[0])]))
    batches = logprobs.score_group_batch
    monkeypatch.setattr(logprobs, "score_group_batch", lambda *a: lengths.append(len(a[1])) or batches(*a))
    for query, found in compute_logprobs(model, queries, batch_tokens=100):
        (alone,) = score_query_batch(model, [query])
        np.testing.assert_allclose(found.logprobs, alone.logprobs, atol=1e-4)
        assert found.top_ids.tolist() == alone.top_ids.tolist()
    assert sum(lengths) == 3
    assert len(lengths) > 1, "several batches"


# --- likelihoods ------------------------------------------------------------------------------------------------------


def test_a_decoders_labels_are_continuations(untrained: Any) -> None:
    model, dev = untrained("gpt2"), examples(4)
    outcome = evaluate_in_context(model, "classify", dev, template=[TEMPLATE])
    for example, prediction in zip(dev, outcome.predictions, strict=True):
        prompt = f"{example.texts[0]}:"
        start, *whole = text_likelihoods(model, [prompt, *(f"{prompt} {label}" for label in outcome.details["labels"])])
        logp = np.array([one.logp - start.logp for one in whole])
        expected = np.exp(logp) / np.exp(logp).sum()
        assert prediction.scores == pytest.approx(dict(zip(outcome.details["labels"], expected, strict=True)), rel=1e-3)
        assert prediction.prediction == outcome.details["labels"][logp.argmax()]


def test_an_encoder_fills_a_cloze_from_left_to_right(untrained: Any) -> None:
    """By torch alone: the label's later tokens are masked, those before are known, the text after it is read."""
    model, text, words = untrained("bert"), "The cat", ["old mill", "river"]
    tokenizer, vocab = model.tokenizer, model.tokenizer.vocab
    dev = [Example(1, (text,), "river"), Example(2, (text,), "old mill")]
    outcome = evaluate_in_context(model, "classify", dev, template=["{text} by the {label}, it slept."])
    before, after = tokenizer.encode(f"{text} by the"), tokenizer.encode(", it slept.")
    logp = []
    for word in words:
        ids, total = tokenizer.encode(word), 0.0
        for k in range(len(ids)):
            row = [vocab.cls, *before, *ids[:k], *[vocab.mask] * (len(ids) - k), *after, vocab.sep]
            with torch.no_grad():
                total += float(model(torch.tensor([row])).logits[0, 1 + len(before) + k].log_softmax(0)[ids[k]])
        logp.append(total)
    expected = np.exp(logp) / np.exp(logp).sum()
    assert outcome.predictions[0].scores == pytest.approx(dict(zip(words, expected, strict=True)), rel=1e-3)
    assert outcome.details["method"] == "within-word-l2r"
    pseudo = evaluate_in_context(model, "classify", dev, template=["{text} {label}"], method="pseudo")
    assert pseudo.details["method"] == "pseudo"


@pytest.mark.parametrize("family", ALL)
def test_no_shots_are_no_context(family: str, untrained: Any) -> None:
    """0 shots of the task choice are `evaluate_choice`; the training file changes nothing."""
    model = untrained(family)
    dev = [Example(i, ("The cat slept by", "the river", "an old mill"), i % 2) for i in range(3)]
    method = "pseudo" if family == "bert" else "auto"  # an encoder reads a label as one word, an ending as several
    plain = evaluate_choice(model, dev, method=method)
    shots = evaluate_in_context(model, "choice", dev, 0, ["plain"], train=examples(3), method=method)
    for name in ("accuracy", "accuracy_norm", "accuracy_bytes"):
        assert shots.metrics[name] == plain.metrics[name]
    for a, b in zip(shots.predictions, plain.predictions, strict=True):
        assert a.scores == pytest.approx(b.scores, abs=1e-4)
    assert shots.metrics["chance_accuracy"] == 0.5
    assert shots.details["seeds"] == 1


def test_norms_divide_by_characters(untrained: Any) -> None:
    """lm-eval's acc and acc_norm, computed from the scores of the report."""
    model, dev = untrained("gpt2"), examples(6)
    outcome = evaluate_in_context(model, "classify", dev, template=[TEMPLATE])
    labels = outcome.details["labels"]
    logp_NC = np.log([[(p.scores or {})[label] for label in labels] for p in outcome.predictions])
    # Normalised probabilities differ from the sums by a constant, which a division by lengths does not keep.
    scorer = PromptScorer(make_scorer(model))
    (run,) = make_runs(LabelledTask("classify", dev, [], {}), parse_template(TEMPLATE, "classify"), [], 0, 0, False)
    (scores,) = scorer.score_runs([run], LabelledTask("classify", dev, [], {}))
    sums_NC = np.array(scores.logp)
    np.testing.assert_allclose(sums_NC - sums_NC[:, :1], logp_NC - logp_NC[:, :1], atol=1e-6)
    targets = [labels.index(example.target) for example in dev]
    assert outcome.metrics["accuracy"] == np.mean(sums_NC.argmax(1) == targets)
    assert outcome.metrics["accuracy_norm"] == np.mean((sums_NC / [len(x) for x in labels]).argmax(1) == targets)


# --- demonstrations ---------------------------------------------------------------------------------------------------


def test_demonstrations_are_balanced_and_drawn_per_seed() -> None:
    task, pool = LabelledTask("classify", examples(3), examples(30, 100), {}), examples(30, 100)
    template = parse_template(TEMPLATE, "classify")
    drawn = [make_runs(task, template, pool, 6, seed, False)[0].demonstrations for seed in range(4)]
    for texts in drawn:
        assert Counter(text.split(": ")[1] for text in texts) == {"river\n\n": 2, "old mill\n\n": 2, "garden\n\n": 2}
    assert len(set(drawn)) == 4
    assert drawn[0] == make_runs(task, template, pool, 6, 0, False)[0].demonstrations
    last = {make_runs(task, template, pool, 6, seed, False)[0].demonstrations[-1].split(": ")[1] for seed in range(20)}
    assert len(last) == 3, "the order is drawn too"


def test_random_labels_are_uniform_and_change_nothing_else() -> None:
    pool = examples(300)
    task, template = LabelledTask("classify", pool, [], {}), parse_template(TEMPLATE, "classify")
    counts: Counter[str] = Counter()
    for seed in range(10):
        true, control = make_runs(task, template, pool, 300, seed, True)
        assert [text.split(": ")[0] for text in true.demonstrations] == [
            text.split(": ")[0] for text in control.demonstrations
        ]
        counts.update(text.split(": ")[1].strip() for text in control.demonstrations)
    assert all(abs(n - 1000) < 4 * (3000 * 2 / 9) ** 0.5 for n in counts.values()), counts


def test_the_control_needs_demonstrations(untrained: Any) -> None:
    with pytest.raises(UserError, match="--shots 0 has none"):
        evaluate_in_context(untrained("gpt2"), "classify", examples(3), 0, random_labels=True)
    with pytest.raises(UserError, match="give --train FILE"):
        evaluate_in_context(untrained("gpt2"), "classify", examples(3), 2)
    with pytest.raises(UserError, match=r"--shots is 9, and --train has 3 examples that are not in --data \(3 are\)"):
        evaluate_in_context(untrained("gpt2"), "classify", examples(3), 9, train=examples(6))


def test_a_query_is_not_its_own_demonstration(untrained: Any) -> None:
    outcome = evaluate_in_context(untrained("bert"), "classify", examples(3), 1, [TEMPLATE], train=examples(6), seeds=1)
    assert outcome.notices[0] == "3 examples of --train are in --data too, and were not drawn."


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_whole_demonstrations_are_dropped_where_they_do_not_fit(family: str, untrained: Any) -> None:
    """All labels keep the same demonstrations, as many as fit; the rest is the prompt with these alone."""
    model, dev, pool = untrained(family), examples(3), examples(9, 50)
    task, template = LabelledTask("classify", dev, pool, {}), parse_template(TEMPLATE, "classify")
    scorer = PromptScorer(make_scorer(model))
    (run,) = make_runs(task, template, pool, 6, 0, False)
    (scores,) = scorer.score_runs([run], task)
    assert scorer.num_shortened == 6  # and the content-free inputs
    kept = next(
        n
        for n in range(5, -1, -1)
        if max(
            len(model.tokenizer.encode("".join(run.demonstrations[6 - n :]) + f"{dev[0].texts[0]}: {word}"))
            for word in task.words
        )
        <= scorer.scorer.max_text_tokens
    )
    assert 0 < kept < 6
    alone = PromptScorer(make_scorer(model))
    (expected,) = alone.score_runs([run._replace(demonstrations=run.demonstrations[6 - kept :])], task)
    np.testing.assert_allclose(scores.logp[0], expected.logp[0], atol=1e-4)
    assert "prompts do not fit into 24 tokens and lost their first demonstrations" in scorer.describe_dropped(6)[0]


# --- calibration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_calibration_divides_by_the_content_free_probability(family: str, untrained: Any) -> None:
    """Zhao et al. 2021, with likelihoods of whole texts: q = p / p_cf, p_cf the normalised mean of three inputs."""
    model, dev = untrained(family), examples(9)
    method = "left-to-right" if family == "gpt2" else "continuation"
    outcome = evaluate_in_context(model, "classify", dev, template=[TEMPLATE], method=method)
    labels, scorer = outcome.details["labels"], make_scorer(model, method)

    def label_probabilities(text: str) -> np.ndarray:
        splits = [scorer.split_at_span(f"{text}: {word}", len(text) + 1, len(f"{text}: {word}"), "") for word in labels]
        return np.exp([float(one.logprobs.sum()) for ((_, one),) in scorer.score_spans(splits, jointly=True)])

    p_cf = np.mean([label_probabilities(text) for text in CONTENT_FREE_INPUTS], 0)
    p_cf /= p_cf.sum()
    right = [labels[(label_probabilities(e.texts[0]) / p_cf).argmax()] == e.target for e in dev]
    assert outcome.metrics["accuracy_calibrated"] == pytest.approx(np.mean(right))


def test_calibration_of_a_content_free_query_is_uniform() -> None:
    logp = np.log([0.2, 0.01, 0.4])
    assert np.ptp(calibrate(logp, logp[None])) == pytest.approx(0)
    assert np.isfinite(calibrate(logp - 5000, logp[None] - 5000 * np.array([[1.0, 2.0, 1.0]]))).all()


# --- results ----------------------------------------------------------------------------------------------------------


def test_at_chance_and_above() -> None:
    rng = np.random.default_rng(0)
    baseline = np.repeat([1.0, 0.0], 100)
    assert compare_with_chance("accuracy", rng.random((6, 200)) < 0.5, "majority_accuracy", baseline)[0]
    at_chance, sentence = compare_with_chance("accuracy", rng.random((6, 200)) < 0.9, "majority_accuracy", baseline)
    assert not at_chance
    assert sentence.startswith("Above chance, accuracy: ")
    assert "above the most frequent label, 50.0%" in sentence
    few = np.array([[True, True]])
    assert compare_with_chance("accuracy", few[:, :1], "majority_accuracy", np.zeros(1))[0], (
        "one example proves nothing"
    )


def test_means_over_seeds_and_templates(untrained: Any) -> None:
    outcome = evaluate_in_context(
        untrained("gpt2"), "classify", examples(8), 1, ["category", "about"], examples(9, 50), 2, random_labels=True
    )
    runs = outcome.details["runs"]
    assert [(run["template"], run["seed"]) for run in runs[::2]] == [
        ("category", 0), ("category", 1), ("about", 0), ("about", 1)
    ]  # fmt: skip
    accuracies = [run["accuracy"] for run in runs if "accuracy" in run]
    controls = [run["accuracy_random_labels"] for run in runs if "accuracy_random_labels" in run]
    assert len(accuracies) == len(controls) == 4
    assert outcome.metrics["accuracy"] == pytest.approx(np.mean(accuracies))
    assert outcome.details["std"]["accuracy"] == pytest.approx(np.std(accuracies, ddof=1))
    assert outcome.metrics["accuracy_random_labels"] == pytest.approx(np.mean(controls))
    assert outcome.details["by_template"]["about"]["accuracy"] == pytest.approx(np.mean(accuracies[2:]))
    assert outcome.metrics["majority_accuracy"] == 3 / 8
    assert sum("chance, accuracy" in notice for notice in outcome.notices) == 2


def test_pairs_relations_and_verbalizers(untrained: Any) -> None:
    pairs = [Example(i, ("The cat slept.", f"It came {i}."), str(i % 2)) for i in range(4)]
    outcome = evaluate_in_context(untrained("bert"), "pair", pairs, verbalizer={"0": "river", "1": "garden"})
    assert outcome.details["templates"] == [*BUILT_IN_TEMPLATES["pair"]]
    assert outcome.details["verbalizer"] == {"0": "river", "1": "garden"}
    assert {p.prediction for p in outcome.predictions} <= {"0", "1"}
    decoder = evaluate_in_context(untrained("gpt2"), "pair", pairs)
    assert "cloze" not in decoder.details["templates"], "a decoder does not read what comes after the label"
    with pytest.raises(UserError, match=r"no field may come after {label}"):
        evaluate_in_context(untrained("gpt2"), "pair", pairs, template=["cloze"])
    with pytest.raises(UserError, match="'same' stands for two labels"):
        evaluate_in_context(untrained("gpt2"), "pair", pairs, verbalizer={"0": "same", "1": "same"})
    with pytest.raises(UserError, match=r"the label 'nay', and the files have no, yes\. "):
        LabelledTask("pair", [Example(0, ("a", "b"), "yes")], [Example(1, ("a", "b"), "no")], {"nay": "wrong"})
    named = {"no": "wrong", "yes": "right", "maybe": "unsure"}  # a label that no example has
    assert LabelledTask("pair", [Example(0, ("a", "b"), "yes")], [], named).labels == ("maybe", "no", "yes")
    related = [
        Example(1, ("Anna met Ravi.",), "friend", spans=((0, 4), (9, 13))),
        Example(2, ("Bo.",), "none", ((0, 2),) * 2),
    ]
    assert len(evaluate_in_context(untrained("t5"), "relation", related).predictions) == 2


def test_a_file_without_labels_gives_predictions(untrained: Any) -> None:
    dev = [example._replace(target=None) for example in examples(3)]
    outcome = evaluate_in_context(untrained("gpt2"), "classify", dev, train=examples(6, 50))
    assert outcome.metrics == {}
    assert all(prediction.prediction for prediction in outcome.predictions)
    with pytest.raises(UserError, match="The files have 0 labels"):
        evaluate_in_context(untrained("gpt2"), "classify", dev)


def write_rows(path: Path, rows: list[Example]) -> Path:
    path.write_text("".join(json.dumps({"text": e.texts[0], "label": e.target}) + "\n" for e in rows))
    return path


def test_evaluate_scores_labels_in_context(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dev, train = write_rows(tmp_path / "dev.jsonl", examples(5)), write_rows(tmp_path / "train.jsonl", examples(9, 50))
    settings = {"data": dev, "train": train, "output_dir": tmp_path / "out", "seeds": 2, "template": [TEMPLATE]}
    result = api.evaluate(saved("gpt2"), "classify", shots=1, random_labels=True, **settings)
    assert {"accuracy", "accuracy_norm", "accuracy_calibrated", "accuracy_random_labels"} < result["metrics"].keys()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Over all seeds and templates." in page
    assert "chance, accuracy: " in capsys.readouterr().err
    beside = api.evaluate(saved("gpt2"), "classify", data=dev, shots=0)
    assert Path(beside["report"]).parent.name == "evaluate-classify-dev.jsonl-0-shot"
    with pytest.raises(UserError, match=r"or score labels in a prompt \(--shots 0\)"):
        api.evaluate(saved("gpt2"), "classify", data=dev)
    with pytest.raises(UserError, match="shots are for the tasks classify, pair, relation, choice"):
        api.evaluate(saved("gpt2"), "tag", data=dev, shots=0)
    with pytest.raises(UserError, match="stride is not a setting of the task classify"):
        api.evaluate(saved("gpt2"), "classify", data=dev, shots=0, stride=4)


def test_a_tie_is_wrong(saved: Any, tmp_path: Path) -> None:
    """Two labels that the tokenizer does not know are the same to the model."""
    dev = write_rows(tmp_path / "dev.jsonl", [Example(i, (f"The cat {i}",), "☃★"[i % 2]) for i in range(4)])
    result = api.evaluate(saved("bert"), "classify", data=dev, shots=0, template=TEMPLATE, output_dir=tmp_path / "out")
    assert result["metrics"]["accuracy"] == 0
    assert result["at_chance"]["accuracy"]
    lines = Path(result["predictions"]).read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == [None] * 4


# --- induction --------------------------------------------------------------------------------------------------------


def test_induction_compares_the_copies(untrained: Any) -> None:
    """By torch alone: the losses of both halves of a repeated row."""
    model, rng = untrained("gpt2"), np.random.default_rng(1)
    scorer = make_scorer(model)
    rows = rng.choice(scorer.vocab.non_special_ids, (5, 8)).tolist()
    losses = copy_losses(scorer, rows, rows)
    twice = torch.tensor([[*scorer.template.prefix_ids, *row, *row] for row in rows])
    with torch.no_grad():
        logits = model(twice).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), twice[:, 1:].flatten(), reduction="none").view(5, 16)
    np.testing.assert_allclose(losses.unrepeated, expected[:, :8], atol=1e-4)
    np.testing.assert_allclose(losses.repeated, expected[:, 8:], atol=1e-4)
    assert (losses.is_copied == (logits[:, 8:-1].argmax(2) == twice[:, 9:]).numpy()).all()


@pytest.mark.parametrize("family", ALL)
def test_a_model_without_training_has_no_induction(family: str, untrained: Any) -> None:
    texts, outcome = evaluate_induction(untrained(family))
    assert outcome.metrics["induction_gain"] == pytest.approx(
        outcome.metrics["unrepeated_loss"] - outcome.metrics["repeated_loss"]
    )
    assert len(texts) == len(outcome.predictions)
    assert np.mean([p.prediction for p in outcome.predictions]) == pytest.approx(outcome.metrics["induction_gain"])
    assert outcome.metrics["copy_accuracy"] < 0.2
    assert len(outcome.details["repeated_loss_by_position"]) == outcome.details["copy_tokens"]


def test_a_token_is_found_again_by_a_model_that_copies(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that gives probability 1 to what followed the same token before, and 1/V to all else."""
    scorer = make_scorer(untrained("gpt2"))
    size = len(scorer.vocab.non_special_ids)

    def oracle(model: Any, queries: Any, batch_tokens: int) -> Any:
        for query in queries:
            ids, logp, best = query.input_ids, [], []
            for position, label in zip(query.target_positions, query.labels, strict=True):
                earlier = [i for i in range(position) if ids[i] == ids[position]]
                best.append(ids[earlier[-1] + 1] if earlier else -1)
                logp.append(0.0 if best[-1] == label else -np.log(size))
            yield query, type(score_query_batch(model, [query])[0])(np.array(logp), np.array(best))

    monkeypatch.setattr("firth.evaluate.likelihood.compute_logprobs", oracle)
    _, outcome = evaluate_induction(untrained("gpt2"))
    assert outcome.metrics["copy_accuracy"] > 0.9
    assert outcome.metrics["induction_gain"] > 0.9 * np.log(size)
    assert outcome.notices[0].startswith("Induction: ")


@pytest.mark.parametrize(("gain", "found"), [(0.005, False), (0.05, True)])
def test_a_gain_that_is_sure_and_tiny_is_no_induction(
    gain: float, found: bool, untrained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = CopyLosses(np.full((4, 5), 3.0), np.full((4, 5), 3.0 - gain), np.zeros((4, 5), dtype=bool))
    monkeypatch.setattr("firth.evaluate.induction.copy_losses", lambda *_: losses)
    _, outcome = evaluate_induction(untrained("gpt2"))
    assert outcome.notices[0].startswith("Induction: " if found else "No induction: ")


def test_evaluate_induction_needs_no_data(saved: Any, tmp_path: Path) -> None:
    result = api.evaluate(saved("gpt2"), "induction", output_dir=tmp_path / "out")
    assert result["metrics"].keys() == {"induction_gain", "repeated_loss", "unrepeated_loss", "copy_accuracy"}
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(UserError, match="The task induction makes its own data"):
        api.evaluate(saved("gpt2"), "induction", data="x.txt")
    with pytest.raises(UserError, match="give a larger --max-seq-length"):
        api.evaluate(saved("gpt2"), "induction", max_seq_length=6)


@pytest.mark.slow
def test_a_decoder_that_learned_to_copy_has_induction(untrained: Any) -> None:
    """Trained on repeated random rows: the second copy costs little, and other rows get no gain."""
    model = copy.deepcopy(untrained("gpt2")).train()
    ids, rng = model.tokenizer.vocab.non_special_ids, np.random.default_rng(2)
    bos = make_scorer(model).template.prefix_ids
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(1500):
        half = rng.choice(ids[:40], (32, 11))
        rows = torch.tensor(np.concatenate([np.full((32, 1), bos[0]), half, half], 1))
        loss = F.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scorer = make_scorer(model.eval())
    rows = np.random.default_rng(3).choice(ids[:40], (32, 11)).tolist()
    losses = copy_losses(scorer, rows, rows)
    assert losses.repeated[:, 1:].mean() < 0.5 * losses.unrepeated[:, 1:].mean()
    assert losses.is_copied[:, 1:].mean() > 0.5
