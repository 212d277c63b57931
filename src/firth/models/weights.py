"""Names, shapes and settings to and from Hugging Face checkpoints.

Each family is a list of rules: one tensor of ours is some of theirs, one after the other. A model that no family of
`transformers` describes is written under our own names, with `model_type` firth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firth.console import warn
from firth.errors import UserError, nearest
from firth.files import fresh_folder, read_json, whole_folder, write_json
from firth.models.config import (
    MLP,
    Buckets,
    Classes,
    FanIn,
    Head,
    LayerNorm,
    Learned,
    LMHead,
    ModelConfig,
    Normal,
    Pair,
    RMSNorm,
)
from firth.models.model import Model, framing, make_model
from firth.plain import KIND, from_plain, to_plain
from firth.tokens import Tokenizer, Vocabulary, load_tokenizer

WEIGHTS = "model.safetensors"


class Rule(NamedTuple):
    """`ours` is the tensors `theirs`, joined along the first axis; `turned` where they keep (in, out)."""

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False


def _linear(ours: str, *theirs: str, bias: bool = True, turned: bool = False) -> Iterator[Rule]:
    yield Rule(f"{ours}.weight", tuple(f"{t}.weight" for t in theirs), turned)
    if bias:
        yield Rule(f"{ours}.bias", tuple(f"{t}.bias" for t in theirs))


def _bert(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("bert.embeddings.word_embeddings.weight",))
    yield Rule("embed.places.weight", ("bert.embeddings.position_embeddings.weight",))
    yield Rule("embed.segments.weight", ("bert.embeddings.token_type_embeddings.weight",))
    yield from _linear("embed.norm", "bert.embeddings.LayerNorm")
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"bert.encoder.layer.{i}"
        self_ = f"{theirs}.attention.self"
        yield from _linear(f"{ours}.attention.qkv", f"{self_}.query", f"{self_}.key", f"{self_}.value")
        yield from _linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from _linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from _linear(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
    if isinstance(config.head, Classes):
        yield from _linear("head.pooler", "bert.pooler.dense")
        yield from _linear("head.out", "classifier")
    else:
        yield from _linear("head.dense", "cls.predictions.transform.dense")
        yield from _linear("head.norm", "cls.predictions.transform.LayerNorm")
        yield Rule("head.bias", ("cls.predictions.bias",))
    if config.extra("pair") is not None:
        yield from _linear("extras.pair.pooler", "bert.pooler.dense")
        yield from _linear("extras.pair.out", "cls.seq_relationship")


def _gpt2(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("transformer.wte.weight",))
    yield Rule("embed.places.weight", ("transformer.wpe.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"transformer.h.{i}"
        yield from _linear(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _linear(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", turned=True)
        yield from _linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", turned=True)
        yield from _linear(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", turned=True)
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", turned=True)
    yield from _linear("stack.final_norm", "transformer.ln_f")
    if isinstance(config.head, Classes):
        yield Rule("head.out.weight", ("score.weight",))


def _t5(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("shared.weight",))
    for side, layers, last in (("encoder", config.num_layers, 1), ("decoder", config.decoder_layers, 2)):
        yield Rule(
            f"{side}.score.table.weight", (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)
        )
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            parts = [("attention", 0, "SelfAttention")] + ([("cross", 1, "EncDecAttention")] if last == 2 else [])
            for name, place, kind in parts:
                at = f"{theirs}.{place}.{kind}"
                yield from _linear(f"{ours}.{name}.qkv", f"{at}.q", f"{at}.k", f"{at}.v", bias=False)
                yield from _linear(f"{ours}.{name}.out", f"{at}.o", bias=False)
                yield from _linear(f"{ours}.{name}_norm", f"{theirs}.{place}.layer_norm", bias=False)
            dense = f"{theirs}.{last}.DenseReluDense"
            ups = (f"{dense}.wi_0", f"{dense}.wi_1") if config.mlp.gated else (f"{dense}.wi",)
            yield from _linear(f"{ours}.mlp.up", *ups, bias=False)
            yield from _linear(f"{ours}.mlp.down", f"{dense}.wo", bias=False)
            yield from _linear(f"{ours}.mlp_norm", f"{theirs}.{last}.layer_norm", bias=False)
        yield from _linear(f"{side}.final_norm", f"{side}.final_layer_norm", bias=False)
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield Rule("head.weight", ("lm_head.weight",))


def _class_names(hf: dict[str, Any]) -> tuple[str, ...]:
    names = hf.get("id2label") or {str(i): f"LABEL_{i}" for i in range(2)}
    return tuple(names[k] for k in sorted(names, key=int))


def _is_classifier(hf: dict[str, Any]) -> bool:
    return any("ForSequenceClassification" in a for a in hf.get("architectures") or [])


ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: the activation {name!r} is not known here. {nearest(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _from_bert(hf: dict[str, Any]) -> ModelConfig:
    dim = hf.get("hidden_size", 768)
    return ModelConfig(
        family="bert",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 30522),
        dim=dim,
        num_layers=hf.get("num_hidden_layers", 12),
        num_heads=hf.get("num_attention_heads", 12),
        mlp=MLP(hf.get("intermediate_size", 3072), _activation(hf.get("hidden_act", "gelu"))),  # type: ignore[arg-type]
        position=Learned(hf.get("max_position_embeddings", 512)),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-12)),
        head=Classes(_class_names(hf), pooled=True) if _is_classifier(hf) else LMHead(transform=True, bias=True),
        init=Normal(hf.get("initializer_range", 0.02)),
        embed_norm=True,
        num_segments=hf.get("type_vocab_size") or 2,  # `transformers` has no BERT without segments
        dropout=hf.get("hidden_dropout_prob", 0.1),
        attention_dropout=hf.get("attention_probs_dropout_prob", 0.1),
    )


def _to_bert(c: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp.dim,
        "hidden_act": _hf_activation(c),
        "max_position_embeddings": c.max_length,
        "layer_norm_eps": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "type_vocab_size": c.num_segments,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
    }


def _hf_activation(c: ModelConfig) -> str:
    return {"gelu": "gelu", "relu": "relu", "gelu-tanh": "gelu_new"}[c.mlp.activation]


def _from_gpt2(hf: dict[str, Any]) -> ModelConfig:
    dim = hf.get("n_embd", 768)
    return ModelConfig(
        family="gpt2",
        shape="decoder",
        vocab_size=hf.get("vocab_size", 50257),
        dim=dim,
        num_layers=hf.get("n_layer", 12),
        num_heads=hf.get("n_head", 12),
        mlp=MLP(hf.get("n_inner") or 4 * dim, _activation(hf.get("activation_function", "gelu_new"))),  # type: ignore[arg-type]
        position=Learned(hf.get("n_positions", 1024)),
        norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        head=Classes(_class_names(hf)) if _is_classifier(hf) else LMHead(),
        init=Normal(hf.get("initializer_range", 0.02), scale_residual=True),
        norm_first=True,
        dropout=hf.get("resid_pdrop", 0.1),
        attention_dropout=hf.get("attn_pdrop", 0.1),
    )


def _to_gpt2(c: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.dim,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.mlp.dim,
        "activation_function": _hf_activation(c),
        "n_positions": c.max_length,
        "layer_norm_epsilon": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
    }


def _from_t5(hf: dict[str, Any]) -> ModelConfig:
    gate, _, kind = hf.get("feed_forward_proj", "relu").rpartition("-")
    dim, heads = hf.get("d_model", 512), hf.get("num_heads", 8)
    head_dim, layers = hf.get("d_kv", 64), hf.get("num_layers", 6)
    decoder_layers = hf.get("num_decoder_layers") or layers
    tied = hf.get("tie_word_embeddings") is not False
    activation = "gelu-tanh" if gate and kind == "gelu" else _activation(kind)
    return ModelConfig(
        family="t5",
        shape="encoder-decoder",
        vocab_size=hf.get("vocab_size", 32128),
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp=MLP(hf.get("d_ff", 2048), activation, gated=gate == "gated"),  # type: ignore[arg-type]
        position=Buckets(hf.get("relative_attention_num_buckets", 32), hf.get("relative_attention_max_distance", 128)),
        norm=RMSNorm(hf.get("layer_norm_epsilon", 1e-6)),
        head=LMHead(tied=tied, scaled=hf.get("scale_decoder_outputs", tied)),
        init=FanIn(),
        norm_first=True,
        bias=False,
        head_dim=None if head_dim * heads == dim else head_dim,
        num_decoder_layers=None if decoder_layers == layers else decoder_layers,
        dropout=hf.get("dropout_rate", 0.1),
        attention_dropout=hf.get("dropout_rate", 0.1),
    )


def _to_t5(c: ModelConfig) -> dict[str, Any]:
    plain = {"relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_new"}[c.mlp.activation]
    gated = "gated-gelu" if c.mlp.activation == "gelu-tanh" else f"gated-{plain}"
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.dim,
        "d_kv": c.head_size,
        "d_ff": c.mlp.dim,
        "num_layers": c.num_layers,
        "num_decoder_layers": c.decoder_layers,
        "num_heads": c.num_heads,
        "feed_forward_proj": gated if c.mlp.gated else plain,
        "relative_attention_num_buckets": getattr(c.position, "num", None),
        "relative_attention_max_distance": getattr(c.position, "far", None),
        "layer_norm_epsilon": c.norm.eps,
        "dropout_rate": c.dropout,
        "tie_word_embeddings": getattr(c.head, "tied", None),
        "scale_decoder_outputs": getattr(c.head, "scaled", None),
        "is_encoder_decoder": True,
    }


class Family(NamedTuple):
    """How one family of `transformers` names things.

    `prefix` is missing in checkpoints of the bare body. `fixed` are settings that `transformers` can change and we not.
    `pair` is the architecture that has a pair head too.
    """

    rules: Callable[[ModelConfig], Iterator[Rule]]
    read: Callable[[dict[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    lm: str
    classifier: str
    prefix: str
    fixed: dict[str, Any]
    pair: str | None = None


FAMILIES: dict[str, Family] = {
    "bert": Family(
        _bert,
        _from_bert,
        _to_bert,
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "bert.",
        {"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True},
        pair="BertForPreTraining",
    ),
    "gpt2": Family(
        _gpt2,
        _from_gpt2,
        _to_gpt2,
        "GPT2LMHeadModel",
        "GPT2ForSequenceClassification",
        "transformer.",
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
    ),
    "t5": Family(_t5, _from_t5, _to_t5, "T5ForConditionalGeneration", "T5ForSequenceClassification", "", {}),
}
OWN = "firth"
OWN_EXTRAS = "firth_extras"  # in config.json: what a model of a known family has beside what its family knows


def family_of(config: ModelConfig) -> str:
    """The `model_type` that describes this model without loss; `firth` when `transformers` has none.

    Extras stand beside a family's tensors and change nothing, except a generator: it takes the words from the body.
    """
    return OWN if config.extra("generator") is not None else _family_of_body(config)


def _family_of_body(config: ModelConfig) -> str:
    family = FAMILIES.get(config.family)
    if family is None:
        return OWN
    try:
        return config.family if _spelled_out(family.read(_named(config, family))) == _spelled_out(config) else OWN
    except (KeyError, TypeError, UserError):
        return OWN


def _spelled_out(config: ModelConfig) -> ModelConfig:
    """The same body with nothing left to its default, so that equal ones compare equal."""
    return replace(config, head_dim=config.head_size, num_decoder_layers=config.decoder_layers, extras=())


def _named(config: ModelConfig, family: Family) -> dict[str, Any]:
    hf = {"model_type": config.family, **family.write(config)}
    own = tuple(e for e in config.extras if not (isinstance(e, Pair) and family.pair))
    if own:
        hf[OWN_EXTRAS] = to_plain(replace(config, extras=own))["extras"]
    if isinstance(config.head, Classes):
        names = config.head.names
        labels = {"id2label": {str(i): n for i, n in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}
        return hf | {"architectures": [family.classifier], **labels}
    return hf | {"architectures": [family.lm if config.extra("pair") is None else family.pair or family.lm]}


def to_hf_config(config: ModelConfig, vocab: Vocabulary | None) -> dict[str, Any]:
    """The contents of config.json."""
    kind = family_of(config)
    if kind == OWN:
        hf: dict[str, Any] = {"model_type": OWN, "architectures": ["FirthModel"], OWN: to_plain(config)}
    else:
        hf = _named(config, FAMILIES[kind])
    hf["dtype"] = "float32"
    if vocab is not None:
        hf["pad_token_id"] = vocab.pad
        hf["bos_token_id"] = vocab.bos
        hf["eos_token_id"] = vocab.eos
        if config.shape == "encoder-decoder":
            hf["decoder_start_token_id"] = framing(config, vocab).start
    return hf


def from_hf_config(hf: Any, where: str = "config.json") -> ModelConfig:
    """The model that a config.json describes."""
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind == OWN:
        return from_plain(hf.get(OWN), ModelConfig, where)
    if kind not in FAMILIES:
        raise UserError(f"{where}: model_type {kind!r} is not one that Firth knows. {nearest(str(kind), FAMILIES)}")
    for name, value in FAMILIES[kind].fixed.items():
        if hf.get(name, value) != value:
            raise UserError(f"{where}: {name} is {hf[name]!r}, and Firth knows {kind} only with {value!r}.")
    try:
        plain = to_plain(FAMILIES[kind].read(hf))
        pair = [{KIND: Pair.__name__}] if FAMILIES[kind].pair in (hf.get("architectures") or []) else []
        plain["extras"] = [*pair, *hf.get(OWN_EXTRAS, [])]
    except (TypeError, ValueError, AttributeError) as e:
        raise UserError(f"{where}: a setting has a value of the wrong type ({e}).") from None
    return from_plain(plain, ModelConfig, where)  # every value is what its field says


def to_hf(model: Model) -> dict[str, Tensor]:
    """The tensors of a model under the names that its config.json promises."""
    state = {k: v.detach() for k, v in model.state_dict().items()}
    kind, result = family_of(model.config), {}
    for ours, theirs, turned in FAMILIES[kind].rules(model.config) if kind != OWN else ():
        for name, piece in zip(theirs, state.pop(ours).chunk(len(theirs)), strict=True):
            result[name] = (piece.t() if turned else piece).contiguous()
    assert kind == OWN or all(name.startswith("extras.") for name in state), "a family names all of its tensors"
    return result | {k: v.contiguous() for k, v in state.items()}


def from_hf(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names; those that `tensors` does not have are left out.

    They have our names already where the model that wrote them was one of our own, whatever this one is.
    """
    kind = _family_of_body(config)
    ours = tensors if kind == OWN or "embed.tokens.weight" in tensors else _renamed(tensors, config, FAMILIES[kind])
    if ("extras.generator.narrow.weight" in tensors) == (config.extra("generator") is not None):
        return ours
    return {k: v for k, v in ours.items() if not k.startswith("head.")}  # a generator's head does not fit a body


