"""Firth's checkpoints in lm-eval, EleutherAI's evaluation harness (Gao et al. 2021), under the model name `firth`.

    lm-eval --model firth --model_args pretrained=run/final --tasks blimp
    python -m firth.lm_eval --model firth --model_args pretrained=run/final --tasks blimp

lm-eval finds the name by the entry point `lm_eval.models` of this package. Releases up to 0.4.13 look for no entry
points; there the second command registers the name first and takes the same options.

`FirthLM` answers the three kinds of requests. Batches are made by length, and continuations of one context share its
row (`evaluate/logprobs.py`).

- `loglikelihood(context, continuation)`: decoders and encoder-decoders as lm-eval's own model `hf` computes it: context
  and continuation are tokenized together (a decoder) or apart, and a context that is too long loses its beginning. An
  encoder gives the pseudo-log-likelihood of the continuation: each of its tokens is masked in turn.
- `loglikelihood_rolling(text)`: windows of the model's length; of an encoder the pseudo-log-likelihood of the text.
- `generate_until(context)`: decoders and encoder-decoders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs

from firth.core.console import progress
from firth.core.errors import UserError
from firth.evaluate.likelihood import CausalScorer, ContinuationScorer, SplitText, make_scorer, open_model
from firth.evaluate.logprobs import EVAL_BATCH_TOKENS, LogprobQuery
from firth.generate import GenerationConfig, generate
from firth.generate.decode_state import check_can_generate
from firth.models import make_prompt_suffix
from firth.tasks.chat import ChatTemplate, get_chat_template

MODEL_NAME = "firth"
GENERATION_ROWS = 16  # prompts that are continued together, unless batch_size is larger
MAX_GEN_TOKS = 256  # new tokens of a request that does not say, as in `hf`
# Options of a request that have the name of ours; `do_sample` and the rest are resolved in `generation_config`.
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")
OTHER_OPTIONS = ("repetition_penalty", "no_repeat_ngram_size", "num_beams", "length_penalty", "early_stopping")
TokenRequest = tuple[Any, list[int], list[int]]  # the strings of a request (None: a window), context, continuation


class FirthLM(TemplateLM):
    """A checkpoint as lm-eval sees it.

    `pretrained` is a checkpoint folder; `method` and `batch_tokens` are those of `make_scorer` (an encoder-decoder's
    default is "continuation", as in `hf`); `max_length` the window; `add_bos_token` puts the model's begin token before
    every context of a decoder, which GPT-2's tokenizer does not. `batch_size` counts the rows of generation;
    likelihoods are batched by `batch_tokens`.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "auto",
        max_length: int = 0,
        batch_tokens: int = EVAL_BATCH_TOKENS,
        add_bos_token: bool | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        batch_size: int | str = GENERATION_ROWS,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        model = open_model(pretrained)
        is_seq2seq = model.config.architecture == "encoder-decoder"
        method = "continuation" if method == "auto" and is_seq2seq else method
        self.scorer = make_scorer(model, method, max_length, batch_tokens=batch_tokens)
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            model.to(device)  # lm-eval asks for cuda:0 unless told otherwise
        self.model, self.pretrained = model, pretrained
        self.text_tokenizer, self.vocab = self.scorer.tokenizer, self.scorer.vocab
        if self.text_tokenizer.is_reversed:
            raise UserError("lm-eval asks for continuations, and this model reads backward: give a forward model.")
        self.backend = "seq2seq" if isinstance(self.scorer, ContinuationScorer) else "causal"
        self.add_bos_token, self.max_gen_toks = add_bos_token, max_gen_toks
        rows = int(batch_size) if str(batch_size).isdigit() else 0
        self.generation_rows = max(rows, GENERATION_ROWS if max_batch_size is None else 1)

    # --- tokens ---

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return self.scorer.template.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        if self.model.config.architecture == "encoder" and self.vocab.cls is not None:
            return self.vocab.cls
        return self.eot_token_id if self.vocab.bos is None else self.vocab.bos

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; by default with the special tokens that the tokenizer itself adds, as in `hf`.

        With `add_bos_token`, and for an encoder that reads from left to right, those before a text are the model's.
        """
        if add_special_tokens is None:
            starts = has_bos_prefix(string, self.text_tokenizer.decode([self.prefix_token_id], False))
            add_special_tokens = not starts and self.add_bos_token is not False
            if add_special_tokens and (self.add_bos_token or self.model.config.architecture == "encoder"):
                return [*self.scorer.template.prefix_ids, *self.text_tokenizer.encode(string, parse_special=True)]
        return list(self.text_tokenizer.backend.encode(string, add_special_tokens=add_special_tokens).ids)

    # --- likelihoods ---

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether it is the greedy one."""
        if self.backend == "seq2seq" or isinstance(self.scorer, CausalScorer):
            return super().loglikelihood(requests, disable_tqdm)
        splits = [
            self.scorer.split_at_span(
                context + continuation, len(context.rstrip()), len(context + continuation), f"Request {number}"
            )
            for number, (context, continuation) in enumerate((request.args for request in requests), 1)
        ]
        groups = (self.scorer.span_queries(self.scorer.truncate_context(split)) for split in splits)
        return self.score_groups(groups, [request.args for request in requests])

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the greedy one."""
        groups = (self.make_queries(context, continuation) for _, context, continuation in requests)
        return self.score_groups(groups, [strings for strings, _, _ in requests])

    def score_groups(self, groups: Iterable[list[LogprobQuery]], keys: Sequence[Any]) -> list[tuple[float, bool]]:
        """Score the rows of each request; `keys` are the strings that lm-eval's cache knows it by, or None."""
        results = []
        for strings, group in zip(keys, self.scorer.score_query_groups(groups, len(keys)), strict=True):
            logp = sum(float(one.logprobs.sum()) for _, one in group)
            is_greedy = all(bool((one.top_ids == query.labels).all()) for query, one in group)
            results.append((logp, is_greedy))
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, results[-1])
        return results

    def make_queries(self, context: list[int], continuation: list[int]) -> list[LogprobQuery]:
        """The rows of a request."""
        if isinstance(self.scorer, CausalScorer):
            ids = [*context, *continuation][-(self.max_length + 1) :]
            labels = ids[-min(len(continuation), len(ids) - 1) :]
            positions = list(range(len(ids) - 1 - len(labels), len(ids) - 1))
            query = LogprobQuery(ids[:-1], positions, self.scorer.replace_out_of_vocabulary(labels))
            return [self.scorer.with_visibility(query)]
        return self.scorer.span_queries(
            self.scorer.truncate_context(SplitText(self.strip_special(context), continuation, []))
        )

    def strip_special(self, ids: list[int]) -> list[int]:
        """Ids without the special tokens around them, which the model's template adds again."""
        template = self.scorer.template
        around = {self.prefix_token_id, template.eos_id, *template.prefix_ids}
        first = next((i for i, token in enumerate(ids) if token not in around), len(ids))
        last = next((i for i in range(len(ids), first, -1) if ids[i - 1] not in around), first)
        return ids[first:last]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text."""
        texts = [request.args[0] for request in requests]
        if isinstance(self.scorer, CausalScorer | ContinuationScorer):
            windows = [self.rolling_windows(text) for text in texts]
            scored = iter(self._loglikelihood_tokens([window for each in windows for window in each]))
            results = [sum(next(scored)[0] for _ in each) for each in windows]
        else:
            results = [one.logp for one in self.scorer.score_texts(texts)]
        for text, result in zip(texts, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return results

    def rolling_windows(self, text: str) -> list[TokenRequest]:
        """Windows that score each token once; each but the first begins with one token of context."""
        windows = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [(None, *utils.make_disjoint_window(window)) for window in windows]

    # --- generation ---

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string, in batches of prompts with the same options and similar length."""
        check_can_generate(self.model)
        results: dict[int, str] = {}
        with progress("generating", "texts", len(requests)) as shown:
            for options, rows in self.batch_prompts(requests):
                texts = generate(self.model, [ids for _, ids in rows], options)
                for (index, _), text in zip(rows, texts, strict=True):
                    results[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                shown.advance(len(rows))
        return [results[i] for i in range(len(requests))]

    def batch_prompts(
        self, requests: Sequence[Instance]
    ) -> Iterator[tuple[GenerationConfig, list[tuple[int, list[int]]]]]:
        """Yield the options of a batch, and the index and the ids of each of its requests."""
        by_options: dict[GenerationConfig, list[tuple[int, list[int]]]] = {}
        for index, request in enumerate(requests):
            context, given = request.args
            options = self.generation_config(given)
            ids = self.prompt_ids(context, options.max_new_tokens)
            by_options.setdefault(options, []).append((index, ids))
        for options, rows in by_options.items():
            rows.sort(key=lambda row: -len(row[1]))
            for first in range(0, len(rows), self.generation_rows):
                yield options, rows[first : first + self.generation_rows]

    def prompt_ids(self, context: str, max_new_tokens: int) -> list[int]:
        """The ids of a prompt; a decoder's is cut on the left so that the new tokens fit."""
        ids, config = self.tok_encode(context), self.model.config
        if config.architecture == "encoder-decoder":
            return self.scorer.template.apply(self.strip_special(ids)[-self.scorer.max_text_tokens :])[0]
        max_prompt_tokens = self.max_length - max_new_tokens
        if max_prompt_tokens < 1:
            raise UserError(
                f"max_gen_toks is {max_new_tokens}, and the model has {self.max_length} positions. Give less: "
                "--gen_kwargs max_gen_toks=64."
            )
        if suffix := make_prompt_suffix(config, self.vocab):  # a decoder that fills a blank
            return [*ids[-(max_prompt_tokens - len(suffix)) :], *suffix]
        return ids[-max_prompt_tokens:] or [self.prefix_token_id]

    def generation_config(self, given: dict[str, Any]) -> GenerationConfig:
        """A request's options as ours: greedy unless it samples."""
        options = normalize_gen_kwargs(given, self.max_gen_toks)
        stop = tuple(text for text in handle_stop_sequences(options.pop("until", None), None) if text)
        max_new_tokens, samples = options.pop("max_gen_toks"), options.pop("do_sample", False)
        sampling = {name: options.pop(name) for name in SAMPLING_OPTIONS if name in options}
        other = {name: options.pop(name) for name in OTHER_OPTIONS if name in options}
        if options:
            raise UserError(f"The option {next(iter(options))} of generate_until is not one that Firth has.")
        if samples:
            other |= {"temperature": 1.0} | sampling
        return GenerationConfig(max_new_tokens=max_new_tokens, stop=stop, **other)

    # --- chat ---

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        messages = [(message["role"], message["content"]) for message in chat_history]
        return ChatTemplate(self.text_tokenizer).render(messages, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return get_chat_template(self.text_tokenizer) if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.fingerprint

    def get_model_info(self) -> dict[str, Any]:
        """Facts for the results file."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(self.model.embed.tokens.weight.dtype),
            "method": self.scorer.method,
            "max_length": self.max_length,
        }


def register() -> None:
    """Make lm-eval know the model `firth`, if it has not read the entry point."""
    import lm_eval.models  # noqa: F401 (a registry with one name would count as filled)

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="firth.lm_eval:FirthLM")


def main() -> None:
    """The command line of lm-eval, with the model `firth` registered."""
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
