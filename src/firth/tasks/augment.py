"""Augmentation by a masked language model: copies of a text with some words replaced by likely ones.

    a fine film with a clever plot   ->   a good film with a clever script

A small student gains from more text than the labelled set has (Jiao et al. 2020, TinyBERT, algorithm 1). Each word of a
text is masked in turn, and the model's `NUM_CANDIDATES` likeliest words are its candidates. A copy replaces each word
with probability `rate` by one of its candidates, chosen at random. A replaced word may change the label, so copies have
none: the teacher labels them.

Words that the tokenizer splits stay as they are; TinyBERT takes neighbours of such words among GloVe's vectors. The
masked text stands alone, where TinyBERT's program puts the unmasked text before it.

Candidates are computed once, by one forward pass for each word, whatever the number of copies. Copies are a function of
(seed, example, copy) and of the candidates.

B rows of a batch, V vocabulary, M masked words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from firth.core.console import progress
from firth.core.errors import UserError
from firth.models import LMHead, Model, ModelConfig, make_sequence_template
from firth.objectives import Batch
from firth.objectives.counter_rng import CounterRNG
from firth.tasks.task import batch_indices_by_length
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig

AUGMENTED_TASKS = ("classify", "pair", "regress", "tag")  # texts whose words may be replaced one by one
NUM_CANDIDATES = 15  # for each word (TinyBERT, section 4.2)
MASK_BATCH_ROWS = 256
WORD_PATTERN = re.compile(r"\w+(?:['’-]\w+)*")


class AugmentedExample(NamedTuple):
    """A copy without a label, and the index of the example it was made from."""

    source: int
    example: Example


class MaskedWord(NamedTuple):
    """A word of a text that is one token: its characters [start, end), and the text's tokens with the word masked."""

    text: int  # index of the text
    start: int
    end: int
    ids: list[int]
    position: int  # of the mask

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class WordCandidates(NamedTuple):
    start: int
    end: int
    words: tuple[str, ...]


def check_augmentation(task: str, config: ModelConfig, tokenizer: Tokenizer, checkpoint: str) -> None:
    """Raise a UserError if a checkpoint cannot predict masked words, or a task's texts cannot be changed."""
    if task not in AUGMENTED_TASKS:
        raise UserError(f"augment is for the tasks {', '.join(AUGMENTED_TASKS)}, not for {task}.")
    is_masked_lm = config.architecture == "encoder" and isinstance(config.head, LMHead) and config.family != "xlnet"
    if not is_masked_lm or config.recurrent is not None or tokenizer.vocab.mask is None:
        raise UserError(
            f"augment replaces words by the predictions of a masked language model, and {checkpoint} is none. Name one "
            "with --augment-model, such as the pretrained checkpoint of the teacher."
        )


def augment_examples(
    examples: Sequence[Example],
    task: str,
    model: Model,
    compute: ComputeConfig,
    copies: int,
    rate: float,
    seed: int,
) -> list[AugmentedExample]:
    """Return up to `copies` distinct copies of each example, without those that equal it; short texts have fewer."""
    texts = [(" ".join(e.texts),) if task == "tag" else e.texts for e in examples]
    spans = [
        words_of_example(e) if task == "tag" else None for e, own in zip(examples, texts, strict=True) for _ in own
    ]
    candidates = iter(find_candidates([text for own in texts for text in own], spans, model, compute))
    augmented: list[AugmentedExample] = []
    for i, (e, own) in enumerate(zip(examples, texts, strict=True)):
        found = [next(candidates) for _ in own]
        rng = CounterRNG(seed, i * copies + np.arange(copies))
        width = sum(map(len, found))
        chance, choice = rng.uniform("augment", width), rng.uniform("augment-word", width)
        seen = {own}
        for c in range(copies):
            copy = replace_words(own, found, chance[c] < rate, choice[c])
            words = tuple(copy[0].split(" ")) if task == "tag" else copy
            if copy not in seen and len(words) == len(e.texts):
                seen.add(copy)
                augmented.append(AugmentedExample(i, Example(f"{e.id}~{c + 1}", words, spans=e.spans)))
    return augmented


def words_of_example(example: Example) -> list[tuple[int, int]]:
    """Return the characters of each word in the words joined by spaces.

    >>> words_of_example(Example(0, ("a", "red", "cat")))
    [(0, 1), (2, 5), (6, 9)]
    """
    ends = np.cumsum([len(word) + 1 for word in example.texts]) - 1
    return [(int(end) - len(word), int(end)) for word, end in zip(example.texts, ends, strict=True)]


