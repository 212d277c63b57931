"""Reading and writing checkpoints of Hugging Face, and of our own.

How a family names its tensors and settings is its layout (`layouts/`). A model that no family of `transformers`
describes is written under our own names, with `model_type` firth.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firth.core.console import warn
from firth.core.errors import UserError, did_you_mean
from firth.core.files import atomic_folder, check_output_folder, read_json, write_json
from firth.core.serialization import TYPE_KEY, from_dict, to_dict
from firth.models.config import (
    ClassificationHead,
    DiscriminatorHead,
    EmbeddingHead,
    Extra,
    GeneratorConfig,
    Head,
    LearnedPosition,
    LMHead,
    ModelConfig,
    RegressionHead,
    SentencePairHead,
    TaskHead,
    TokenClassificationHead,
)
from firth.models.hf import EXTRAS_KEY, FAMILY_LAYOUTS, HEAD_KEY, MODEL_TYPE_LAYOUTS, HFLayout
from firth.models.hf.layout import has_architecture, label_names
from firth.models.hf.settings import ACTIVATION_FROM_HF, ACTIVATION_TO_HF
from firth.models.lora import merge_lora
from firth.models.model import (
    ForcedTokens,
    Model,
    get_forced_tokens,
    make_model,
)
from firth.models.task_heads import convert_head_type, inherit_dropout
from firth.models.template import make_sequence_template
from firth.tokens import Tokenizer, Vocabulary, load_tokenizer
from firth.tokens.template import with_template

WEIGHTS_FILE = "model.safetensors"
FIRTH_MODEL_TYPE = "firth"
NGRAM_MODEL_TYPE = "firth-ngram"
FAMILY_KEY = "firth_family"  # in config.json: which of the families that share a layout
ADDS_BOS_KEY = "firth_adds_bos"  # how a text is framed, where that is not as the layout's own family has it
OBJECTIVE_KEY = "firth_objective"  # what the model was pretrained with: its name, and all that it is
GENERATION_CONFIG_FILE = "generation_config.json"
EOS_TOKEN_KEY = "eos_token_id"
FORCED_TOKEN_KEYS = {"bos": "forced_bos_token_id", "eos": "forced_eos_token_id"}
REGRESSION_PROBLEM_TYPE = "regression"
HEAD_VALUE_FROM_HF = ACTIVATION_FROM_HF | {"cls": "first"}  # of the settings of heads
HEAD_VALUE_TO_HF = ACTIVATION_TO_HF | {"first": "cls"}
AUXILIARY_HEAD_PREFIX = "extras.auxiliary."
GENERATOR_DELTA_KEY = "extras.generator.delta.weight"  # by how much a body's token vectors differ from its generator's

# --- settings -------------------------------------------------------------------------------------------------------


def hf_model_type(config: ModelConfig, vocab: Vocabulary | None = None) -> str:
    """The `model_type` that describes this model (over this vocabulary) without loss; `firth` when there is none.

    Extras stand beside a family's tensors and change nothing, except a generator: it takes the words from the body,
    and only ELECTRA has a name for what is left.
    """
    layout = _exact_layout(config, vocab)
    generator = config.get_extra("generator")
    own = isinstance(generator, GeneratorConfig) and (
        layout is None or layout.discriminator_architecture is None or generator.disentangle_embeddings
    )
    own = own or config.get_extra("features") is not None  # its head does not read the last states
    return FIRTH_MODEL_TYPE if layout is None or own else layout.model_type


def _exact_layout(config: ModelConfig, vocab: Vocabulary | None = None) -> HFLayout | None:
    """The layout that describes this body and its head without loss."""
    layout = FAMILY_LAYOUTS.get(config.family)
    if layout is None:
        return None
    try:
        hf = _to_layout_settings(config, layout)
        same = _normalize_config(_config_from_layout(hf, "config.json")) == _normalize_config(config)
    except (KeyError, TypeError, UserError):
        return None
    pads = (None, vocab.pad if vocab is not None else hf.get("pad_token_id"))
    return layout if same and hf.get("pad_token_id") in pads else None


def _normalize_config(config: ModelConfig) -> ModelConfig:
    """The same body with nothing left to its default, so that equal ones compare equal."""
    mlp, head = replace(config.mlp, dropout=config.mlp_dropout), config.head
    if isinstance(head, TaskHead) and not isinstance(head, EmbeddingHead):
        head = replace(head, dropout=None, dropout_before_pooler=False)  # which change nothing once a model has learned
    if isinstance(head, ClassificationHead):
        head = replace(head, class_weights=None)
    sizes: dict[str, Any] = dict(head_dim=config.head_size, num_decoder_layers=config.decoder_layers)
    return replace(config, mlp=mlp, head=head, extras=(), **sizes)


def _backbone_layout(config: ModelConfig) -> HFLayout | None:
    """The layout that describes this body, whatever its head: where the weights of a new model come from."""
    layout = FAMILY_LAYOUTS.get(config.family)
    if layout is None:
        return None
    try:
        plain = layout.settings.read({"model_type": layout.model_type, **layout.settings.write(config)})
    except (KeyError, TypeError, UserError):
        return None
    return _exact_layout(replace(config, head=plain.head))


def _to_layout_settings(config: ModelConfig, layout: HFLayout) -> dict[str, Any]:
    """What a layout can say of a model; a model that it does not describe gets settings that do not read back."""
    hf = {
        "model_type": layout.model_type,
        "architectures": [_hf_architecture(config, layout)],
        **layout.settings.write(config),
    }
    plain = layout.settings.read(hf)
    if config.family != MODEL_TYPE_LAYOUTS[layout.model_type][0]:
        hf[FAMILY_KEY] = config.family
    if config.adds_bos != plain.adds_bos:
        hf[ADDS_BOS_KEY] = config.adds_bos
    if own := tuple(e for e in config.extras if not (isinstance(e, SentencePairHead) and layout.pair_architecture)):
        hf[EXTRAS_KEY] = to_dict(replace(config, extras=own))["extras"]
    return hf | (_head_to_hf(config, layout) if isinstance(config.head, TaskHead) else {})


def _head_to_hf(config: ModelConfig, layout: HFLayout) -> dict[str, Any]:
    """What config.json says of the head of a task."""
    head, found = config.head, layout.find_task_architecture(config.head)
    if found is None:
        return {HEAD_KEY: to_dict(replace(config, extras=()))["head"]}
    hf: dict[str, Any] = {}
    for field, key in found.settings.items():
        value = getattr(head, field)
        hf[key] = config.dropout if value is None else HEAD_VALUE_TO_HF.get(value, value)
    if isinstance(head, ClassificationHead | TokenClassificationHead):
        hf["id2label"] = {str(i): name for i, name in enumerate(head.names)}
        hf["label2id"] = {name: i for i, name in enumerate(head.names)}
    if isinstance(head, RegressionHead):
        hf |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    if isinstance(head, ClassificationHead | RegressionHead):
        hf["problem_type"] = (
            REGRESSION_PROBLEM_TYPE if isinstance(head, RegressionHead) else "single_label_classification"
        )
    return hf


def _head_from_hf(hf_config: dict[str, Any], layout: HFLayout, config: ModelConfig, source: str) -> TaskHead | None:
    """The head of a task that a config.json names, if it does."""
    if HEAD_KEY in hf_config:
        own = from_dict(to_dict(config) | {"head": hf_config[HEAD_KEY]}, ModelConfig, source).head
        assert isinstance(own, TaskHead)
        return own
    found = next(
        (
            a
            for a in layout.task_architectures
            if has_architecture(hf_config, "For" + a.architecture.rpartition("For")[2])
        ),
        None,
    )
    if found is None:
        return (
            EmbeddingHead("mean")
            if layout.encoder_architecture and has_architecture(hf_config, layout.encoder_architecture)
            else None
        )
    said = {field: hf_config[key] for field, key in found.settings.items() if hf_config.get(key) is not None}
    head: Any = replace(found.head, **{field: HEAD_VALUE_FROM_HF.get(value, value) for field, value in said.items()})
    if isinstance(head, ClassificationHead | TokenClassificationHead):
        head = replace(head, names=label_names(hf_config))
    if isinstance(head, ClassificationHead):
        kind = hf_config.get("problem_type") or (
            REGRESSION_PROBLEM_TYPE if len(head.names) == 1 else None
        )  # as `transformers` takes it
        head = convert_head_type(RegressionHead, head) if kind == REGRESSION_PROBLEM_TYPE else head
    return inherit_dropout(head, config)


def _hf_architecture(config: ModelConfig, layout: HFLayout) -> str:
    found: str | None
    if isinstance(config.head, TaskHead):
        answers = layout.find_task_architecture(config.head)
        found = layout.base_architecture if isinstance(config.head, EmbeddingHead) else answers and answers.architecture
    elif isinstance(config.head, DiscriminatorHead) or (
        config.get_extra("generator") and layout.discriminator_architecture
    ):
        found = layout.discriminator_architecture
    else:
        found = (
            layout.pair_architecture
            if config.get_extra("pair") and layout.pair_architecture
            else layout.lm_architecture
        )
    if found is None:
        raise UserError(f"transformers has no {layout.model_type} with this head.")
    return found


def to_hf_config(config: ModelConfig, vocab: Vocabulary | None) -> dict[str, Any]:
    """The contents of config.json."""
    if hf_model_type(config, vocab) == FIRTH_MODEL_TYPE:
        hf: dict[str, Any] = {
            "model_type": FIRTH_MODEL_TYPE,
            "architectures": ["FirthModel"],
            FIRTH_MODEL_TYPE: to_dict(config),
        }
    else:
        hf = _to_layout_settings(config, FAMILY_LAYOUTS[config.family])
    hf["dtype"] = "float32"
    return hf if vocab is None else hf | special_token_ids(config, vocab)


def special_token_ids(config: ModelConfig, vocab: Vocabulary) -> dict[str, int | None]:
    """Which tokens frame a text, under the names that `transformers` has for them."""
    facts = {"pad_token_id": vocab.pad, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
    if config.architecture == "encoder-decoder":
        frame = make_sequence_template(config, vocab)
        facts |= {"eos_token_id": frame.eos_id, "decoder_start_token_id": frame.decoder_start_id}
        if config.adds_bos:
            facts |= {"bos_token_id": frame.prefix_ids[0]}
    return facts


def from_hf_config(hf_config: Any, source: str = "config.json") -> ModelConfig:
    """The model that a config.json describes."""
    kind = hf_config.get("model_type") if isinstance(hf_config, dict) else None
    if kind == FIRTH_MODEL_TYPE:
        return from_dict(hf_config.get(FIRTH_MODEL_TYPE), ModelConfig, source)
    if kind == NGRAM_MODEL_TYPE:
        raise UserError(
            f"{source}: a model of n-grams only counts, and has neither layers nor vectors. It can be scored "
            "(`firth evaluate --task perplexity`) and can write (`firth generate`)."
        )
    if kind not in MODEL_TYPE_LAYOUTS:
        raise UserError(
            f"{source}: model_type {kind!r} is not one that Firth knows. {did_you_mean(str(kind), MODEL_TYPE_LAYOUTS)}"
        )
    try:
        plain = to_dict(_config_from_layout(hf_config, source))
        pair = (
            [{TYPE_KEY: SentencePairHead.__name__}]
            if MODEL_TYPE_LAYOUTS[kind][1].pair_architecture in (hf_config.get("architectures") or [])
            else []
        )
        plain["extras"] = [*pair, *hf_config.get(EXTRAS_KEY, plain["extras"])]
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UserError(f"{source}: a setting has a value of the wrong type ({e}).") from None
    return from_dict(plain, ModelConfig, source)  # every value is what its field says


def _config_from_layout(hf_config: dict[str, Any], source: str) -> ModelConfig:
    """The body and the head."""
    name, layout = MODEL_TYPE_LAYOUTS[hf_config["model_type"]]
    for setting, value in layout.fixed_settings.items():
        if hf_config.get(setting, value) != value:
            kind = layout.model_type
            raise UserError(
                f"{source}: {setting} is {hf_config[setting]!r}, and Firth knows {kind} only with {value!r}."
            )
    config = layout.settings.read(hf_config)
    if (head := _head_from_hf(hf_config, layout, config, source)) is not None:
        config = replace(config, head=head, extras=())
    return replace(
        config, family=hf_config.get(FAMILY_KEY, name), adds_bos=hf_config.get(ADDS_BOS_KEY, config.adds_bos)
    )


def with_vocabulary(config: ModelConfig, vocab: Vocabulary) -> ModelConfig:
    """The same model for these tokens. RoBERTa counts its places from the id after that of its padding token."""
    config, layout = replace(config, vocab_size=vocab.size), FAMILY_LAYOUTS.get(config.family)
    if layout is None or not layout.positions_follow_pad or not isinstance(config.position, LearnedPosition):
        return config
    length = config.position.length - config.position.offset
    return replace(config, position=LearnedPosition(length + vocab.pad + 1, vocab.pad + 1))


# --- tensors --------------------------------------------------------------------------------------------------------


def to_hf_tensors(model: Model, subset: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a model, or `subset` of them, under the names that its config.json promises."""
    state = merge_lora(model, unique_state_dict(model)) if subset is None else dict(subset)
    vocab = model.tokenizer.vocab if model.tokenizer is not None else None
    if hf_model_type(model.config, vocab) == FIRTH_MODEL_TYPE:
        return {k: v.contiguous() for k, v in state.items()}
    result: dict[str, Tensor] = {}
    rules = FAMILY_LAYOUTS[model.config.family].rules(model.config)
    for rule in rules if subset is None else [rule for rule in rules if rule.firth_name in state]:
        result |= dict(zip(rule.hf_names, rule.to_hf(state.pop(rule.firth_name)), strict=True))
    assert all(name.startswith("extras.") for name in state), "a family names all of its tensors"
    layout = FAMILY_LAYOUTS[model.config.family]
    if (found := layout.find_task_architecture(model.config.head)) is not None and found.prefix:
        body = {name for rule in layout.backbone_rules(model.config) for name in rule.hf_names if name in result}
        result = {k: v for k, v in result.items() if k not in body} | _replace_prefix(
            {name: result[name] for name in body}, layout.prefix, found.prefix
        )
    return result | {k: v.contiguous() for k, v in state.items()}


