"""The settings of a family as one table that works in both directions: config.json <-> ModelConfig.

A `SettingsTable` has three parts:

1. `default`: the ModelConfig that an empty config.json describes, with the defaults that `transformers` has.
2. `settings`: one row per setting: the path of our field, their key and, where the values differ, a pair of functions.
3. Two hooks for the settings that do not fit into a row: several of their keys make one of our fields, or the reverse.

Reading starts with the default model and applies every row, then the hook. Writing asks every row for its value, then
adds those of the hook. A family is described without loss when writing and reading gives the same model
(`config_io.hf_model_type`), so a table needs no list of the models that it does not cover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final, NamedTuple

from firth.core.errors import UserError, did_you_mean, quote
from firth.models.config import LMHead, ModelConfig

HFConfigDict = dict[str, Any]  # the contents of a config.json
FROM_DEFAULT: Final = object()  # the value of a missing key is that of the table's default model

# Properties of ModelConfig that resolve an optional field: the field, and when a value may be left to its default.
RESOLVED_FIELDS: dict[str, tuple[str, Callable[[ModelConfig, Any], bool]]] = {
    "head_size": ("head_dim", lambda config, size: size * config.num_heads == config.dim),
    "kv_heads": ("num_kv_heads", lambda config, heads: heads == config.num_heads),
    "decoder_layers": ("num_decoder_layers", lambda config, layers: layers == config.num_layers),
    "embed_width": ("embed_dim", lambda config, width: width == config.dim),
}


class Converter(NamedTuple):
    """A pair of functions between their value of a setting and ours."""

    from_hf: Callable[[Any], Any] = lambda value: value
    to_hf: Callable[[Any], Any] = lambda value: value


class Setting(NamedTuple):
    """One row: a field of ModelConfig and its key in config.json.

    `path` is a field, a field of a mechanism (`mlp.dim`), or a property that resolves an optional field; the rows of
    the fields that the property reads come first. `default` is their value where the key is missing. `equal_keys` are
    written with the same value; a file in which they differ describes a model that we do not have.
    """

    path: str
    key: str
    convert: Converter = Converter()
    default: Any = FROM_DEFAULT
    equal_keys: tuple[str, ...] = ()

    def read(self, hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
        """Return `config` with this field as config.json has it."""
        default = self.convert.to_hf(self.value(config)) if self.default is FROM_DEFAULT else self.default
        values = [self.convert.from_hf(hf_config.get(key, default)) for key in (self.key, *self.equal_keys)]
        if any(value != values[0] for value in values):
            keys = " and ".join((self.key, *self.equal_keys))
            raise UserError(f"config.json: {keys} differ. Firth supports this model_type only with equal values.")
        return set_field(config, self.path, values[0])

    def value(self, config: ModelConfig) -> Any:
        return attrgetter(self.path)(config)

    def write(self, config: ModelConfig) -> HFConfigDict:
        """Return the entries of config.json for this field."""
        try:
            value = self.value(config)
        except AttributeError:  # another mechanism, which has no such field
            value = None
        if value is None:
            raise UserError(f"config.json: {self.key} needs a value, and this model has no {self.path}.")
        return dict.fromkeys((self.key, *self.equal_keys), self.convert.to_hf(value))


def set_field(config: ModelConfig, path: str, value: Any) -> ModelConfig:
    """Return `config` with another value at `path`; an optional field stays None where that means the same."""
    if path in RESOLVED_FIELDS:
        field, is_default = RESOLVED_FIELDS[path]
        unset: Any = {field: None}
        value = getattr(replace(config, **unset), path) if value is None else value
        path, value = field, None if is_default(config, value) else value
    name, _, inner = path.partition(".")
    changed: Any = replace(getattr(config, name), **{inner: value}) if inner else value
    return replace(config, **{name: changed})


@dataclass(frozen=True)
class SettingsTable:
    """All settings of one family; see the top of this file."""

    default: ModelConfig
    settings: tuple[Setting, ...]
    read_rest: Callable[[HFConfigDict, ModelConfig], ModelConfig] = lambda hf_config, config: config
    write_rest: Callable[[ModelConfig], HFConfigDict] = lambda config: {}

    def read(self, hf_config: HFConfigDict) -> ModelConfig:
        """Return the model that a config.json describes, with the family's language-model head."""
        config = self.default
        for setting in self.settings:
            config = setting.read(hf_config, config)
        return self.read_rest(hf_config, config)

    def write(self, config: ModelConfig) -> HFConfigDict:
        """Return the settings of a model; one that the family does not describe fails or reads back differently."""
        hf_config: HFConfigDict = {}
        for setting in self.settings:
            if isinstance(config.head, LMHead) or not setting.path.startswith("head."):
                hf_config |= setting.write(config)
        return hf_config | self.write_rest(config)


# --- values that differ in spelling ---------------------------------------------------------------------------------

ACTIVATION_FROM_HF = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION_TO_HF = {"gelu": "gelu", "relu": "relu", "gelu-tanh": "gelu_new", "silu": "silu"}


def activation_from_hf(name: str) -> Any:
    """Return our name of an activation; `Any`, because each `MLPConfig` takes only some of them."""
    if name not in ACTIVATION_FROM_HF:
        raise UserError(
            f"config.json: the activation {quote(name)} is not supported. {did_you_mean(name, ACTIVATION_FROM_HF)}"
        )
    return ACTIVATION_FROM_HF[name]


ACTIVATION = Converter(activation_from_hf, ACTIVATION_TO_HF.__getitem__)


def sizes(dim: str, num_layers: str, num_heads: str) -> tuple[Setting, ...]:
    """Return the rows that every family has, by its names for width, layers and attention heads."""
    return (
        Setting("vocab_size", "vocab_size"),
        Setting("dim", dim),
        Setting("num_layers", num_layers),
        Setting("num_heads", num_heads),
    )


HIDDEN_SIZES = sizes("hidden_size", "num_hidden_layers", "num_attention_heads")  # BERT's names, which most have
