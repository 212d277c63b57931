"""GGUF: other programs read the same weights, logits and token ids; what llama.cpp lacks is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth import api
from firth.core.errors import UserError
from firth.evaluate.embed import embed_texts
from firth.evaluate.gguf_check import TOLERANCES
from firth.evaluate.gguf_export import make_modelfile, write_gguf_folder
from firth.evaluate.gguf_layout import find_architecture
from firth.evaluate.gguf_tokenizer import make_gguf_tokenizer
from firth.evaluate.gguf_writer import quantize_q8_0
from firth.evaluate.token_check import ODD_TEXTS, SCRIPT_TEXTS
from firth.models import Model, ModelConfig, get_preset, make_model, make_sequence_template
from firth.models import presets as p
from firth.models.config import EmbeddingHead, LearnedPosition, LMHead, RopeScaling, Rotary, SlidingWindow, T5Bias
from firth.models.task_heads import head_for_task
from firth.tasks.chat import ChatTemplate, add_chat_template
from firth.tasks.prompts import encode_task_prompts
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.extend import extend_tokenizer, propose_tokens

gguf = pytest.importorskip("gguf")

FAMILIES: dict[str, tuple[str, Callable[[int], ModelConfig]]] = {
    "llama": ("byte-bpe", lambda v: p.llama(2, 64, 4, 96, v, num_kv_heads=2, position=Rotary(length=128))),
    "llama3": (
        "llama3",
        lambda v: p.llama(
            2, 64, 4, 96, v + 3, head=LMHead(), position=Rotary(500000.0, 256, RopeScaling(8.0, 1.0, 4.0, 32))
        ),
    ),
    "gpt2": ("byte-bpe", lambda v: p.gpt2(2, 64, 4, v, position=LearnedPosition(64))),
    "bert": ("wordpiece", lambda v: p.bert(2, 64, 4, v, position=LearnedPosition(64))),
    "roberta": ("byte-bpe", lambda v: p.roberta(2, 64, 4, v, position=LearnedPosition(66, 2))),
    "modern-bert": ("byte-bpe", lambda v: p.modernbert(4, 64, 4, 96, v, window=SlidingWindow(8, 3))),
    "t5": ("unigram", lambda v: p.t5(2, 64, 4, 96, v)),
    "t5-gated": ("unigram", lambda v: p.t5_v1_1(2, 64, 4, 96, v)),
}


@pytest.fixture(scope="module")
def own_tokenizers(tokenizers: dict[str, Tokenizer], corpus_file: Path) -> dict[str, Tokenizer]:
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    return {**tokenizers, "llama3": train_tokenizer(texts, "byte-bpe", 400, pattern="llama3")}


def saved_model(family: str, own_tokenizers: dict[str, Tokenizer], folder: Path) -> Model:
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = make_model(config(own_tokenizers[kind].vocab.size)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.tokenizer = own_tokenizers[kind]
    model.save(folder)
    return model


def read_entries(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transformers_reads_the_same_logits_and_ids(
    family: str, own_tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = saved_model(family, own_tokenizers, tmp_path / "saved")
    made = api.export(tmp_path / "saved", tmp_path / "gguf", format="gguf", dtype="f32")
    assert (made["file"], made["architecture"]) == ("model-f32.gguf", family)
    own = {"pretrained_model_name_or_path": tmp_path / "gguf", "gguf_file": "model-f32.gguf"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**own, dtype=torch.float32).eval()
    ids = torch.randint(5, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=0, atol=2e-5)
    assert model.tokenizer is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(**own)
    for text in (*SCRIPT_TEXTS, *ODD_TEXTS[2:4]):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == model.tokenizer.encode(text), text
    modelfile = (tmp_path / "gguf" / "Modelfile").read_text()
    assert modelfile.startswith('FROM ./model-f32.gguf\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop "<|endoftext|>"\n')


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_the_reference_reader_reads_what_was_written(
    dtype: str, own_tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    model = saved_model("bert", own_tokenizers, tmp_path / "saved")
    made = write_gguf_folder(tmp_path / "saved", tmp_path / "gguf", dtype)
    entries, tensors = read_entries(tmp_path / "gguf" / made["file"])
    assert entries["general.architecture"] == "bert"
    assert entries["bert.attention.head_count"] == 4
    assert entries["bert.attention.causal"] is False
    assert entries["tokenizer.ggml.model"] == "bert"
    assert entries["tokenizer.ggml.normalizer.lowercase"] is False
    tokens = entries["tokenizer.ggml.tokens"]
    assert model.tokenizer is not None
    assert tokens[model.tokenizer.vocab.cls] == "[CLS]"
    first, *rest = (tokens[i] for i in model.tokenizer.encode("unpronounceableword"))
    assert first + "".join(rest) == "▁unpronounceableword"
    assert rest
    ours = model.stack.blocks[1].attention.out.weight.detach().numpy()  # type: ignore[union-attr, index]
    limit = np.abs(ours).max() * {"f16": 1e-3, "q8_0": 1 / 250}[dtype]
    assert np.abs(tensors["blk.1.attn_output.weight"] - ours).max() < limit
    norm = model.stack.blocks[1].mlp_norm.weight.detach().numpy()  # type: ignore[union-attr, index]
    np.testing.assert_array_equal(tensors["blk.1.layer_output_norm.weight"], norm)


def known_names(architecture: str, num_layers: int) -> set[str]:
    """The tensors that gguf's table lists for an architecture of llama.cpp."""
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = [gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]]
    return {name.format(bid=i) + ".weight" for name in names for i in range(num_layers)}


