"""lm-eval runs our checkpoints: equal to its own model `hf`, and encoders too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install 'firth[lm-eval]')")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import Registry  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from firth.core.errors import UserError  # noqa: E402
from firth.evaluate.cloze import evaluate_choice  # noqa: E402
from firth.evaluate.likelihood import text_likelihoods  # noqa: E402
from firth.generate import generate_ids  # noqa: E402
from firth.lm_eval import FirthLM, register  # noqa: E402
from firth.models import ModelConfig, make_model  # noqa: E402
from firth.models.config import LearnedPosition  # noqa: E402
from firth.models.presets import bert, gpt2, t5  # noqa: E402
from firth.text import read_labelled  # noqa: E402
from firth.tokens import train_tokenizer  # noqa: E402

LENGTH = 48
CONFIGS: dict[str, tuple[str, Any]] = {
    "gpt2": ("byte-bpe", lambda size: gpt2(2, 32, 2, size, position=LearnedPosition(LENGTH))),
    "bert": ("wordpiece", lambda size: bert(2, 32, 2, size, position=LearnedPosition(LENGTH))),
    "t5": ("unigram", lambda size: t5(2, 32, 2, 48, size)),
}
PAIRS = [
    ("The cat slept by the", " river"),
    ("The cat slept by the", " harbour"),
    ("The cat slept by the ", "old mill."),
    ("", "The dog followed Anna"),
    ("Nobody knew why. " * 20, "The heron came back to the garden."),
    ("Question: Where is it?\n\nAnswer:", " near the bridge"),
]


def write_checkpoint(family: str, folder: Path, texts: list[str]) -> Path:
    kind, make_config = CONFIGS[family]
    tokenizer = train_tokenizer(texts, kind, 300)
    config: ModelConfig = make_config(tokenizer.vocab.size)
    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model.tokenizer = tokenizer
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    home = tmp_path_factory.mktemp("models")
    return {family: write_checkpoint(family, home / family, texts) for family in CONFIGS}


def ask(model: Any, kind: str, arguments: list[tuple]) -> Any:
    return getattr(model, kind)([Instance(kind, {}, one, 0) for one in arguments])  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_it_equals_hf(family: str, checkpoints: dict[str, Path]) -> None:
    from lm_eval.models.huggingface import HFLM

    backend = "causal" if family == "gpt2" else "seq2seq"
    ours = FirthLM(str(checkpoints[family]))
    theirs = HFLM(
        str(checkpoints[family]),
        backend=backend,
        device="cpu",
        dtype="float32",
        batch_size=2,
        max_length=ours.max_length,
    )
    for (logp, greedy), (their_logp, their_greedy) in zip(
        ask(ours, "loglikelihood", PAIRS), ask(theirs, "loglikelihood", PAIRS), strict=True
    ):
        assert logp == pytest.approx(their_logp, abs=1e-4)
        assert greedy == their_greedy
    texts = [("The cat slept.",), ("Nobody knew why the fox came back to the old mill. " * 12,), ("x",)]
    rolling = ask(theirs, "loglikelihood_rolling", texts)
    assert ask(ours, "loglikelihood_rolling", texts) == pytest.approx(rolling, abs=1e-4, rel=1e-6)
    options = [{"until": ["\n", " the"], "max_gen_toks": 12}, {"until": ["."], "max_gen_toks": 20, "do_sample": False}]
    prompts = [("The cat slept by", options[0]), ("Anna said", options[1]), ("Anna said that " * 20, options[0])]
    for text, their_text in zip(
        ask(ours, "generate_until", prompts), ask(theirs, "generate_until", prompts), strict=True
    ):
        if family == "gpt2":
            assert text == their_text
        else:  # `hf` counts the prompt's tokens into the length of a decoder that does not read them
            assert their_text.startswith(text)


def test_a_greedy_continuation_is_told(checkpoints: dict[str, Path]) -> None:
    model = FirthLM(str(checkpoints["gpt2"]))
    ids = model.tok_encode("The cat slept by the")
    (best,) = generate_ids(model.model, [ids], 3)
    found = model._loglikelihood_tokens([(None, ids, best), (None, ids, [*best[:-1], best[-1] ^ 1])])
    assert [greedy for _, greedy in found] == [True, False]


def test_an_encoder_gives_pseudo_likelihoods(checkpoints: dict[str, Path]) -> None:
    """The continuation's tokens, masked one after the other, by torch alone."""
    model = FirthLM(str(checkpoints["bert"]), method="pseudo")
    vocab, context, continuation = model.vocab, "The cat slept", " by the river."
    ((logp, _),) = ask(model, "loglikelihood", [(context, continuation)])
    before, after = (model.text_tokenizer.encode(text) for text in (context, continuation))
    row = torch.tensor([vocab.cls, *before, *after, vocab.sep])
    first, expected = 1 + len(before), 0.0
    for i in range(first, first + len(after)):
        masked = row.clone()
        masked[i] = vocab.mask
        with torch.no_grad():
            expected += float(model.model(masked[None]).logits[0, i].log_softmax(0)[row[i]])
    assert logp == pytest.approx(expected, abs=1e-4)
    (whole,) = ask(model, "loglikelihood_rolling", [(context + continuation,)])
    assert whole == pytest.approx(text_likelihoods(model.model, [context + continuation], method="pseudo")[0].logp)
    ((empty, _),) = ask(model, "loglikelihood", [("", context + continuation)])
    assert empty == pytest.approx(whole, abs=1e-4)
    with pytest.raises(UserError, match="An encoder cannot generate text"):
        ask(model, "generate_until", [(context, {})])


