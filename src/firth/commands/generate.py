"""Commands that write text: `generate`, `fill`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.core.console import progress, warn
from firth.core.errors import UserError
from firth.generate.config import CONSTRAINTS, make_generation_config
from firth.static.ngram import is_ngram, load_ngram
from firth.tasks.recipe import read_task_file

if TYPE_CHECKING:
    from firth.generate.fill import Blanks
    from firth.models import Model


MAX_CONCURRENT_SEQUENCES = 16  # sequences of one generation batch, beams included
MAX_QUEUED_SEQUENCES = 1024  # the same on a GPU, where sequences wait for those before them


def generate(
    checkpoint: str | Path | Model,
    prompt: str | Sequence[str],
    chat: bool | None = None,
    bf16: bool = False,
    draft: str | Path | Model | None = None,
    best_of: int | None = None,
    reward: str | Path | None = None,
    **settings: Any,
) -> str | list[str]:
    """Continue a prompt, or several. `settings` are fields of `GenerationConfig`: temperature=0.8.

    One prompt gives a text; several, or num_return_sequences above 1, give a list. A checkpoint that was fine-tuned to
    answer gets the prompt in the format of its training, and returns the answer alone, with the length and the beams
    that it was scored with. `chat` puts the prompt into the chat template as a user's message. A checkpoint is computed
    on the GPU where there is one, with `bf16` in bfloat16; a model stays where it is. `draft` is a smaller model with
    the same tokenizer that proposes tokens (speculative decoding): the same greedy text, or the same distribution.

    `best_of` draws this many samples for each prompt, and returns the one that the checkpoint `reward`, a reward model,
    scores highest. `json_schema`, `regex`, `choices` or `grammar` give structured output: the text alone, without the
    prompt.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if best_of is not None or reward is not None:
        ranked = generate_best_of(checkpoint, prompts, best_of, reward, settings, chat, bf16, draft, logprobs=False)
        results = [result for result in ranked if result["best"]]
    elif isinstance(checkpoint, str | Path) and is_ngram(checkpoint):
        results = generate_with_ngram(checkpoint, prompts, settings)
    else:
        model, encoded, defaults = load_for_generation(checkpoint, prompts, chat, bf16)
        results = generate_in_batches(model, encoded, defaults | settings, load_draft(draft, bf16), logprobs=False)
    texts = [result["text"] for result in results]
    return texts[0] if isinstance(prompt, str) and len(texts) == 1 else texts


def generate_best_of(
    checkpoint: str | Path | Model,
    prompts: Sequence[str],
    best_of: int | None,
    reward: str | Path | None,
    settings: Mapping[str, Any],
    chat: bool | None = None,
    bf16: bool = False,
    draft: str | Path | Model | None = None,
    logprobs: bool = True,
) -> list[dict[str, Any]]:
    """Draw `best_of` samples for each prompt; return them with their `reward`, each prompt's from best to worst."""
    from firth.tasks.best_of import RewardModel, best_of_settings, check_reward_model, rank_by_reward

    if best_of is None or reward is None:
        missing = "--best-of N, the number of samples" if best_of is None else "--reward CHECKPOINT, which scores them"
        raise UserError(f"--best-of and --reward belong together: add {missing}.")
    best_of_settings(best_of, settings, {})  # mistakes show before a model is loaded
    check_reward_model(reward)
    if isinstance(checkpoint, str | Path) and is_ngram(checkpoint):
        results = generate_with_ngram(checkpoint, prompts, best_of_settings(best_of, settings, {}))
    else:
        model, encoded, defaults = load_for_generation(checkpoint, prompts, chat, bf16)
        chosen = best_of_settings(best_of, settings, defaults)
        results = generate_in_batches(model, encoded, chosen, load_draft(draft, bf16), logprobs)
    return rank_by_reward(results, prompts, RewardModel(reward).score)


def generate_with_ngram(
    checkpoint: str | Path, prompts: Sequence[str], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Generate with an n-gram model; the same results as `generate_in_batches`."""
    from firth.generate.ngram import generate_ngram_results

    return generate_ngram_results(load_ngram(checkpoint), prompts, make_generation_config(None, dict(settings)))


def load_for_generation(
    checkpoint: str | Path | Model, prompts: Sequence[str], chat: bool | None = None, bf16: bool = False
) -> tuple[Model, list[str | list[int]], dict[str, Any]]:
    """Return a model, its prompts in the format of its fine-tuning, and its generation defaults.

    A model that is already loaded has no task file, and gets the prompts unchanged. It also stays on its device.
    """
    from firth.generate.decode_state import load_language_model
    from firth.tasks import encode_task_prompts, finetuned_generation_settings

    if not isinstance(checkpoint, str | Path):
        return checkpoint, encode_task_prompts(checkpoint, {}, prompts, chat), {}
    model, facts = load_language_model(checkpoint), read_task_file(Path(checkpoint))
    encoded = encode_task_prompts(model, facts, prompts, chat)
    model = move_for_generation(model, bf16)
    return model, encoded, finetuned_generation_settings(model, facts)


def move_for_generation(model: Model, bf16: bool = False) -> Model:
    """Put a model on the GPU, if there is one; with `bf16` round its weights to bfloat16."""
    import torch

    return model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16 if bf16 else None)


def load_draft(draft: str | Path | Model | None, bf16: bool = False) -> Model | None:
    """Load the draft model of speculative decoding."""
    from firth.models import load_model

    return move_for_generation(load_model(draft), bf16) if isinstance(draft, str | Path) else draft


def with_structured_length(model: Model, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation settings, in which structured output has a length that suits it unless one is given."""
    from firth.generate.text import default_structured_tokens

    is_structured = any(settings.get(name) is not None for name in CONSTRAINTS)
    return ({"max_new_tokens": default_structured_tokens(model)} if is_structured else {}) | dict(settings)


def generate_in_batches(
    model: Model,
    prompts: Sequence[str | list[int]],
    settings: Mapping[str, Any],
    draft: Model | None = None,
    logprobs: bool = True,
) -> list[dict[str, Any]]:
    """Run `generate_results` on all prompts, a batch at a time.

    On a GPU a batch may be large: prompts wait until a sequence before them has ended.
    """
    from firth.generate import generate_results
    from firth.generate.text import describe_incomplete

    config = make_generation_config(None, with_structured_length(model, settings))
    results: list[dict[str, Any]] = []
    num_sequences = MAX_QUEUED_SEQUENCES if model.embed.tokens.weight.is_cuda else MAX_CONCURRENT_SEQUENCES
    size = max(1, (MAX_CONCURRENT_SEQUENCES if config.num_beams > 1 else num_sequences) // config.num_beams)
    size = max(1, size // config.num_return_sequences)
    with progress("generating", "texts", len(prompts) * config.num_return_sequences) as shown:
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            results += generate_results(model, part, config, first, shown.advance, draft, logprobs)
    if problem := describe_incomplete(results, config):
        warn(problem)
    return results


def fill(checkpoint: str | Path | Model, text: str, top: int = 5, bf16: bool = False) -> Blanks:
    """The `top` most likely words for each blank (`___`) of a text.

    A checkpoint is computed on the GPU where there is one, with `bf16` in bfloat16; a model stays where it is.
    """
    from firth.generate import fill as fill_blanks
    from firth.generate.decode_state import load_language_model

    if isinstance(checkpoint, str | Path):
        checkpoint = move_for_generation(load_language_model(checkpoint), bf16)
    return fill_blanks(checkpoint, text, top)