def unique_state_dict(model: Model) -> dict[str, Tensor]:
    """The tensors of a model by name, each once, also where two parts share it."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: value.detach() for name, value in model.state_dict().items() if name in once}


def from_hf_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under our names; those that `tensors` does not have are left out.

    They have our names already where the model that wrote them was one of our own, whatever this one is.
    """
    layout = _backbone_layout(config)
    ours = tensors if layout is None or _has_firth_names(tensors) else _rename_tensors(tensors, config, layout)
    if config.get_extra("auxiliary") is not None and _has_firth_names(tensors):
        ours = {
            AUXILIARY_HEAD_PREFIX + k.removeprefix("head."): v for k, v in ours.items() if k.startswith("head.")
        } | ours
    generator = config.get_extra("generator")
    if GENERATOR_DELTA_KEY in ours and not (
        isinstance(generator, GeneratorConfig) and generator.disentangle_embeddings
    ):
        ours = ours | {
            "embed.tokens.weight": ours["embed.tokens.weight"] + ours[GENERATOR_DELTA_KEY]
        }  # what the body has read
    if ("extras.generator.narrow.weight" in tensors) == (generator is not None):
        return ours
    return {k: v for k, v in ours.items() if not k.startswith("head.")}  # a generator's head does not fit a body


def _has_firth_names(tensors: dict[str, Tensor]) -> bool:
    return "embed.tokens.weight" in tensors


