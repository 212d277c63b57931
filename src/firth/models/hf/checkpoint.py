"""Checkpoint folders: config.json, model.safetensors, the tokenizer and generation_config.json.

Each is a Hugging Face folder: `config_io` translates the settings, `convert` the tensors. A folder is written whole or
not at all, and no pickle is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from firth.core.console import warn
from firth.core.errors import UserError
from firth.core.files import atomic_folder, check_output_folder, read_json, read_object, write_json
from firth.models.config import Extra, Head, LMHead, ModelConfig, TaskHead, without_dropout
from firth.models.hf.config_io import OBJECTIVE_KEY, read_config, special_token_ids, to_hf_config
from firth.models.hf.convert import from_hf_tensors, to_hf_tensors, unexpected_tensors, unique_state_dict
from firth.models.hf.tensors import WEIGHTS_FILE, read_tensors, translate_disk_errors
from firth.models.init import skip_init
from firth.models.model import ForcedTokens, Model, get_forced_tokens, make_model
from firth.models.template import make_sequence_template
from firth.tokens import Tokenizer, Vocabulary, load_tokenizer
from firth.tokens.template import with_template

GENERATION_CONFIG_FILE = "generation_config.json"
EOS_TOKEN_KEY = "eos_token_id"
FORCED_TOKEN_KEYS = {"bos": "forced_bos_token_id", "eos": "forced_eos_token_id"}


@dataclass(frozen=True)
class GenerationConfigFile:
    """The keys of generation_config.json, or of config.json in older folders, that are read here."""

    allow_unknown_keys = True

    eos_token_id: int | tuple[int, ...] | None = None
    forced_bos_token_id: int | tuple[int, ...] | None = None
    forced_eos_token_id: int | tuple[int, ...] | None = None


def load_model(
    folder: str | Path, head: Head | None = None, extras: tuple[Extra, ...] = (), dropout: bool = True
) -> Model:
    """Load a checkpoint of ours or a Hugging Face folder; `head` replaces its head and extras.

    Without `dropout` the model trains without that of its config, which stays as it is.
    A missing language-model head is reported: only a task head is expected to start from random weights.
    """
    folder = Path(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    new_head = head is not None and (head != config.head or isinstance(head, TaskHead))
    model_config = config if head is None else replace(config, head=head, extras=extras)
    built = model_config if dropout else without_dropout(model_config)
    model = make_model_from_tensors(built, tensors, str(folder), new_head)
    model.config = model_config
    if head is None:
        model.objective = read_json(folder / "config.json").get(OBJECTIVE_KEY)
    load_generation_tokens(model, folder)
    if head is None and (unexpected := unexpected_tensors(tensors, model)):
        examples = ", ".join(unexpected[:3])
        warn(f"{folder}: {len(unexpected)} tensors are not part of this model and are ignored, such as {examples}.")
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


def make_model_from_tensors(
    config: ModelConfig, tensors: dict[str, Tensor], source: str, new_head: bool = False
) -> Model:
    """Return a model with these weights. A head or an extra that they lack is initialised at random, by torch's seed.

    Random weights are drawn only in that case, and then for the whole model: the head of a seed does not depend on
    what else a file has.
    """
    with skip_init():
        model = make_model(config)
    state = from_hf_tensors(tensors, config)
    if any(name not in state or state[name].shape != value.shape for name, value in unique_state_dict(model).items()):
        model = make_model(config)
    copy_weights(model, state, source, new_head)
    return model


def load_weights(
    model: Model, tensors: dict[str, Tensor], source: str, new_head: bool = False, strict: bool = False
) -> None:
    """Copy the tensors of a checkpoint into a model.

    Missing tensors of the backbone are an error; a missing head or extra stays initialised at random, unless `strict`.
    Another shape is an error, except for the old head under a `new_head`.
    """
    copy_weights(model, from_hf_tensors(tensors, model.config), source, new_head, strict)


def copy_weights(model: Model, state: dict[str, Tensor], source: str, new_head: bool, strict: bool = False) -> None:
    """Copy tensors that have our names, as `load_weights` does."""
    parameters = unique_state_dict(model)
    mismatched = [
        f"{name} is {tuple(state[name].shape)} in the file and {tuple(p.shape)} by the config"
        for name, p in parameters.items()
        if name in state and state[name].shape != p.shape and not (new_head and name.startswith("head."))
    ]
    if mismatched:
        raise UserError(f"{source}: the weights do not fit the config: " + "; ".join(mismatched[:5]))
    state = {k: v for k, v in state.items() if k in parameters and v.shape == parameters[k].shape}
    missing = [name for name in parameters if name not in state]
    if required := [name for name in missing if strict or not name.startswith(("head.", "extras."))]:
        raise UserError(
            f"{source}: {len(required)} tensors of the model are missing, such as {', '.join(required[:3])}."
        )
    model.has_random_head = any(name.startswith("head.") and parameters[name].ndim > 1 for name in missing)
    if missing and not new_head:
        examples = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        warn(f"{source} has no weights of its head ({examples}): they start at random.")
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def read_generation_settings(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file with a checkpoint's generation settings, where `transformers` looks for it, and its contents."""
    path = folder / GENERATION_CONFIG_FILE
    path = path if path.is_file() else folder / "config.json"
    return path, read_object(path, GenerationConfigFile)


