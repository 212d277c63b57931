"""MobileBERT. Its teacher IB-BERT has no architecture in `transformers`: attention there reads narrow states only."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models import presets
from firth.models.config import ClassificationHead, LMHead, ModelConfig, MultipleChoiceHead
from firth.models.hf.bert import BERT_DROPOUT_KEYS, BERT_SETTINGS, bert_embedding_rules, token_task_architectures
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules
from firth.models.hf.settings import HFConfigDict, Setting, SettingsTable, set_field


def mobilebert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "mobilebert.embeddings")
    yield from linear_rules("embed.trigrams", "mobilebert.embeddings.embedding_transformation")
    for i in range(config.num_layers):
        yield from bottleneck_rules(config, f"stack.blocks.{i}", f"mobilebert.encoder.layer.{i}")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "cls.predictions.transform.dense")
        yield from linear_rules("head.norm", "cls.predictions.transform.LayerNorm")
        yield TensorRule("head.extra_weight", ("cls.predictions.dense.weight",), transposed=True)
        yield TensorRule("head.bias", ("cls.predictions.bias",))
    if config.get_extra("pair") is not None:
        yield from linear_rules("extras.pair.pooler", "mobilebert.pooler.dense")
        yield from linear_rules("extras.pair.out", "cls.seq_relationship")


def bottleneck_rules(config: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of one block; their last MLP has other names than those before it."""
    spec = config.bottleneck
    assert spec is not None
    inputs = {"input": "input"} | ({"qk_input": "attention"} if spec.attention_input == "shared-qk" else {})
    for name, part in inputs.items():
        yield from linear_rules(f"{ours}.{name}.dense", f"{theirs}.bottleneck.{part}.dense")
        yield from linear_rules(f"{ours}.{name}.norm", f"{theirs}.bottleneck.{part}.LayerNorm")
    for name in ("query", "key", "value"):
        yield from linear_rules(f"{ours}.attention.{name}", f"{theirs}.attention.self.{name}")
    yield from linear_rules(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
    yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
    for i in range(spec.num_mlps):
        mlp = theirs if i == spec.num_mlps - 1 else f"{theirs}.ffn.{i}"
        yield from linear_rules(f"{ours}.mlps.{i}.up", f"{mlp}.intermediate.dense")
        yield from linear_rules(f"{ours}.mlps.{i}.down", f"{mlp}.output.dense")
        yield from linear_rules(f"{ours}.mlp_norms.{i}", f"{mlp}.output.LayerNorm")
    yield from linear_rules(f"{ours}.output", f"{theirs}.output.bottleneck.dense")
    yield from linear_rules(f"{ours}.output_norm", f"{theirs}.output.bottleneck.LayerNorm")


def read_attention_input(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    if hf_config.get("use_bottleneck_attention", False):
        return set_field(config, "bottleneck.attention_input", "narrow")
    if not hf_config.get("key_query_shared_bottleneck", True):
        raise UserError(
            "config.json: use_bottleneck_attention and key_query_shared_bottleneck are both false. transformers cannot "
            "run such a model."
        )
    return config


def write_attention_input(config: ModelConfig) -> HFConfigDict:
    reads = config.bottleneck.attention_input if config.bottleneck is not None else "shared-qk"
    return {"use_bottleneck_attention": reads == "narrow", "key_query_shared_bottleneck": reads == "shared-qk"}


MOBILEBERT_DEFAULT = presets.mobilebert(24, 512, 4, 128)
MOBILEBERT_SETTINGS = SettingsTable(
    MOBILEBERT_DEFAULT,
    (
        *BERT_SETTINGS,
        Setting("embed_dim", "embedding_size"),
        Setting("bottleneck.dim", "intra_bottleneck_size"),
        Setting("bottleneck.num_mlps", "num_feedforward_networks"),
    ),
    read_attention_input,
    write_attention_input,
)
# `classifier_activation` is the pooler: without it a classifier reads the first state itself.
MOBILEBERT_HEAD_KEYS = BERT_DROPOUT_KEYS | {"has_pooler": "classifier_activation"}
MOBILEBERT_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "MobileBertForSequenceClassification",
        ClassificationHead((), has_pooler=True, bias=True),
        "classifier",
        "mobilebert.pooler.dense",
        settings=MOBILEBERT_HEAD_KEYS,
    ),
    TaskArchitecture(
        "MobileBertForMultipleChoice",
        MultipleChoiceHead(has_pooler=True, bias=True),
        "classifier",
        "mobilebert.pooler.dense",
        settings=MOBILEBERT_HEAD_KEYS,
    ),
    *token_task_architectures("MobileBert"),
)
MOBILEBERT_LAYOUT = HFLayout(
    "mobilebert",
    mobilebert_rules,
    MOBILEBERT_SETTINGS,
    lm_architecture="MobileBertForMaskedLM",
    task_architectures=MOBILEBERT_TASK_ARCHITECTURES,
    pooler="mobilebert.pooler.dense",
    pair_architecture="MobileBertForPreTraining",
    prefix="mobilebert.",
    fixed_settings={
        "normalization_type": "no_norm",
        "tie_word_embeddings": True,
        "trigram_input": True,
        "use_bottleneck": True,
    },
    aliases={
        "mobilebert.embeddings.word_embeddings.weight": ("cls.predictions.decoder.weight",),
        "cls.predictions.bias": ("cls.predictions.decoder.bias",),
    },
    unused_patterns=(
        "mobilebert.embeddings.position_ids",
        "mobilebert.encoder.layer.*.bottleneck.attention.*",  # in the file too where attention reads `input`
        "mobilebert.pooler.*",
        "cls.seq_relationship.*",
    ),
)
