"""ONNX: onnxruntime computes the same outputs for other shapes than those of tracing, and the same scores."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import normalizers

from firth import api
from firth.core.errors import UserError
from firth.evaluate.onnx_check import MAX_ONNX_DIFFERENCE, OnnxModel, Session, compare_with_onnxruntime
from firth.evaluate.onnx_export import OPSET, export_graph, quantize_file, sum_bytes, write_onnx
from firth.evaluate.onnx_graph import Graph, make_graphs
from firth.evaluate.token_check import SCRIPT_TEXTS
from firth.models import Model, ModelConfig, make_model
from firth.models import presets as p
from firth.models.config import ALiBi, BiLSTMConfig, GeneratorConfig, SlidingWindow
from firth.models.task_heads import head_for_task
from firth.objectives import Batch
from firth.tokens import Tokenizer, train_tokenizer

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

V = 64


def random_model(config: ModelConfig) -> Model:
    """Large weights: a wrong mask or position then changes the logits by more than rounding."""
    torch.manual_seed(0)
    model = make_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def with_head(config: ModelConfig, task: str) -> ModelConfig:
    return replace(config, head=head_for_task(config, task, ("a", "b", "c")))


def exported(model: Model, folder: Path) -> list[Graph]:
    folder.mkdir()
    graphs = make_graphs(model)
    for graph in graphs:
        export_graph(graph, folder / graph.file)
    return graphs


@pytest.mark.slow
def test_a_classifier_is_exported_quantized_and_scored(
    saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"{word} {i}", "label": label} for i in range(6) for word, label in (("the", "a"), ("old", "b"))]
    data = tmp_path / "dev.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    api.finetune(saved("bert"), "classify", data, data, tmp_path / "run", max_steps=3, seeds=1, max_seq_length=16)
    final = tmp_path / "run" / "final"
    made = api.export(final, tmp_path / "onnx", check=True, format="onnx", quantize="int8", data=data)
    assert made["max_difference"] < made["tolerance"] == MAX_ONNX_DIFFERENCE
    assert made["compared_with"].startswith("onnxruntime")
    assert (made["opset"], made["outputs"]) == (OPSET, ["logits"])
    assert made["inputs"]["input_ids"] == ["batch", "sequence"]
    assert 0 < made["int8_difference"] < 1
    assert made["bytes"]["model_quantized.onnx"] < 0.7 * made["bytes"]["model.onnx"]
    graph = pytest.importorskip("onnx").load(tmp_path / "onnx" / "model_quantized.onnx").graph
    floats = [tuple(weight.dims) for weight in graph.initializer if weight.data_type == 1 and len(weight.dims) == 2]
    assert {(32, 96), (32, 128), (128, 32)}.isdisjoint(floats), "queries, keys and values, and both layers of an MLP"
    own = api.evaluate(final, data=data, output_dir=tmp_path / "scores")["metrics"]
    assert made["scores"]["float32"] == pytest.approx(own)
    assert made["scores"]["int8"].keys() == own.keys()
    names = {file.name for file in (tmp_path / "onnx").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "task.json", "model.onnx"} <= names
    with pytest.raises(UserError, match="--overwrite"):
        api.export(final, tmp_path / "onnx", format="onnx")
    with pytest.raises(UserError, match="is of kind onnx, not model"):
        api.export(final, tmp_path / "onnx", overwrite=True)  # ONNX is no Hugging Face folder


@pytest.mark.slow
def test_a_decoder_with_a_cache_and_left_padding(tmp_path: Path) -> None:
    model = random_model(p.llama(2, 16, 4, 32, V, num_kv_heads=2))
    graphs = exported(model, tmp_path / "onnx")
    assert graphs[0].outputs[:3] == ("logits", "present.0.key", "present.0.value")
    assert list(graphs[0].inputs)[3] == "past_key_values.0.key"
    assert compare_with_onnxruntime(model, graphs, tmp_path / "onnx") < 1e-5
    with torch.no_grad():
        model.stack.blocks[1].attention.out.weight[0, 0] += 0.1  # type: ignore[union-attr, operator, index]
    assert compare_with_onnxruntime(model, graphs, tmp_path / "onnx") > MAX_ONNX_DIFFERENCE, "the check can fail"


OTHERS = {
    "modernbert": lambda: p.modernbert(4, 16, 2, 32, V, window=SlidingWindow(8, 3)),
    "roberta": lambda: p.roberta(2, 16, 2, V),
    "albert": lambda: p.albert(2, 16, 2, 8, V),
    "deberta": lambda: p.deberta(2, 16, 2, V),
    "deberta-v2": lambda: p.deberta_v2(2, 16, 2, V),
    "xlnet": lambda: p.xlnet(2, 16, 2, V),
    "electra": lambda: p.bert(2, 16, 2, V, extras=(GeneratorConfig(width_ratio=0.5),)),
    "gpt2": lambda: p.gpt2(2, 16, 2, V),
    "gates": lambda: p.gpt2(4, 16, 2, V, attention_gate=True, value_residual=True, unet_skips=True, position=ALiBi()),
    "t5": lambda: p.t5(2, 16, 2, 32, V),
    "bart": lambda: p.bart(2, 16, 2, V),
    "llama-classify": lambda: with_head(p.llama(2, 16, 4, 32, V), "classify"),
    "t5-tag": lambda: with_head(p.t5(2, 16, 2, 32, V), "tag"),
    **{
        f"bert-{task}": lambda task=task: with_head(p.bert(2, 16, 2, V), task)  # type: ignore[misc]
        for task in ("regress", "choice", "tag", "span-qa", "embed")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_and_heads(name: str, tmp_path: Path) -> None:
    model = random_model(OTHERS[name]())
    graphs = exported(model, tmp_path / "onnx")
    assert compare_with_onnxruntime(model, graphs, tmp_path / "onnx") < 2e-5


@pytest.mark.parametrize(
    "task",
    ["classify", *(pytest.param(t, marks=pytest.mark.slow) for t in ("regress", "choice", "tag", "span-qa", "embed"))],
)
def test_packed_rows_get_the_logits_of_the_model(task: str, tmp_path: Path) -> None:
    model = random_model(with_head(p.bert(1, 16, 2, V), task))
    graphs = exported(model, tmp_path / "onnx")
    assert compare_with_onnxruntime(model, graphs, tmp_path / "onnx") < 1e-5
    batch = Batch(
        torch.randint(5, V, (2, 12)),
        document_ids=torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12]),
        position_ids=torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0], list(range(12))]),
        token_type_ids=torch.randint(2, (2, 12)),
        target_positions=torch.tensor([[0, 5], [0, 3 if task == "tag" else 0]]),
    )
    with torch.no_grad():
        ours = model.logits(batch)
    theirs = OnnxModel(model.config, Session(tmp_path / "onnx" / "model.onnx")).logits(batch)
    real = batch.document_ids >= 0 if task == "span-qa" else ...
    torch.testing.assert_close(theirs[real], ours[real], rtol=0, atol=1e-5)


def test_models_without_a_graph_are_refused_by_the_name_of_the_field() -> None:
    bert = p.bert(2, 16, 2, V)
    tags = with_head(bert, "tag")
    refused = {
        "model.recurrent": replace(p.bert(1, 16, 2, V), recurrent=BiLSTMConfig(8)),
        "model.head.crf": replace(tags, head=replace(tags.head, crf=True)),  # type: ignore[call-arg]
        "model.prompt_form prefix": replace(p.gpt2(1, 16, 2, V), prompt_form="prefix"),
        "num_marked": with_head(bert, "relation"),
        "model.num_bigram_buckets": replace(p.gpt2(1, 16, 2, V), num_bigram_buckets=50),
    }
    for name, config in refused.items():
        with pytest.raises(UserError, match=name):
            make_graphs(type("Any", (), {"config": config})())


def test_a_failure_of_the_tracer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cannot trace\nthis")

    monkeypatch.setattr(torch.export, "export", fail)
    (graph,) = make_graphs(random_model(p.bert(1, 16, 2, V)))
    with pytest.raises(
        UserError, match=r"^a\.onnx: torch\.onnx could not translate this model \(cannot trace this\)\.$"
    ):
        export_graph(graph, tmp_path / "a.onnx")


def test_options_that_a_format_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--quantize is for --format onnx"):
        api.export(tmp_path, tmp_path / "out", quantize="int8")
    with pytest.raises(UserError, match="'int4' is not one of int8"):
        api.export(tmp_path, tmp_path / "out", format="onnx", quantize="int4")


def test_weights_in_a_file_of_their_own_are_quantized_into_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A protobuf ends at 2 GiB. With the limit at 10 kB a small matrix is as large a model."""
    onnx, numpy_helper, helper = (pytest.importorskip(f"onnx{part}") for part in ("", ".numpy_helper", ".helper"))
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    assert path.stat().st_size < 1_000 < sum_bytes(path)
    monkeypatch.setattr("firth.evaluate.onnx_export.MAX_SINGLE_FILE_BYTES", 10_000)
    quantize_file(path)
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {f"{name}.onnx{end}" for name in ("model", "model_quantized") for end in ("", ".data")}
    assert (tmp_path / "model_quantized.onnx").stat().st_size < 64 * 64, "no weights inside"
    x = torch.randn(3, 64)
    y = Session(tmp_path / "model_quantized.onnx")({"x": x})["y"]
    assert torch.allclose(y, x @ torch.from_numpy(weight), atol=0.5)


