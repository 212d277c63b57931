"""The model card of an export for another runtime: the card of the checkpoint, with how to load the exported files.

A person may have edited the checkpoint's card, so everything else stays as it is. The name of the repository is known
when the folder is pushed: until then the card says OWNER/NAME.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from firth.core.errors import UserError
from firth.core.files import MODEL_CARD_FILE, check_link_stays_inside, read_utf8, write_text
from firth.evaluate.card import render_model_card

UNKNOWN_REPO = "OWNER/NAME"
LIBRARY = re.compile(r"^library_name: .*$", re.MULTILINE)
LOADING = re.compile(r"^## How to load\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def write_export_card(checkpoint: Path, temporary: Path, target: Path, library: str, loading: str) -> None:
    """Write README.md of an export that will be renamed to `target`; a card that is there already stays.

    `library` is the `library_name` of the Hub, `loading` the section 'How to load'.
    """
    if (target / MODEL_CARD_FILE).is_file():
        return
    file = checkpoint / MODEL_CARD_FILE
    check_link_stays_inside(file, checkpoint)
    try:
        card = read_utf8(file) if file.is_file() else render_model_card(checkpoint)
    except UserError:  # without a tokenizer there are no facts to show
        return
    section = f"## How to load\n\n{loading}\n"
    card = LOADING.sub(lambda _: section, card, count=1) if LOADING.search(card) else f"{card.rstrip()}\n\n{section}"
    write_text(temporary / MODEL_CARD_FILE, LIBRARY.sub(f"library_name: {library}", card, count=1))


def describe_onnx_loading(files: Sequence[str]) -> str:
    sessions = "\n".join(
        f'{file.removesuffix(".onnx")} = onnxruntime.InferenceSession(f"{{folder}}/{file}")' for file in files
    )
    return (
        "```python\nimport onnxruntime\nfrom huggingface_hub import snapshot_download\n"
        "from tokenizers import Tokenizer\n\n"
        f'folder = snapshot_download("{UNKNOWN_REPO}")\n{sessions}\n'
        'tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")\n```\n\n'
        "The inputs and outputs have names: `session.get_inputs()` and `session.get_outputs()` list them."
    )


def describe_gguf_loading(file: str, architecture: str) -> str:
    """How to run a GGUF file; `architecture` is that of the model: encoders have embeddings, and no prompt."""
    program = "llama-embedding" if architecture == "encoder" else "llama-cli"
    lines = [
        f"hf download {UNKNOWN_REPO} {file} --local-dir .",
        f'{program} -m {file} -p "The old ship"',
        *([f"ollama run hf.co/{UNKNOWN_REPO}"] if architecture == "decoder" else []),
    ]
    return "```\n" + "\n".join(lines) + "\n```\n\n`llama-cli` and `llama-embedding` are programs of llama.cpp."