def test_modernbert_has_the_tensors_and_settings_of_llama_cpp(
    own_tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    model = saved_model("modern-bert", own_tokenizers, tmp_path / "saved")
    made = write_gguf_folder(tmp_path / "saved", tmp_path / "gguf", "f32")
    entries, tensors = read_entries(tmp_path / "gguf" / made["file"])
    assert entries["general.architecture"] == "modern-bert"
    assert entries["modern-bert.attention.sliding_window"] == 8
    assert entries["modern-bert.attention.sliding_window_pattern"] == [False, True, True, False]
    assert (entries["modern-bert.rope.freq_base"], entries["modern-bert.rope.freq_base_swa"]) == (160000.0, 10000.0)
    assert entries["modern-bert.attention.causal"] is False
    unknown = set(tensors) - known_names("modern-bert", 4)
    assert unknown == set()
    parts = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
    expected = {f"blk.{i}.{part}.weight" for i in range(4) for part in parts} - {"blk.0.attn_norm.weight"}
    assert set(tensors) == expected | {f"{name}.weight" for name in ("token_embd", "token_embd_norm", "output_norm")}
    block = model.stack.blocks[3]  # type: ignore[union-attr, index]
    for name, weight in (("attn_qkv", block.attention.qkv.weight), ("ffn_up", block.mlp.up.weight)):
        np.testing.assert_array_equal(tensors[f"blk.3.{name}.weight"], weight.detach().numpy())


@pytest.mark.parametrize("family", ["t5", "t5-gated"])
def test_t5_has_the_tensors_and_settings_of_llama_cpp(
    family: str, own_tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    model = saved_model(family, own_tokenizers, tmp_path / "saved")
    made = write_gguf_folder(tmp_path / "saved", tmp_path / "gguf", "f32")
    assert not (tmp_path / "gguf" / "Modelfile").exists(), "Ollama has no encoder-decoders"
    entries, tensors = read_entries(tmp_path / "gguf" / made["file"])
    assert (entries["general.architecture"], entries["tokenizer.ggml.model"]) == ("t5", "t5")
    assert (entries["t5.block_count"], entries["t5.decoder_block_count"]) == (2, 2)
    assert entries["t5.attention.relative_buckets_count"] == 32
    assert set(tensors) - known_names("t5", 2) == set()
    parts = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_o", "ffn_norm", "ffn_up", "ffn_down"]
    parts += ["ffn_gate"] if family == "t5-gated" else []
    cross = [f"cross_attn_{part}" for part in ("norm", "q", "k", "v", "o")]
    expected = {f"{side}.blk.{i}.{part}.weight" for side in ("enc", "dec") for i in range(2) for part in parts}
    expected |= {f"dec.blk.{i}.{part}.weight" for i in range(2) for part in cross}
    expected |= {f"{side}.{name}.weight" for side in ("enc", "dec") for name in ("output_norm", "blk.0.attn_rel_b")}
    assert set(tensors) == expected | {"token_embd.weight", "output.weight"}
    if family == "t5":  # version 1.0 scales the logits of its shared embeddings, and llama.cpp does not
        np.testing.assert_allclose(tensors["output.weight"], tensors["token_embd.weight"] * 64**-0.5, rtol=1e-6)
    out = model.decoder.blocks[1].cross.out.weight.detach().numpy()  # type: ignore[union-attr, index]
    np.testing.assert_array_equal(tensors["dec.blk.1.cross_attn_o.weight"], out)


def test_the_chat_template_of_the_modelfile(own_tokenizers: dict[str, Tokenizer]) -> None:
    """Firth's own template in Ollama's language; any other is read from the GGUF file by Ollama."""
    config = p.llama(1, 32, 2, 48, own_tokenizers["byte-bpe"].vocab.size + 3, position=Rotary(length=128))
    model, tokenizer = make_model(config), add_chat_template(own_tokenizers["byte-bpe"], config, ())
    message = '<|{{ .Role }}|> {{ .Content }}{{ if eq .Role "assistant" }}<|endoftext|>{{ end }}'
    assert make_modelfile(model, tokenizer, "f16", {}).splitlines() == [
        "FROM ./model-f16.gguf",
        'TEMPLATE """{{ range .Messages }}' + message + '{{ end }}<|assistant|>"""',
        'PARAMETER stop "<|endoftext|>"',
        "PARAMETER num_ctx 128",
    ]
    rendered = ChatTemplate(tokenizer).render([("user", "Hi"), ("assistant", "Yo"), ("user", "?")], True)
    assert rendered.endswith("<|user|> Hi<|assistant|> Yo<|endoftext|><|user|> ?<|assistant|>"), "the same by hand"
    other = Tokenizer(
        tokenizer.backend, tokenizer.special_tokens, tokenizer.config | {"chat_template": "{{ messages }}"}
    )
    assert "TEMPLATE" not in make_modelfile(model, other, "f16", {})


def test_the_prompt_of_a_task_in_the_modelfile(own_tokenizers: dict[str, Tokenizer]) -> None:
    """Ollama writes what `firth generate` reads: without the delimiter a model continues the source."""
    config = p.llama(1, 32, 2, 48, own_tokenizers["byte-bpe"].vocab.size + 3, position=Rotary(length=128))
    facts = {"task": "text-to-text", "prefix": "de: ", "max_seq_length": 32, "max_target_length": 8}
    model, tokenizer = make_model(config), own_tokenizers["byte-bpe"].with_special_tokens(("<delimiter>",))
    model.tokenizer = tokenizer
    template = 'TEMPLATE """{{ "de: " }}{{ .Prompt }}<delimiter>"""'
    assert template in make_modelfile(model, tokenizer, "f16", facts).splitlines()
    (ids,) = encode_task_prompts(model, facts, ["A cat"])
    bos = make_sequence_template(config, tokenizer.vocab).prefix_ids
    assert ids == [*bos, *tokenizer.encode("de: A cat<delimiter>", parse_special=True)], "the same by hand"
    assert 'TEMPLATE """{{ .Prompt }}"""' in make_modelfile(model, tokenizer, "f16", {})
    odd = make_modelfile(model, tokenizer, "f16", facts | {"prefix": '"é"\t😀: '})
    assert r'TEMPLATE """{{ "\"\U000000e9\"\t\U0001f600: " }}{{ .Prompt }}<delimiter>"""' in odd.splitlines()


def test_q8_0_is_that_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 96)).astype(np.float32)
    x[0, :32], x[1, 0] = 0, 0.5 / 127
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0)
    assert quantize_q8_0(x) == theirs.tobytes()


