"""Generation from text to text: add special tokens to prompts, decode new tokens, find stop strings, stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from firth.core.console import warn
from firth.core.errors import UserError, quote
from firth.generate.config import GenerationConfig, make_generation_config
from firth.generate.constraint import Constraint
from firth.generate.decode_state import check_can_generate, require_tokenizer
from firth.generate.loop import GeneratedSequence, generate_sequences, iterate_new_ids, model_constraint
from firth.generate.speculative import generate_speculative
from firth.models import EncoderDecoder, Model, make_prompt_suffix, make_sequence_template
from firth.tokens import TokenIds

Prompt = str | TokenIds  # a text, or ids that contain their special tokens
MAX_STRUCTURED_TOKENS = 512  # default length of structured output: a text that is cut is of no use
REPLACEMENT_CHAR = "\ufffd"  # decodes an incomplete UTF-8 character


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
    **options: Any,
) -> list[str]:
    """Return prompt and continuation (decoders, UniLM), or the answer alone (encoder-decoders, prompts given as ids).

    Options are a `GenerationConfig` or its fields: `generate(model, ["The"], temperature=0.8)`. Structured output comes
    without the prompt.
    """
    prompt_texts, sequences = generate_prompt_texts(
        model, prompts, make_generation_config(generation_config, options), use_cache, logprobs=False
    )
    return [p.full_text(new.tokens) for p, new in zip(prompt_texts, sequences, strict=True)]


def generate_results(
    model: Model,
    prompts: Sequence[Prompt],
    generation_config: GenerationConfig | None = None,
    first_prompt: int = 0,
    on_finished: Callable[[int], None] | None = None,
    draft: Model | None = None,
    logprobs: bool = True,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return one JSON-ready dict per generated text.

    `prompt` is the prompt's index, `text` the result of `generate`, `new` the text without the prompt; `tokens`,
    `logprobs`, `score` and `finished` are those of `GeneratedSequence`. Structured output has no prompt in `text`; it
    has `complete`, false for a text that was cut, and `value`, the JSON value or the text, None if it was cut.
    `first_prompt` is the index of the first prompt, where these are a part of more: samples depend on it. `on_finished`
    is called with the number of texts that have ended since. `draft` proposes tokens (`speculative.py`). Without
    `logprobs` the dicts have neither `logprobs` nor `score`, which take a softmax over the vocabulary at each token.
    """
    generation_config = make_generation_config(generation_config, options)
    prompt_texts, sequences = generate_prompt_texts(
        model,
        prompts,
        generation_config,
        True,
        logprobs=logprobs,
        first_prompt=first_prompt,
        on_finished=on_finished,
        draft=draft,
    )
    return [
        {
            "prompt": first_prompt + i // generation_config.num_return_sequences,
            "text": prompt.full_text(new.tokens),
            "new": prompt.new_text(new.tokens),
            "tokens": new.tokens,
            **({"logprobs": new.logprobs, "score": new.score} if logprobs else {}),
            "finished": new.finished,
            **prompt.constraint_facts(new.tokens),
        }
        for i, (prompt, new) in enumerate(zip(prompt_texts, sequences, strict=True))
    ]


def stream_text(
    model: Model,
    prompt: Prompt,
    generation_config: GenerationConfig | None = None,
    use_cache: bool = True,
    **options: Any,
) -> Iterator[str]:
    """Yield the new text in pieces: complete characters only, and no part of a stop string.

    Structured output that was cut gives a warning at the end.
    """
    generation_config = make_generation_config(generation_config, options)
    if generation_config.num_beams > 1 or generation_config.num_return_sequences > 1:
        raise UserError("Streaming supports one text: set num_beams=1 and num_return_sequences=1.")
    (prompt_text,) = make_prompt_texts(model, [prompt], generation_config)
    stop_fn = (lambda _, ids: prompt_text.has_stop_string(ids)) if generation_config.stop else None
    shown, ids = "", list[int]()
    for ids in iterate_new_ids(model, prompt_text.input_ids, generation_config, use_cache, stop_fn):
        stable = prompt_text.stable_text(ids)
        if stable.startswith(shown) and stable != shown:
            yield stable[len(shown) :]
            shown = stable
    rest = prompt_text.new_text(ids)[len(shown) :]
    if rest:
        yield rest
    result = {
        "text": shown + rest,
        "finished": len(ids) < generation_config.max_new_tokens,
        **prompt_text.constraint_facts(ids),
    }
    if problem := describe_incomplete([result], generation_config):
        warn(problem)


def describe_incomplete(results: Sequence[Mapping[str, Any]], generation_config: GenerationConfig) -> str:
    """Return the message about structured output that is not complete; empty if all of it is."""
    incomplete = [result for result in results if not result.get("complete", True)]
    if not incomplete:
        return ""
    option = f"--{generation_config.constraint}".replace("_", "-")
    which = "The text is" if len(results) == 1 else f"{len(incomplete):,} of {len(results):,} texts are"
    if all(result["finished"] for result in incomplete):
        return (
            f"{which} cut before {option} was satisfied: the model's tokenizer has no token that can follow "
            f"{quote(incomplete[0]['text'][-20:])}."
        )
    limit = f"{generation_config.max_new_tokens:,} new tokens"
    return f"{which} cut after {limit}, before {option} was satisfied. Raise --max-new-tokens, or bound the lengths."