def test_data_need_the_head_of_a_task(saved: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data scores the head of a task"):
        write_onnx(saved("gpt2"), tmp_path / "out", data=tmp_path / "dev.jsonl")


BROWSER_PAGE = Path(__file__).parents[2] / "docs" / "browser.html"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def run_node(script: str, folder: Path) -> str:
    (folder / "script.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "script.mjs"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_node
@pytest.mark.parametrize(("lowercase", "strip_accents"), [(False, False), (True, False), (True, None), (False, True)])
def test_the_page_for_browsers_makes_the_same_token_ids(
    lowercase: bool, strip_accents: bool | None, corpus_file: Path, tmp_path: Path
) -> None:
    """Published lowercase BERTs have `strip_accents` null: they strip accents, as `lowercase` says."""
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    tokenizer = train_tokenizer([*texts, "Café NAÏVE Ångström ΣΊΣΥΦΟΣ"] * 2, "wordpiece", 500, lowercase=lowercase)
    tokenizer.backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.save(tmp_path)
    page = BROWSER_PAGE.read_text(encoding="utf-8")
    code = page[page.index("  const vocab =") : page.index("  const session =")]
    assert len(page.splitlines()) <= 40
    asked = [texts[0], *texts[1].splitlines(), "Who's (not) here? 图书馆 x-ray: 3.14 €5 [a]^b`c|d~", "a" * 101, ""]
    asked += ["constructor valueOf __proto__", "a" * 100]  # names that every object of JavaScript has; the longest word
    asked += [
        "Café NAÏVE Ångström ΣΊΣΥΦΟΣ, Örtlich İstanbul",
        "zero\u200bwidth\ufeff \u00a0 \x00bell\x07\ufffd \ue000",
        *SCRIPT_TEXTS,
    ]
    written = run_node(
        f"""import {{ readFileSync }} from "fs";
const tokenizer = JSON.parse(readFileSync("tokenizer.json"));
const config = {{ max_position_embeddings: 512 }};
{code}
console.log(JSON.stringify({json.dumps(asked)}.map(encode)));""",
        tmp_path,
    )
    cls, sep = tokenizer.vocab.cls, tokenizer.vocab.sep
    for text, ids in zip(asked, json.loads(written), strict=True):
        assert ids == [cls, *tokenizer.encode(text), sep], text


@pytest.mark.slow
@needs_node
def test_the_page_for_browsers_gives_the_answer_of_python(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """Its code runs in node with onnxruntime-web; only the page's elements and `fetch` are stand-ins."""
    command = ["npm", "install", "onnxruntime-web@1", "--no-audit", "--no-fund", "--prefix", str(tmp_path)]
    if shutil.which("npm") is None or subprocess.run(command, capture_output=True, timeout=300).returncode:
        pytest.skip("needs the npm package onnxruntime-web")
    page, tokenizer, text = BROWSER_PAGE.read_text(encoding="utf-8"), tokenizers["wordpiece"], "The old ship came home."
    code = page[page.index("  const folder =") : page.rindex("</script>")]
    size = tokenizer.vocab.size
    for config in (p.bert(2, 32, 2, size), p.distilbert(2, 32, 2, size)):
        model = random_model(with_head(config, "classify"))
        model.tokenizer = tokenizer
        folder = tmp_path / config.family
        model.save(folder / "saved")
        made = write_onnx(folder / "saved", folder / "web", quantize="int8")
        assert ("token_type_ids" in made["inputs"]) == (config.family == "bert")
        printed = run_node(
            f"""import {{ readFileSync }} from "fs";
import * as ort from "onnxruntime-web";
globalThis.fetch = async (path) => ({{ json: async () => JSON.parse(readFileSync(path)) }});
const elements = {{ text: {{ value: {json.dumps(text)} }}, run: {{}}, answer: {{}} }};
globalThis.document = {{ getElementById: (name) => elements[name] }};
{code}
await elements.run.onclick();
console.log(elements.answer.textContent);""",
            folder,
        )
        ids = torch.tensor([[tokenizer.vocab.cls or 0, *tokenizer.encode(text), tokenizer.vocab.sep or 0]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        inputs = {name: value for name, value in inputs.items() if name in made["inputs"]}
        logits = Session(folder / "web" / "model_quantized.onnx")(inputs)["logits"][0]
        answers = [line.split() for line in printed.splitlines()]
        assert [label for _, label in answers] == ["a", "b", "c"]
        shares = [float(share.rstrip("%")) for share, _ in answers]
        assert shares == pytest.approx((100 * logits.softmax(-1)).tolist(), abs=0.2)
        assert max(shares) - min(shares) > 1, "the answer depends on the model"