def test_settings_without_a_graph_are_refused_by_name() -> None:
    llama, bert, t5 = p.llama(2, 16, 4, 32, 64), p.bert(2, 16, 2, 64), p.t5(2, 16, 2, 32, 64)
    refused = {
        r"no llama with model\.attention_gate=True": replace(llama, attention_gate=True),
        r"no llama with model\.value_residual=True": replace(llama, value_residual=True),
        r"no llama with model\.unet_skips=True": replace(llama, unet_skips=True),
        r"no gpt2 with model\.norm_first=False": p.gpt(2, 16, 2, 64),
        r"no llama with model\.prompt_form=prefix": replace(llama, prompt_form="prefix"),
        r"no bert with model\.head=ClassificationHead": replace(bert, head=head_for_task(bert, "classify", ("a", "b"))),
        r"model\.position=Disentangled": p.deberta(2, 16, 2, 64),
        r"no t5 with model\.position\.max_distance=64": replace(t5, position=T5Bias(32, 64)),
        r"no bert with model\.embed_dim=8\. Export with --format onnx": p.bert(2, 16, 2, 64, embed_dim=8),
        r"no LSTM with .* ONNX has no graph for this model either": get_preset("bilstm-tiny"),
    }
    for message, config in refused.items():
        with pytest.raises(UserError, match=message):
            find_architecture(config)