def replace_words(
    texts: Sequence[str], candidates: Sequence[Sequence[WordCandidates]], is_replaced: np.ndarray, choice: np.ndarray
) -> tuple[str, ...]:
    """Return the texts with words replaced; `is_replaced` and `choice` in [0, 1) are by word, one text after another.

    >>> words = [WordCandidates(2, 6, ("good", "nice")), WordCandidates(7, 11, ("movie", "plot"))]
    >>> replace_words(["a fine film"], [words], np.array([True, False]), np.array([0.6, 0.1]))
    ('a nice film',)
    """
    copies, index = [], 0
    for text, words in zip(texts, candidates, strict=True):
        pieces, position = [], 0
        for word in words:
            if is_replaced[index]:
                pieces += [text[position : word.start], word.words[int(choice[index] * len(word.words))]]
                position = word.end
            index += 1
        copies.append("".join([*pieces, text[position:]]))
    return tuple(copies)


def find_candidates(
    texts: Sequence[str],
    word_spans: Sequence[list[tuple[int, int]] | None],
    model: Model,
    compute: ComputeConfig,
) -> list[list[WordCandidates]]:
    """Return for each text its words that can be replaced, each with its candidates."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "check_augmentation"
    masked = list(mask_words(texts, word_spans, model.config, tokenizer))
    vocabulary = whole_words(tokenizer)
    found: list[list[WordCandidates]] = [[] for _ in texts]
    by_word: dict[int, tuple[str, ...]] = {}
    with progress("words for copies", "words", len(masked)) as shown:
        for batch in batch_indices_by_length(masked, MASK_BATCH_ROWS, lambda word: word.num_tokens):
            likeliest = predict_masked([masked[m] for m in batch], vocabulary, model, compute)
            for m, words in zip(batch, likeliest, strict=True):
                own = texts[masked[m].text][masked[m].start : masked[m].end].lower()
                by_word[m] = tuple(word for word in words if word.lower() != own)[:NUM_CANDIDATES]
            shown.advance(len(batch))
    for m, word in enumerate(masked):
        if by_word[m]:
            found[word.text].append(WordCandidates(word.start, word.end, by_word[m]))
    return found


def mask_words(
    texts: Sequence[str], word_spans: Sequence[list[tuple[int, int]] | None], config: ModelConfig, tokenizer: Tokenizer
) -> Iterator[MaskedWord]:
    """Yield each word that is one token, with its text masked there; what the model cannot read is left out."""
    template = make_sequence_template(config, tokenizer.vocab)
    assert tokenizer.vocab.mask is not None
    limit = (config.max_length or 512) - len(template.apply([])[0])
    for i, (text, encoding) in enumerate(zip(texts, tokenizer.encode_with_offsets(texts), strict=True)):
        ids = list(encoding.ids[:limit])
        spans = word_spans[i]
        if spans is None:
            spans = [match.span() for match in WORD_PATTERN.finditer(text)]
        is_word = set(spans)
        for token, (start, end) in enumerate(encoding.offsets[:limit]):
            start += len(text[start:end]) - len(text[start:end].lstrip())  # some tokens begin with a space
            if (start, end) in is_word and WORD_PATTERN.fullmatch(text[start:end]):
                row, _ = template.apply([*ids[:token], tokenizer.vocab.mask, *ids[token + 1 :]])
                yield MaskedWord(i, start, end, row, token + len(template.prefix_ids))


def whole_words(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the tokens that are words of their own, by id: as the first word of a text, or after a space."""
    token_ids = tokenizer.vocab.non_special_ids.tolist()
    words = [tokenizer.decode([i]).strip() for i in token_ids]
    first, later = tokenizer.encode_batch(words), tokenizer.encode_batch([f" {word}" for word in words])
    return {
        i: word
        for i, word, a, b in zip(token_ids, words, first, later, strict=True)
        if [i] in (a, b) and WORD_PATTERN.fullmatch(word)
    }


@torch.no_grad()
def predict_masked(
    masked: Sequence[MaskedWord], vocabulary: dict[int, str], model: Model, compute: ComputeConfig
) -> list[list[str]]:
    """Return the likeliest words at each mask, one more than the candidates: the word itself may be among them."""
    assert model.tokenizer is not None
    width = max(word.num_tokens for word in masked)
    ids_BT = np.full((len(masked), width), model.tokenizer.vocab.pad)
    document_ids_BT = np.full((len(masked), width), -1)
    for row, word in enumerate(masked):
        ids_BT[row, : word.num_tokens] = word.ids
        document_ids_BT[row, : word.num_tokens] = 0
    template = make_sequence_template(model.config, model.tokenizer.vocab)
    batch = Batch(
        ids_BT,
        document_ids=document_ids_BT,
        token_type_ids=np.zeros_like(ids_BT) if template.has_token_types else None,
        target_positions=np.array([[word.position] for word in masked]),
    ).to(compute.device)
    model.eval()
    with compute.autocast():
        logits_BV = model.logits(batch)[:, 0].float()
    token_ids = torch.tensor(list(vocabulary), device=logits_BV.device)
    best = logits_BV[:, token_ids].topk(min(NUM_CANDIDATES + 1, len(vocabulary))).indices
    return [[vocabulary[i] for i in row] for row in token_ids[best].tolist()]