def _rename_tensors(tensors: dict[str, Tensor], config: ModelConfig, layout: HFLayout) -> dict[str, Tensor]:
    tensors = _normalize_tensor_names(tensors, config, layout)
    result = {k: v for k, v in tensors.items() if k.startswith("extras.")}
    for rule in layout.rules(config):
        if all(name in tensors for name in rule.hf_names):
            result[rule.firth_name] = rule.to_firth([tensors[name] for name in rule.hf_names])
    return result


def _normalize_tensor_names(tensors: dict[str, Tensor], config: ModelConfig, layout: HFLayout) -> dict[str, Tensor]:
    """The tensors as today's `transformers` names them: norms by their new names, the body with its prefix."""
    tensors = {k.replace(".gamma", ".weight").replace(".beta", ".bias"): v for k, v in tensors.items()}
    for prefix in {answers.prefix for answers in layout.task_architectures} - {""}:
        tensors = _replace_prefix(tensors, prefix, layout.prefix)
    if layout.prefix and not any(k.startswith(layout.prefix) for k in tensors):
        beside = _known_tensor_names(config, layout).union(
            k for k in tensors if k.startswith("extras.") or _is_unused(k, layout)
        )
        tensors = {k if k in beside else layout.prefix + k: v for k, v in tensors.items()}
    for name, others in layout.aliases.items():
        if found := [tensors[other] for other in others if other in tensors]:
            tensors.setdefault(name, found[0])
    return tensors


