"""Export a checkpoint as GGUF, for llama.cpp and the programs that are built on it (Ollama, LM Studio).

The file holds everything: settings (`gguf_layout.py`), tokenizer (`gguf_tokenizer.py`) and weights
(`gguf_writer.py`). A Modelfile beside it lets `ollama create NAME -f Modelfile` take it in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import atomic_folder, format_bytes, write_text
from firth.evaluate.export import load_for_export
from firth.evaluate.export_card import describe_gguf_loading, write_export_card
from firth.evaluate.gguf_layout import find_architecture, model_metadata
from firth.evaluate.gguf_tokenizer import make_gguf_tokenizer
from firth.evaluate.gguf_writer import FILE_TYPES, QUANTIZATION_VERSION, write_gguf
from firth.models import Model, make_prompt_suffix, make_sequence_template
from firth.tasks.chat import ASSISTANT_ROLE, CHAT_TEMPLATE_KEY, build_chat_template, role_token
from firth.tasks.prompts import answers_in_text
from firth.tasks.recipe import read_task_file
from firth.tasks.template import DELIMITER_TOKEN
from firth.tokens import Tokenizer

MODELFILE = "Modelfile"


def gguf_file(dtype: str) -> str:
    return f"model-{dtype}.gguf"


def write_gguf_folder(checkpoint: Path, folder: Path, dtype: str = "f16", check: bool = False) -> dict[str, Any]:
    """Write model-DTYPE.gguf, a Modelfile and a model card; return the facts of `export`. `check` runs llama.cpp."""
    model = load_for_export(checkpoint).eval()
    architecture = find_architecture(model.config)
    if model.tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer, and a GGUF file holds one.")
    tokenizer, notes = make_gguf_tokenizer(model.tokenizer, model.config)
    if model.config.mlp.activation == "gelu":
        notes.append(
            "llama.cpp computes GELU by its tanh approximation, and this model was trained with the exact one."
        )
    metadata: dict[str, Any] = {
        "general.architecture": architecture.name,
        "general.name": checkpoint.resolve().parent.name if checkpoint.name == "final" else checkpoint.resolve().name,
        "general.file_type": FILE_TYPES[dtype],
        "general.quantization_version": QUANTIZATION_VERSION,
        **model_metadata(model, architecture),
        **tokenizer,
    }
    tensors = {name: value.detach().float().numpy() for name, value in architecture.tensors(model)}
    with atomic_folder(folder, "gguf") as temporary:
        write_gguf(temporary / gguf_file(dtype), metadata, tensors, dtype)
        if model.config.architecture != "encoder-decoder":  # Ollama has no encoder-decoders
            facts = read_task_file(checkpoint)
            write_text(temporary / MODELFILE, make_modelfile(model, model.tokenizer, dtype, facts))
        loading = describe_gguf_loading(gguf_file(dtype), model.config.architecture)
        write_export_card(checkpoint, temporary, folder, "gguf", loading)
    path = folder / gguf_file(dtype)
    for note in notes:
        say(note)
    result = {"file": path.name, "bytes": path.stat().st_size, "architecture": architecture.name, "notes": notes}
    say(f"{path.name}: {architecture.name}, {len(tensors)} tensors, {format_bytes(path.stat().st_size)}.")
    if check:
        from firth.evaluate.gguf_check import compare_with_llama_cpp

        result |= compare_with_llama_cpp(model, path, dtype)
    return result


def make_modelfile(model: Model, tokenizer: Tokenizer, dtype: str, facts: Mapping[str, Any]) -> str:
    """Return a Modelfile: the file, and for a decoder its template, end token and context length.

    A model that only continues texts gets the prompt as it is, one that answers gets it as in its fine-tuning, which
    `facts` of task.json describe. Firth's own chat template is translated to Ollama's
    language; any other is left to Ollama, which reads it from the GGUF file.
    """
    lines, config = [f"FROM ./{gguf_file(dtype)}"], model.config
    if config.architecture != "decoder":
        return lines[0] + "\n"
    end = tokenizer.backend.id_to_token(make_sequence_template(config, tokenizer.vocab).eos_id)
    chat = tokenizer.config.get(CHAT_TEMPLATE_KEY)
    if not chat:
        lines.append(f'TEMPLATE """{prompt_template(model, tokenizer, facts)}"""')
    elif chat == build_chat_template(tokenizer, config):
        message = "<|{{ .Role }}|> {{ .Content }}"
        ended = f'{{{{ if eq .Role "{ASSISTANT_ROLE}" }}}}{end}{{{{ end }}}}'
        prompt = role_token(ASSISTANT_ROLE)
        lines.append(f'TEMPLATE """{{{{ range .Messages }}}}{message}{ended}{{{{ end }}}}{prompt}"""')
    lines.append(f'PARAMETER stop "{end}"')
    if (length := config.max_length or getattr(config.position, "length", None)) is not None:
        lines.append(f"PARAMETER num_ctx {length}")
    return "\n".join(lines) + "\n"


def prompt_template(model: Model, tokenizer: Tokenizer, facts: Mapping[str, Any]) -> str:
    """Return a prompt in Ollama's language: with the prefix of a task, and the tokens between prompt and answer."""
    answers = answers_in_text(model.config, facts)
    ids = make_prompt_suffix(model.config, tokenizer.vocab)
    delimiter = tokenizer.backend.token_to_id(DELIMITER_TOKEN)
    if answers and not ids and delimiter is not None:
        ids = (delimiter,)
    prefix = f"{{{{ {go_string(facts['prefix'])} }}}}" if answers and facts.get("prefix") else ""
    return prefix + "{{ .Prompt }}" + "".join(str(tokenizer.backend.id_to_token(i)) for i in ids)


def go_string(text: str) -> str:
    """Return a string literal of Go, the language of Ollama's templates.

    JSON's pairs of surrogates are no characters there, and Ollama drops unprintable ones that are not escaped.

    >>> print(go_string('a "😀"'))
    "a \\"\\U0001f600\\""
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
