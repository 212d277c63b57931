"""config.json, in both directions: which family of `transformers` describes a model, and by which settings.

A model is written as its family's `model_type` where that loses nothing: the settings that are written must read back
as the same model (`hf_model_type`). Any other model has `model_type` "firth" and its whole ModelConfig as JSON.
Keys that begin with `firth_` stand beside a family's own settings; `transformers` ignores them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote, reason, shorten
from firth.core.files import read_json
from firth.core.serialization import TYPE_KEY, from_dict, to_dict
from firth.models.config import (
    ClassificationHead,
    DiscriminatorHead,
    EmbeddingHead,
    GeneratorConfig,
    LearnedPosition,
    ModelConfig,
    MultiTaskHead,
    RegressionHead,
    SentencePairHead,
    TaskHead,
    TokenClassificationHead,
    convert_head_type,
    inherit_dropout,
)
from firth.models.hf.layout import EXTRAS_KEY, HEAD_KEY, HFLayout, has_architecture, label_names
from firth.models.hf.registry import FAMILY_LAYOUTS, MODEL_TYPE_LAYOUTS
from firth.models.hf.settings import ACTIVATION_FROM_HF, ACTIVATION_TO_HF
from firth.models.hf.tensors import list_weight_files, read_tensors
from firth.models.parameters import count_backbone_parameters
from firth.models.prompt_form import prompt_form_of_objective
from firth.models.template import make_sequence_template
from firth.tokens import Vocabulary

FIRTH_MODEL_TYPE = "firth"
NGRAM_MODEL_TYPE = "firth-ngram"
FAMILY_KEY = "firth_family"  # which of the families that share a layout
OBJECTIVE_KEY = "firth_objective"  # the objective of pretraining, by name and with its settings
PROMPT_FORM_KEY = "firth_prompt_form"  # ModelConfig.prompt_form, where it is not causal
ADDS_BOS_KEY = "firth_adds_bos"  # ModelConfig.adds_bos, where it is not the family's default
DROPOUT_KEY = "firth_dropout"  # the rates that the family's own settings cannot say: training alone reads them
REGRESSION_PROBLEM_TYPE = "regression"
HEAD_VALUE_FROM_HF = ACTIVATION_FROM_HF | {"cls": "first"}  # values in the settings of task heads
HEAD_VALUE_TO_HF = ACTIVATION_TO_HF | {"first": "cls"}


def hf_model_type(config: ModelConfig, vocab: Vocabulary | None = None) -> str:
    """Return the `model_type` that describes this model (with this vocabulary) without loss; else `firth`.

    Extras are saved beside a family's tensors. A generator is different: it takes the LM head from the backbone, and
    only ELECTRA has an architecture for a backbone without one.
    """
    layout = _exact_layout(config, vocab)
    generator = config.get_extra("generator")
    own = isinstance(generator, GeneratorConfig) and (
        layout is None or layout.discriminator_architecture is None or generator.disentangle_embeddings
    )
    own = own or config.get_extra("features") is not None  # the head reads other states than the last
    own = own or isinstance(config.head, MultiTaskHead)
    own = own or config.has_bidirectional_decoder  # no decoder of `transformers` attends to later tokens
    return FIRTH_MODEL_TYPE if layout is None or own else layout.model_type


def _exact_layout(config: ModelConfig, vocab: Vocabulary | None = None) -> HFLayout | None:
    """Return the layout that describes this backbone and its head without loss."""
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
    """Return the config with defaults resolved, so that equal models compare equal."""
    mlp, head = replace(config.mlp, dropout=config.mlp_dropout), config.head
    if isinstance(head, TaskHead) and not isinstance(head, EmbeddingHead | MultiTaskHead):
        head = replace(head, dropout=None, dropout_before_pooler=False)  # used in training only
    if isinstance(head, ClassificationHead):
        head = replace(head, class_weights=None)
    if isinstance(head, RegressionHead):
        head = replace(head, target_std=1.0)
    sizes: dict[str, Any] = dict(
        head_dim=config.head_size,
        num_decoder_layers=config.decoder_layers,
        num_shared=min(config.num_shared, config.num_layers),
    )
    return replace(config, mlp=mlp, head=head, extras=(), **sizes)


def backbone_layout(config: ModelConfig) -> HFLayout | None:
    """Return the layout that describes this backbone, whatever its head: pretrained weights are read by it."""
    layout = FAMILY_LAYOUTS.get(config.family)
    if layout is None:
        return None
    try:
        read_back = layout.settings.read({"model_type": layout.model_type, **layout.settings.write(config)})
    except (KeyError, TypeError, UserError):
        return None
    return _exact_layout(replace(config, head=read_back.head))


def _to_layout_settings(config: ModelConfig, layout: HFLayout) -> dict[str, Any]:
    """Return the settings of a model; a model that the layout does not describe reads back differently."""
    hf = {
        "model_type": layout.model_type,
        "architectures": [_hf_architecture(config, layout)],
        **layout.settings.write(config),
    }
    read_back = layout.settings.read(hf)
    if config.family != MODEL_TYPE_LAYOUTS[layout.model_type][0]:
        hf[FAMILY_KEY] = config.family
    if config.adds_bos != read_back.adds_bos:
        hf[ADDS_BOS_KEY] = config.adds_bos
    if config.prompt_form != "causal":
        hf[PROMPT_FORM_KEY] = config.prompt_form
    rates, known = _dropout_rates(config), _dropout_rates(read_back)
    if rates != known:
        hf[DROPOUT_KEY] = {name: rate for name, rate in rates.items() if rate != known[name]}
    if own := tuple(e for e in config.extras if not (isinstance(e, SentencePairHead) and layout.pair_architecture)):
        hf[EXTRAS_KEY] = to_dict(replace(config, extras=own))["extras"]
    return hf | (_head_to_hf(config, layout) if isinstance(config.head, TaskHead) else {})


def _dropout_rates(config: ModelConfig) -> dict[str, float]:
    return {
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "mlp_dropout": config.mlp_dropout,
        "layer_drop": config.layer_drop,
    }


def _with_dropout_rates(config: ModelConfig, rates: dict[str, float]) -> ModelConfig:
    """Return the config with these rates; the others stay."""
    rates = _dropout_rates(config) | rates
    mlp = replace(config.mlp, dropout=rates.pop("mlp_dropout"))
    return replace(config, mlp=mlp, **rates)  # type: ignore[arg-type]


def _head_to_hf(config: ModelConfig, layout: HFLayout) -> dict[str, Any]:
    """Return the entries of config.json for a task head."""
    head, task_architecture = config.head, layout.find_task_architecture(config.head)
    if task_architecture is None:
        return {HEAD_KEY: to_dict(replace(config, extras=()))["head"]}
    hf: dict[str, Any] = {}
    for field, key in task_architecture.settings.items():
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
    """Return the task head that a config.json names, or None."""
    if HEAD_KEY in hf_config:
        firth_head = from_dict(to_dict(config) | {"head": hf_config[HEAD_KEY]}, ModelConfig, source).head
        assert isinstance(firth_head, TaskHead)
        return firth_head
    task_architecture = next(
        (
            a
            for a in layout.task_architectures
            if has_architecture(hf_config, "For" + a.architecture.rpartition("For")[2])
        ),
        None,
    )
    if task_architecture is None:
        return (
            EmbeddingHead("mean")
            if layout.encoder_architecture and has_architecture(hf_config, layout.encoder_architecture)
            else None
        )
    head_settings = {
        field: hf_config[key] for field, key in task_architecture.settings.items() if hf_config.get(key) is not None
    }
    head: Any = replace(
        task_architecture.head,
        **{field: HEAD_VALUE_FROM_HF.get(value, value) for field, value in head_settings.items()},
    )
    if isinstance(head, ClassificationHead | TokenClassificationHead):
        head = replace(head, names=label_names(hf_config))
    if isinstance(head, ClassificationHead):
        # the default of `transformers`
        kind = hf_config.get("problem_type") or (REGRESSION_PROBLEM_TYPE if len(head.names) == 1 else None)
        head = convert_head_type(RegressionHead, head) if kind == REGRESSION_PROBLEM_TYPE else head
    return inherit_dropout(head, config)


def _hf_architecture(config: ModelConfig, layout: HFLayout) -> str:
    architecture: str | None
    if isinstance(config.head, TaskHead):
        task_architecture = layout.find_task_architecture(config.head)
        architecture = (
            layout.base_architecture
            if isinstance(config.head, EmbeddingHead)
            else task_architecture and task_architecture.architecture
        )
    elif isinstance(config.head, DiscriminatorHead) or (
        config.get_extra("generator") and layout.discriminator_architecture
    ):
        architecture = layout.discriminator_architecture
    else:
        architecture = (
            layout.pair_architecture
            if config.get_extra("pair") and layout.pair_architecture
            else layout.lm_architecture
        )
    if architecture is None:
        raise UserError(f"transformers has no {layout.model_type} with this head.")
    return architecture


def to_hf_config(config: ModelConfig, vocab: Vocabulary | None) -> dict[str, Any]:
    """Return the contents of config.json."""
    if hf_model_type(config, vocab) == FIRTH_MODEL_TYPE:
        hf: dict[str, Any] = {
            "model_type": FIRTH_MODEL_TYPE,
            "architectures": ["FirthModel"],
            FIRTH_MODEL_TYPE: to_dict(config),
        }
    else:
        hf = _to_layout_settings(config, FAMILY_LAYOUTS[config.family])
    hf["dtype"] = "float32"
    if vocab is None:
        return hf
    ids = special_token_ids(config, vocab)
    return hf | ids | (stack_token_ids(hf, ids, vocab) if config.family == "t5gemma" and "decoder" in hf else {})


def stack_token_ids(hf: dict[str, Any], ids: dict[str, int | None], vocab: Vocabulary) -> dict[str, Any]:
    """Return the settings of T5Gemma's two stacks with special tokens, which `transformers` reads there.

    `bos_token_id` of the decoder is its first token, which is our padding. A call without a mask hides the padding, so
    that the decoder names a token as padding that no text has: [MASK].
    """
    end, first = ids["eos_token_id"], ids["decoder_start_token_id"]
    padding = vocab.pad if vocab.mask is None else vocab.mask
    return {
        "encoder": hf["encoder"] | {"pad_token_id": vocab.pad, "bos_token_id": first, "eos_token_id": end},
        "decoder": hf["decoder"] | {"pad_token_id": padding, "bos_token_id": first, "eos_token_id": end},
    }


def special_token_ids(config: ModelConfig, vocab: Vocabulary) -> dict[str, int | None]:
    """Return the ids of the special tokens, under the keys of `transformers`."""
    facts = {"pad_token_id": vocab.pad, "bos_token_id": vocab.bos, "eos_token_id": vocab.eos}
    if config.architecture == "encoder-decoder":
        frame = make_sequence_template(config, vocab)
        facts |= {"eos_token_id": frame.eos_id, "decoder_start_token_id": frame.decoder_start_id}
        if config.adds_bos:
            facts |= {"bos_token_id": frame.prefix_ids[0]}
    return facts


def from_hf_config(hf_config: Any, source: str = "config.json") -> ModelConfig:
    """Return the ModelConfig that a config.json describes."""
    kind = hf_config.get("model_type") if isinstance(hf_config, dict) else None
    if kind == FIRTH_MODEL_TYPE:
        config = from_dict(hf_config.get(FIRTH_MODEL_TYPE), ModelConfig, source)
        recorded = prompt_form_of_objective(hf_config.get(OBJECTIVE_KEY))
        return replace(config, prompt_form=recorded) if config.prompt_form == "causal" else config
    if kind == NGRAM_MODEL_TYPE:
        raise UserError(
            f"{source}: a model of n-grams only counts, and has neither layers nor vectors. It can be scored "
            "(`firth evaluate --task perplexity`) and can write (`firth generate`)."
        )
    if not isinstance(kind, str) or kind not in MODEL_TYPE_LAYOUTS:
        raise UserError(
            f"{source}: model_type {quote(kind)} is not one that Firth knows. "
            + did_you_mean(str(kind), MODEL_TYPE_LAYOUTS)
        )
    try:
        config_dict = to_dict(_config_from_layout(hf_config, source))
        pair = (
            [{TYPE_KEY: SentencePairHead.__name__}]
            if MODEL_TYPE_LAYOUTS[kind][1].pair_architecture in (hf_config.get("architectures") or [])
            else []
        )
        config_dict["extras"] = [*pair, *hf_config.get(EXTRAS_KEY, config_dict["extras"])]
        objective = hf_config.get(OBJECTIVE_KEY)
        config_dict["prompt_form"] = hf_config.get(PROMPT_FORM_KEY, prompt_form_of_objective(objective))
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        raise UserError(f"{source}: a setting has a value of the wrong type ({reason(e)}).") from None
    return from_dict(config_dict, ModelConfig, source)  # checks the type of every value


def _config_from_layout(hf_config: dict[str, Any], source: str) -> ModelConfig:
    """Return the config of backbone and head, without extras."""
    name, layout = MODEL_TYPE_LAYOUTS[hf_config["model_type"]]
    for setting, value in layout.fixed_settings.items():
        if hf_config.get(setting, value) != value:
            kind = layout.model_type
            raise UserError(
                f"{source}: {setting} is {quote(hf_config[setting])}, and Firth knows {kind} only with {quote(value)}."
            )
    config = layout.settings.read(hf_config)
    if DROPOUT_KEY in hf_config:
        config = _with_dropout_rates(config, hf_config[DROPOUT_KEY])
    if (head := _head_from_hf(hf_config, layout, config, source)) is not None:
        config = replace(config, head=head, extras=())
    return replace(
        config, family=hf_config.get(FAMILY_KEY, name), adds_bos=hf_config.get(ADDS_BOS_KEY, config.adds_bos)
    )


def with_vocabulary(config: ModelConfig, vocab: Vocabulary) -> ModelConfig:
    """Return the config for this vocabulary. RoBERTa counts positions from its padding id + 1."""
    config, layout = replace(config, vocab_size=vocab.size), FAMILY_LAYOUTS.get(config.family)
    if layout is None or not layout.positions_follow_pad or not isinstance(config.position, LearnedPosition):
        return config
    length = config.position.length - config.position.offset
    return replace(config, position=LearnedPosition(length + vocab.pad + 1, vocab.pad + 1))


def check_config_sizes(config: ModelConfig, folder: Path) -> None:
    """Raise a UserError for a config that the weights beside it cannot belong to, before anything is allocated.

    A number takes at least one byte, so a model has no more parameters than its files have bytes. This costs nothing;
    `load_weights` compares the shapes one by one.
    """
    file = folder / "config.json"
    if wrong := config.problems_of_sizes():
        raise UserError(f"{file}: {'; '.join(wrong)}.")
    size = sum((folder / name).stat().st_size for name in list_weight_files(folder) if (folder / name).is_file())
    count = count_backbone_parameters(config)
    if size and count > size:
        raise UserError(
            f"{file}: the model of this config has {count:,} parameters, and the weights have only {size:,} bytes: "
            "they do not belong together, or the weights are damaged or cut short."
        )


def read_stored_objective(folder: Path) -> dict[str, Any]:
    """Return the objective that a checkpoint was trained with, as a recipe writes it; empty where it is not stored."""
    file = folder / "config.json"
    stored = (read_json(file) or {}).get(OBJECTIVE_KEY) or {}
    if not isinstance(stored, dict):
        raise UserError(f"{file}: {OBJECTIVE_KEY} is {shorten(stored)}, and must be a mapping of settings.")
    return {name: value for name, value in stored.items() if name != "name"}


def read_config(folder: str | Path) -> ModelConfig:
    """Return the ModelConfig of a checkpoint folder."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        inside = next((p for p in (folder / "final", *sorted(folder.glob("*/final"))) if p.is_dir()), None)
        hint = f" Did you mean {inside}?" if inside else ""
        reason = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a checkpoint: {reason}.{hint}")
    config = from_hf_config(read_json(folder / "config.json"), str(folder / "config.json"))
    check_config_sizes(config, folder)
    layout = FAMILY_LAYOUTS.get(config.family)
    if layout is None or layout.refine_config is None:
        return config
    return layout.refine_config(config, lambda *names: read_tensors(folder, names))