def _replace_prefix(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()}


def _known_tensor_names(config: ModelConfig, layout: HFLayout) -> set[str]:
    """All names that the tensors of a model may have."""
    named = {name for rule in layout.rules(config) for name in rule.hf_names}
    return named.union(layout.aliases, *layout.aliases.values())


def _is_unused(name: str, layout: HFLayout) -> bool:
    return any(fnmatch(name, pattern) for pattern in layout.unused_patterns)


def unexpected_tensors(tensors: dict[str, Tensor], model: Model) -> list[str]:
    """What is in a file, and neither in the model nor known to be of no use for it."""
    layout = _backbone_layout(model.config)
    if layout is None or _has_firth_names(tensors):
        return sorted(tensors.keys() - model.state_dict().keys())
    full = _normalize_tensor_names(tensors, model.config, layout)
    left = full.keys() - _known_tensor_names(model.config, layout) - model.state_dict().keys()
    strange = {name for name in left if not _is_unused(name, layout)}
    for name, others in layout.aliases.items():  # one tensor in the model, and two different ones in the file
        strange |= {other for other in others if other in full and not torch.equal(full[other], full[name])}
    return sorted(strange)


def _weight_files(folder: Path) -> list[str]:
    index = folder / (WEIGHTS_FILE + ".index.json")
    if not index.is_file():
        return [WEIGHTS_FILE]
    facts = read_json(index)
    if not isinstance(facts, dict) or not isinstance(facts.get("weight_map"), dict) or not facts["weight_map"]:
        raise UserError(f"{index} has no weight_map: not an index of weights.")
    return sorted({str(name) for name in facts["weight_map"].values()})