def test_options(checkpoints: dict[str, Path]) -> None:
    folder = str(checkpoints["gpt2"])
    model = FirthLM(folder, max_length=16, add_bos_token=True)
    assert model.max_length == 16
    assert model.tok_encode("The cat")[0] == model.prefix_token_id
    assert model.tok_encode("The cat", add_special_tokens=False)[0] != model.prefix_token_id
    with pytest.raises(UserError, match="max_gen_toks is 256, and the model has 16 positions"):
        ask(model, "generate_until", [("The cat", {})])
    with pytest.raises(UserError, match="The option penalty_alpha of generate_until"):
        ask(model, "generate_until", [("The cat", {"max_gen_toks": 2, "penalty_alpha": 0.6})])
    config = model.generation_config({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "until": "x"})
    assert (config.temperature, config.top_p, config.stop) == (0.7, 0.9, ("x",))
    assert model.generation_config({"do_sample": False, "temperature": 0.7, "top_p": 0.9}).temperature == 0
    assert FirthLM(str(checkpoints["t5"]), method="span").scorer.method == "span"


def test_the_entry_point_is_a_model() -> None:
    """As lm-eval reads it: a placeholder in its registry that is loaded when it is asked for."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    registry: Registry[Any] = Registry("model")
    registry.register(name, target=EntryPoint(name, value, "lm_eval.models"))
    assert registry.get("firth") is FirthLM


def write_task(folder: Path) -> None:
    """A multiple-choice task of one's own, without a download."""
    lines = [
        {"context": f"The {animal} slept by the", "choices": ["river", "old mill", "garden"], "gold": i % 3}
        for i, animal in enumerate(["cat", "dog", "fox", "heron", "goat"])
    ]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "sleeping.yaml").write_text(
        "task: sleeping\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{context}}"\ndoc_to_target: gold\ndoc_to_choice: choices\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )


def check_samples(checkpoint: Path, folder: Path, scores: dict[str, float], samples: list[dict[str, Any]]) -> None:
    """lm-eval's numbers are those of `firth evaluate --task choice`."""
    ours = evaluate_choice(checkpoint, read_labelled(folder / "data.jsonl", "choice"))
    assert scores["acc,none"] == pytest.approx(ours.metrics["accuracy"])
    assert scores["acc_norm,none"] == pytest.approx(ours.metrics["accuracy_norm"])
    for sample, prediction in zip(samples, ours.predictions, strict=True):
        logps = [float(answer[0][0]) for answer in sample["resps"]]
        assert logps == pytest.approx([*(prediction.scores or {}).values()], abs=1e-4)


def test_a_task_of_ones_own(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A YAML file and local data: no download."""
    write_task(tmp_path)
    register()
    found = lm_eval.simple_evaluate(
        model="firth",
        model_args=f"pretrained={checkpoints['bert']}",
        tasks=["sleeping"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    check_samples(checkpoints["bert"], tmp_path, found["results"]["sleeping"], found["samples"]["sleeping"])


@pytest.mark.slow  # lm-eval reads all its task files first
def test_the_command_line(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    write_task(tmp_path)
    words = ["--model", "firth", "--model_args", f"pretrained={checkpoints['bert']}", "--tasks", "sleeping"]
    words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "firth.lm_eval", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (results,), (samples,) = ([*(tmp_path / "out").rglob(name)] for name in ("results_*.json", "samples_*.jsonl"))
    scores = json.loads(results.read_text())["results"]["sleeping"]
    check_samples(checkpoints["bert"], tmp_path, scores, list(map(json.loads, samples.read_text().splitlines())))
