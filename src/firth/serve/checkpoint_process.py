"""`python -m firth.serve.checkpoint_process`: what checkpoints make of a text, one line of JSON for each.

The request comes as JSON on standard input: `text`, and `checkpoints` as pairs of a folder and a step. Each line is
printed as soon as its checkpoint is done, so that a process that is stopped has told what it knew. A checkpoint that
cannot be loaded, because the run removes it just now, has an `error` and costs no other one its sample.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from firth.core.console import set_quiet
from firth.core.errors import UserError
from firth.core.parse import parse_json
from firth.generate import GenerationConfig, fill, generate_results
from firth.generate.fill import can_fill
from firth.models import load_model

MAX_PARAMETERS = 300_000_000
NUM_GUESSES, NUM_NEW_TOKENS = 5, 24
SAMPLING = GenerationConfig(max_new_tokens=NUM_NEW_TOKENS, temperature=0.8, top_p=0.9)
BLANK_PATTERN = re.compile(r"\[MASK\]|<mask>|___")
DEFAULT_SENTENCE, DEFAULT_PROMPT = "The ___ is in the city.", "The"


def try_sample(folder: Path, step: int | None, text: str) -> dict[str, Any]:
    """Return what a checkpoint writes or fills in; or why it cannot."""
    found: dict[str, Any] = {"checkpoint": folder.name, "step": step, "text": "", "blanks": [], "error": ""}
    try:
        return found | sample_checkpoint(folder, text)
    except UserError as e:
        return found | {"error": str(e)}
    except Exception as e:
        return found | {"error": f"{folder.name} cannot be sampled ({type(e).__name__})."}


def sample_checkpoint(folder: Path, text: str) -> dict[str, Any]:
    """Return the words for the blanks of a text, or its continuation.

    Without a text, a model that fills blanks gets a sentence with one, and any other model a prompt.
    """
    model = load_model(folder)
    if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
        raise UserError(f"{folder.name} has more than {MAX_PARAMETERS:,} parameters: serve it as a model.")
    text = text or (DEFAULT_SENTENCE if can_fill(model) else DEFAULT_PROMPT)
    if BLANK_PATTERN.search(text):
        blanks = fill(model, text, NUM_GUESSES)
        return {
            "blanks": [
                {"guesses": [{"text": guess.text, "probability": guess.probability} for guess in blank.guesses]}
                for blank in blanks
            ]
        }
    (result,) = generate_results(model, [text], SAMPLING, logprobs=False)
    return {"text": result["text"]}


def main() -> None:
    request = parse_json(sys.stdin.read(), "the request")
    set_quiet()
    for folder, step in request["checkpoints"]:
        print(json.dumps(try_sample(Path(folder), step, request["text"])), flush=True)


if __name__ == "__main__":
    main()