def find_weight_files(folder: Path) -> list[str]:
    """The names of the files that a checkpoint has its tensors in; a folder without them is an error."""
    names = _weight_files(folder)
    if not (folder / names[0]).is_file():
        if any(folder.glob("*.bin")):
            raise UserError(
                f"{folder} has its weights in a .bin file, a pickle that can run any code when it is opened. "
                "Convert it with transformers: AutoModel.from_pretrained(...).save_pretrained(...)."
            )
        raise UserError(f"{folder} has no {WEIGHTS_FILE}: not a checkpoint.")
    return names


def read_tensors(folder: Path, keep_names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder, sharded or not: all of them, or those in `keep_names`."""
    names = find_weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as f:
                tensors |= {key: f.get_tensor(key) for key in f.keys() if keep_names is None or key in keep_names}  # noqa: SIM118
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
    layout = FAMILY_LAYOUTS.get(config.family)
    if layout is None or layout.refine_config is None:
        return config
    return layout.refine_config(config, lambda *names: read_tensors(folder, names))


def load_model(folder: str | Path, head: Head | None = None, extras: tuple[Extra, ...] = ()) -> Model:
    """Open a checkpoint of ours or a Hugging Face folder; `head` puts a new head, and new extras, on its body.

    The words that a language model has are no new head: where they are not in the checkpoint, that is said.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    model = make_model(config if head is None else replace(config, head=head, extras=extras))
    new_head = head is not None and (head != config.head or isinstance(head, TaskHead))
    load_weights(model, tensors, str(folder), new_head)
    if head is None:
        model.objective = read_json(folder / "config.json").get(OBJECTIVE_KEY)
    load_generation_tokens(model, folder)
    if head is None and (strange := unexpected_tensors(tensors, model)):
        some = ", ".join(strange[:3])
        warn(f"{folder}: {len(strange)} tensors have no place in this model and are left out, such as {some}.")
    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        model.tokenizer = load_tokenizer(folder)
        check_vocabulary(config, model.tokenizer.vocab, str(folder))
    return model.eval()


def check_vocabulary(config: ModelConfig, vocab: Vocabulary, source: str) -> None:
    if config.vocab_size < vocab.size:
        raise UserError(
            f"{source}: the tokenizer has {vocab.size:,} tokens, and the model only {config.vocab_size:,}: "
            "they do not belong together."
        )


def load_weights(
    model: Model, tensors: dict[str, Tensor], source: str, new_head: bool = False, strict: bool = False
) -> None:
    """Fill a model; what the body lacks is an error, a head or an extra starts fresh unless it must be `strict`.

    A shape that is not the model's is an error too; under a `new_head` the old one may have any shape.
    """
    state, wanted = from_hf_tensors(tensors, model.config), unique_state_dict(model)
    wrong = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(p.shape)} by the config"
        for name, p in wanted.items()
        if name in state and state[name].shape != p.shape and not (new_head and name.startswith("head."))
    ]
    if wrong:
        raise UserError(f"{source}: the weights do not fit the config: " + "; ".join(wrong[:5]))
    state = {k: v for k, v in state.items() if k in wanted and v.shape == wanted[k].shape}
    missing = [name for name in wanted if name not in state]
    if lacking := [name for name in missing if strict or not name.startswith(("head.", "extras."))]:
        raise UserError(f"{source}: {len(lacking)} tensors of the model are missing, such as {', '.join(lacking[:3])}.")
    if missing and not new_head:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        warn(f"{source} has no head for this ({some}): it starts fresh.")
    with torch.no_grad():
        for name, value in state.items():
            wanted[name].copy_(value)