def read_eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...] | None:
    """Return the end tokens that a checkpoint lists; None for a single one, which the tokenizer knows."""
    path, settings = read_generation_settings(folder)
    token_ids = settings.get(EOS_TOKEN_KEY)
    if token_ids is None or type(token_ids) is int:
        return None
    if not token_ids:
        raise UserError(f"{path}: {EOS_TOKEN_KEY} is [], and must be the id of a token or a list of such ids.")
    if wrong := [token for token in token_ids if not 0 <= token < config.vocab_size]:
        size = f"{config.vocab_size:,}"
        raise UserError(
            f"{path}: {EOS_TOKEN_KEY} has the id {wrong[0]}, and the vocabulary of this model only {size} tokens."
        )
    return tuple(token_ids)


def eos_settings(model: Model) -> dict[str, list[int]]:
    """Return the entry for listed end tokens; task heads of BART and T5 in `transformers` need a single one."""
    single = model.config.architecture == "encoder-decoder" and not isinstance(model.config.head, LMHead)
    return {} if model.eos_token_ids is None or single else {EOS_TOKEN_KEY: list(model.eos_token_ids)}


def load_generation_tokens(model: Model, folder: Path) -> None:
    """Set the forced tokens and end tokens of a model from a checkpoint."""
    model.forced_tokens = read_forced_tokens(folder)
    model.eos_token_ids = read_eos_token_ids(folder, model.config) if model.config.architecture != "encoder" else None


def read_forced_tokens(folder: Path) -> ForcedTokens:
    """Return the forced first and last token of generated texts."""
    _, settings = read_generation_settings(folder)
    values = {name: settings.get(key) for name, key in FORCED_TOKEN_KEYS.items()}
    token_ids = {name: min(value, default=None) if isinstance(value, list) else value for name, value in values.items()}
    return ForcedTokens(**token_ids)


def forced_token_settings(model: Model, vocab: Vocabulary) -> dict[str, int | None]:
    """Return the entries for forced tokens. BART in `transformers` forces an end token unless the key is null."""
    forced_tokens = get_forced_tokens(model, vocab)
    settings = {key: getattr(forced_tokens, name) for name, key in FORCED_TOKEN_KEYS.items()}
    bart = model.config.adds_bos and model.config.architecture == "encoder-decoder"
    return {
        name: token
        for name, token in settings.items()
        if token is not None or (bart and name == FORCED_TOKEN_KEYS["eos"])
    }


def generation_config_json(model: Model, vocab: Vocabulary) -> dict[str, Any]:
    settings = special_token_ids(model.config, vocab) | forced_token_settings(model, vocab) | eos_settings(model)
    return {k: v for k, v in settings.items() if v is not None}


def write_model(model: Model, folder: Path) -> None:
    """Write the files of a Hugging Face folder into an existing folder."""
    write_config_files(model, folder)
    with translate_disk_errors(folder):
        save_file(to_hf_tensors(model), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def write_config_files(model: Model, folder: Path) -> None:
    """Write all files but the weights."""
    tokenizer = model.tokenizer
    vocab = tokenizer.vocab if tokenizer is not None else None
    note = {} if model.objective is None else {OBJECTIVE_KEY: model.objective}
    forced = forced_token_settings(model, vocab) if vocab is not None and model.config.architecture != "encoder" else {}
    write_json(folder / "config.json", to_hf_config(model.config, vocab) | forced | eos_settings(model) | note)
    if tokenizer is not None and vocab is not None:
        with_special_token_template(tokenizer, model.config).save(folder)
        if model.config.family == "xlnet":  # `transformers` classifies by the last position of a row
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
    """Write a folder atomically; an existing checkpoint is replaced only with `overwrite`."""
    check_output_folder(folder, "folder", overwrite)
    with atomic_folder(folder) as temporary:
        write_model(model, temporary)