def test_tokenizers_without_a_model_are_refused(corpus_file: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(corpus_file.read_text(encoding="utf-8").split("\n\n"), "char", 200)
    model = make_model(p.gpt2(1, 32, 2, tokenizer.vocab.size))
    model.tokenizer = tokenizer
    model.save(tmp_path / "saved")
    with pytest.raises(UserError, match=r"llama\.cpp has no tokenizer of kind char"):
        api.export(tmp_path / "saved", tmp_path / "gguf", format="gguf")
    assert not (tmp_path / "gguf").exists()
    with pytest.raises(UserError, match="--dtype is for --format gguf"):
        api.export(tmp_path / "saved", tmp_path / "gguf", format="onnx", dtype="f16")


def test_words_added_to_byte_bpe_need_a_pattern_whose_words_are_looked_up(own_tokenizers: dict[str, Tokenizer]) -> None:
    """llama.cpp looks whole words up with Llama 3's expression, not with GPT-2's: new words would be split again."""
    words = ["Kitabu vitabu kitabuni watoto wanasoma maktaba."] * 20
    for name, pre in (("llama3", "llama-bpe"), ("byte-bpe", None)):
        old = own_tokenizers[name]
        extended = extend_tokenizer(old, propose_tokens(old, words, max_new=5))
        assert json.loads(extended.backend.to_str())["model"]["ignore_merges"] is True
        config = p.llama(1, 32, 2, 48, extended.vocab.size)
        if pre is not None:
            assert make_gguf_tokenizer(extended, config).metadata["tokenizer.ggml.pre"] == pre
            continue
        with pytest.raises(UserError, match="would split the words that were added"):
            make_gguf_tokenizer(extended, config)


def test_settings_of_other_peoples_tokenizers(tokenizers: dict[str, Tokenizer]) -> None:
    """No normalizer at all, and several chat templates."""
    original = tokenizers["wordpiece"]
    state = json.loads(original.backend.to_str()) | {"normalizer": None}
    templates = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    backend = type(original.backend).from_str(json.dumps(state))
    tokenizer = Tokenizer(backend, original.special_tokens, original.config | {"chat_template": templates})
    found = make_gguf_tokenizer(tokenizer, p.bert(1, 16, 2, original.vocab.size))
    assert found.metadata["tokenizer.ggml.normalizer.lowercase"] is False
    assert found.metadata["tokenizer.chat_template"] == "a"
    assert "control characters" in found.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, own_tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = saved_model(family, own_tokenizers, tmp_path / "saved")
    for dtype in TOLERANCES:
        made = api.export(tmp_path / "saved", tmp_path / dtype, check=True, format="gguf", dtype=dtype)
        assert made["max_difference"] < made["tolerance"] == TOLERANCES[dtype]
    assert model.tokenizer is not None
    differing = {"byte-bpe": [], "unigram": ["  two  spaces   three "]}.get(model.tokenizer.kind)
    if differing is not None:
        assert [text for text in made["other_token_ids"] if text not in differing] == []


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_llama_cpp_pools_as_fine_tuned(pool: str, own_tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """By its own metadata, after a check in the same process: the check must leave llama.cpp usable."""
    library = pytest.importorskip("llama_cpp")
    tokenizer = own_tokenizers["wordpiece"]
    config = p.bert(2, 64, 4, tokenizer.vocab.size, position=LearnedPosition(64), head=EmbeddingHead(pool))
    model = make_model(config).eval()
    model.tokenizer = tokenizer
    model.save(tmp_path / "saved")
    api.export(tmp_path / "saved", tmp_path / "gguf", check=True, format="gguf", dtype="f32")
    from_metadata = -1
    path = str(tmp_path / "gguf" / "model-f32.gguf")
    opened = library.Llama(path, embedding=True, n_ctx=64, pooling_type=from_metadata, verbose=False)
    for text in ("The old ship came home.", "a river"):
        expected = embed_texts(model, [text], normalise=True)[0]
        np.testing.assert_allclose(opened.embed(text, normalize=True), expected, atol=5e-3)
    opened.close()