def read_generation_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file that says how a checkpoint writes, where `transformers` looks for it, and what it says."""
    path = folder / GENERATION_CONFIG_FILE
    path = path if path.is_file() else folder / "config.json"
    facts = read_json(path)
    if not isinstance(facts, dict):
        raise UserError(f"{path} must hold settings by name.")
    return path, facts


def read_eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...] | None:
    """The tokens each of which ends a text, if a checkpoint lists them; a single one is the tokenizer's to tell."""
    path, facts = read_generation_settings(folder)
    found = facts.get(EOS_TOKEN_KEY)
    if found is None or type(found) is int:
        return None
    if not isinstance(found, list) or not found or not all(type(token) is int for token in found):
        raise UserError(f"{path}: {EOS_TOKEN_KEY} is {found!r}, and must be the id of a token or a list of such ids.")
    if wrong := [token for token in found if not 0 <= token < config.vocab_size]:
        size = f"{config.vocab_size:,}"
        raise UserError(
            f"{path}: {EOS_TOKEN_KEY} has the id {wrong[0]}, and the vocabulary of this model only {size} tokens."
        )
    return tuple(found)


def eos_settings(model: Model) -> dict[str, list[int]]:
    """The listed ends, as they are written; the heads of BART's and T5's tasks in `transformers` need a single one."""
    single = model.config.architecture == "encoder-decoder" and not isinstance(model.config.head, LMHead)
    return {} if model.eos_token_ids is None or single else {EOS_TOKEN_KEY: list(model.eos_token_ids)}