def default_structured_tokens(model: Model) -> int:
    """Return the default length of structured output; a prompt may take three quarters of the positions."""
    limit = model.config.max_length
    return MAX_STRUCTURED_TOKENS if limit is None else max(1, min(MAX_STRUCTURED_TOKENS, limit // 4))


def generate_prompt_texts(
    model: Model,
    prompts: Sequence[Prompt],
    generation_config: GenerationConfig,
    use_cache: bool,
    logprobs: bool,
    first_prompt: int = 0,
    on_finished: Callable[[int], None] | None = None,
    draft: Model | None = None,
) -> tuple[list[PromptText], list[GeneratedSequence]]:
    prompt_texts = make_prompt_texts(model, prompts, generation_config)
    stop_fn = (lambda i, ids: prompt_texts[i].has_stop_string(ids)) if generation_config.stop else None
    input_ids = [p.input_ids for p in prompt_texts]
    first_row = first_prompt * generation_config.num_return_sequences
    sequences = (
        generate_sequences(model, input_ids, generation_config, use_cache, stop_fn, logprobs, first_row, on_finished)
        if draft is None
        else generate_speculative(
            model, draft, input_ids, generation_config, stop_fn, first_row, on_finished, logprobs
        )[0]
    )
    return [p for p in prompt_texts for _ in range(generation_config.num_return_sequences)], sequences


def make_prompt_texts(model: Model, prompts: Sequence[Prompt], generation_config: GenerationConfig) -> list[PromptText]:
    check_can_generate(model)
    constraint = model_constraint(model, generation_config)
    encoded = iter(require_tokenizer(model).encode_batch([prompt for prompt in prompts if isinstance(prompt, str)]))
    return [
        PromptText(model, next(encoded), generation_config.stop, False, constraint)
        if isinstance(prompt, str)
        else PromptText(model, prompt, generation_config.stop, True, constraint)
        for prompt in prompts
    ]


class PromptText:
    """A prompt, and the decoding of new tokens after it."""

    def __init__(
        self,
        model: Model,
        ids: TokenIds,
        stop: Sequence[str],
        has_special_tokens: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        self.tokenizer, self.stop, self.constraint = require_tokenizer(model), stop, constraint
        template = make_sequence_template(model.config, self.tokenizer.vocab)
        is_seq2seq = isinstance(model, EncoderDecoder)
        # Special tokens as in pretraining: a decoder's prompt is open or ends with a blank, an encoder's is complete.
        suffix = (template.eos_id,) if is_seq2seq else make_prompt_suffix(model.config, self.tokenizer.vocab)
        framed = [*template.prefix_ids, *ids, *suffix]
        self.input_ids = ids if has_special_tokens else framed
        self.prompt_ids: TokenIds = [] if is_seq2seq or has_special_tokens else ids
        self.prompt_text = self.tokenizer.decode(self.prompt_ids)

    def split_generated(self, ids: TokenIds) -> tuple[str, str]:
        """Return the unchanged part of the prompt and the text after it: decoding may drop a space at the border."""
        if self.constraint is not None:
            return "", self.constraint.text(ids)
        text = self.tokenizer.decode([*self.prompt_ids, *ids])
        pairs = enumerate(zip(self.prompt_text, text, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), len(self.prompt_text))
        return text[:common], text[common:]

    def constraint_facts(self, ids: TokenIds) -> dict[str, Any]:
        """Return `complete` and `value` of structured output; empty for free text."""
        return {} if self.constraint is None else self.constraint.facts(ids)

    def full_text(self, ids: TokenIds) -> str:
        """Return a decoder's prompt and the new text before the first stop string; structured output alone."""
        prompt, new = self.split_generated(ids)
        return prompt + new[: self.stop_index(new)]

    def new_text(self, ids: TokenIds) -> str:
        _, new = self.split_generated(ids)
        return new[: self.stop_index(new)]

    def has_stop_string(self, ids: TokenIds) -> bool:
        _, new = self.split_generated(ids)
        return self.stop_index(new) < len(new)

    def stop_index(self, new: str) -> int:
        """Index of the first stop string, or the length."""
        return min((at for at in map(new.find, self.stop) if at >= 0), default=len(new))

    def stable_text(self, ids: TokenIds) -> str:
        """Return the text that later tokens cannot change: no incomplete character, no prefix of a stop string."""
        _, new = self.split_generated(ids)
        end = self.stop_index(new)
        if end < len(new):
            return new[:end]
        new = new.rstrip(REPLACEMENT_CHAR)
        if self.constraint is not None:
            return "" if self.constraint.may_change_spaces else new
        if self.tokenizer.kind == "wordpiece":  # the next token may remove the space before this one
            new = new[: new.rfind(" ") + 1].rstrip(" ")
        longest = max((n for text in self.stop for n in range(1, len(text)) if new.endswith(text[:n])), default=0)
        return new[: len(new) - longest]