def _renamed(tensors: dict[str, Tensor], config: ModelConfig, family: Family) -> dict[str, Tensor]:
    tensors = {k.replace(".gamma", ".weight").replace(".beta", ".bias"): v for k, v in tensors.items()}
    if family.prefix and not any(k.startswith(family.prefix) for k in tensors):
        tensors |= {family.prefix + k: v for k, v in tensors.items()}
    result = {k: v for k, v in tensors.items() if k.startswith("extras.")}
    for ours, theirs, turned in family.rules(config):
        if all(name in tensors for name in theirs):
            pieces = [tensors[name].t() if turned else tensors[name] for name in theirs]
            result[ours] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result


def _weight_files(folder: Path) -> list[str]:
    index = folder / (WEIGHTS + ".index.json")
    if not index.is_file():
        return [WEIGHTS]
    facts = read_json(index)
    if not isinstance(facts, dict) or not isinstance(facts.get("weight_map"), dict) or not facts["weight_map"]:
        raise UserError(f"{index} has no weight_map: not an index of weights.")
    return sorted({str(name) for name in facts["weight_map"].values()})


def read_tensors(folder: Path, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint folder, in one file or in several with an index; all, or those named in `only`."""
    names = _weight_files(folder)
    if not (folder / names[0]).is_file():
        if any(folder.glob("*.bin")):
            raise UserError(
                f"{folder} has its weights in a .bin file, a pickle that can run any code when it is opened. "
                "Convert it with transformers: AutoModel.from_pretrained(...).save_pretrained(...)."
            )
        raise UserError(f"{folder} has no {WEIGHTS}: not a checkpoint.")
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as f:
                tensors |= {key: f.get_tensor(key) for key in f.keys() if only is None or key in only}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise UserError(f"{folder / name} cannot be read ({e}): the file is damaged or cut short.") from None
    return tensors


def read_config(folder: str | Path) -> ModelConfig:
    """The model that a checkpoint folder holds."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        inside = next((p for p in (folder / "final", *sorted(folder.glob("*/final"))) if p.is_dir()), None)
        hint = f" Did you mean {inside}?" if inside else ""
        raise UserError(f"{folder} is not a checkpoint: it has no config.json.{hint}")
    config = from_hf_config(read_json(folder / "config.json"), str(folder / "config.json"))
    return _untied(config, folder)


def load_model(folder: str | Path, head: Head | None = None) -> Model:
    """Open a checkpoint of ours or a Hugging Face folder; `head` puts a new head on its body, without extras."""
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    model = make_model(config if head is None else replace(config, head=head, extras=()))
    load_weights(model, tensors, str(folder), new_head=head is not None)
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        model.tokenizer = load_tokenizer(folder)
    return model.eval()


def _untied(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with a head of its own where the file has one: `transformers` 5 calls every head of T5 tied."""
    if config.family != "t5" or not isinstance(config.head, LMHead):
        return config
    tensors = read_tensors(folder, ("lm_head.weight", "shared.weight"))
    if len(tensors) < 2:
        return config
    return replace(config, head=replace(config.head, tied=torch.equal(*tensors.values())))


def load_weights(
    model: Model, tensors: dict[str, Tensor], where: str, new_head: bool = False, whole: bool = False
) -> None:
    """Fill a model; what the body lacks is an error, a head or an extra starts fresh unless it must be `whole`.

    A shape that is not the model's is an error too; under a `new_head` the old one may have any shape.
    """
    state, wanted = from_hf(tensors, model.config), model.state_dict()
    wrong = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(p.shape)} by the config"
        for name, p in wanted.items()
        if name in state and state[name].shape != p.shape and not (new_head and name.startswith("head."))
    ]
    if wrong:
        raise UserError(f"{where}: the weights do not fit the config: " + "; ".join(wrong[:5]))
    state = {k: v for k, v in state.items() if k in wanted and v.shape == wanted[k].shape}
    missing = [name for name in wanted if name not in state]
    if lacking := [name for name in missing if whole or not name.startswith(("head.", "extras."))]:
        raise UserError(f"{where}: {len(lacking)} tensors of the model are missing, such as {', '.join(lacking[:3])}.")
    if missing and not new_head:
        warn(f"{where} has no head for this ({', '.join(missing)}): it starts fresh.")
    with torch.no_grad():
        for name, value in state.items():
            wanted[name].copy_(value)


def generation_config(config: ModelConfig, vocab: Vocabulary) -> dict[str, Any]:
    facts = {"pad_token_id": vocab.pad, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
    if config.shape == "encoder-decoder":
        facts["decoder_start_token_id"] = framing(config, vocab).start
    return {k: v for k, v in facts.items() if v is not None}


def write_model(model: Model, folder: Path) -> None:
    """The files of a Hugging Face folder, into a folder that is there."""
    tokenizer: Tokenizer | None = model.tokenizer
    vocab = tokenizer.vocab if tokenizer is not None else None
    write_json(folder / "config.json", to_hf_config(model.config, vocab))
    save_file(to_hf(model), folder / WEIGHTS, metadata={"format": "pt"})
    if tokenizer is not None and vocab is not None:
        tokenizer.save(folder)
        if isinstance(model.config.head, LMHead) and model.config.shape != "encoder":
            write_json(folder / "generation_config.json", generation_config(model.config, vocab))


def save_model(model: Model, folder: Path, overwrite: bool = False) -> None:
    """Write a folder whole or not at all; only a checkpoint is overwritten, and only when asked."""
    fresh_folder(folder, "folder", overwrite)
    with whole_folder(folder) as temporary:
        write_model(model, temporary)