def load_generation_tokens(model: Model, folder: Path) -> None:
    """Let the texts of a model begin and end as a checkpoint says."""
    model.forced_tokens = read_forced_tokens(folder)
    model.eos_token_ids = read_eos_token_ids(folder, model.config) if model.config.architecture != "encoder" else None


def read_forced_tokens(folder: Path) -> ForcedTokens:
    """The tokens that are forced in the texts of a checkpoint."""
    path, facts = read_generation_settings(folder)
    found = {ours: facts.get(theirs) for ours, theirs in FORCED_TOKEN_KEYS.items()}
    one = {ours: min(some, default=None) if isinstance(some, list) else some for ours, some in found.items()}
    if wrong := [FORCED_TOKEN_KEYS[name] for name, token in one.items() if not (token is None or type(token) is int)]:
        raise UserError(f"{path}: {wrong[0]} must be the id of a token.")
    return ForcedTokens(**one)


def forced_token_settings(model: Model, vocab: Vocabulary) -> dict[str, int | None]:
    """What is forced, as it is written. BART's configuration in `transformers` forces an end unless it says null."""
    found = get_forced_tokens(model, vocab)
    facts = {theirs: getattr(found, ours) for ours, theirs in FORCED_TOKEN_KEYS.items()}
    bart = model.config.adds_bos and model.config.architecture == "encoder-decoder"
    return {
        name: token for name, token in facts.items() if token is not None or (bart and name == FORCED_TOKEN_KEYS["eos"])
    }


def generation_config_json(model: Model, vocab: Vocabulary) -> dict[str, Any]:
    facts = special_token_ids(model.config, vocab) | forced_token_settings(model, vocab) | eos_settings(model)
    return {k: v for k, v in facts.items() if v is not None}


def write_model(model: Model, folder: Path) -> None:
    """The files of a Hugging Face folder, into a folder that is there."""
    write_config_files(model, folder)
    save_file(to_hf_tensors(model), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def write_config_files(model: Model, folder: Path) -> None:
    """All of them but the weights."""
    tokenizer = model.tokenizer
    vocab = tokenizer.vocab if tokenizer is not None else None
    note = {} if model.objective is None else {OBJECTIVE_KEY: model.objective}
    forced = forced_token_settings(model, vocab) if vocab is not None and model.config.architecture != "encoder" else {}
    write_json(folder / "config.json", to_hf_config(model.config, vocab) | forced | eos_settings(model) | note)
    if tokenizer is not None and vocab is not None:
        with_special_token_template(tokenizer, model.config).save(folder)
        if model.config.family == "xlnet":  # `transformers` takes its class from the last place of a row
            path = folder / "tokenizer_config.json"
            write_json(path, read_json(path) | {"padding_side": "left"})
        if isinstance(model.config.head, LMHead) and model.config.architecture != "encoder":
            write_json(folder / GENERATION_CONFIG_FILE, generation_config_json(model, vocab))


def with_special_token_template(tokenizer: Tokenizer, config: ModelConfig) -> Tokenizer:
    """Return a tokenizer that adds the special tokens of an encoder or of BART to raw texts, as their families do."""
    adds_special_tokens = config.architecture == "encoder" or (
        config.architecture == "encoder-decoder" and config.adds_bos
    )
    if (
        not adds_special_tokens
        or not config.num_layers
        or not isinstance(config.head, LMHead)
        or tokenizer.vocab.sep is None
    ):
        return tokenizer
    return with_template(tokenizer, make_sequence_template(config, tokenizer.vocab))


def save_model(model: Model, folder: Path, overwrite: bool = False) -> None:
    """Write a folder whole or not at all; only a checkpoint is overwritten, and only when asked."""
    check_output_folder(folder, "folder", overwrite)
    with atomic_folder(folder) as temporary:
        write_model(model, temporary)
