"""Parse a row of a labelled file into an example, for each task."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from firth.core.console import format_count
from firth.core.errors import UserError, list_names, quote
from firth.core.parse import parse_json
from firth.text.documents import Example
from firth.text.formats.squad import parse_span_qa_row
from firth.text.inflection import find_inflected_word
from firth.text.labelled_row import LabelledRow, parse_json_list
from firth.text.records import get_column_value, preview_value

RECORD_ENTITIES_COLUMN = "entities of ReCoRD"  # internal column: spans of the entities, and the right ones
PREFERENCE_LABELS = {"true": True, "1": True, "good": True, "false": False, "0": False, "-1": False, "bad": False}
NO_CORRECT_CHOICE = -1  # target of a ReCoRD query without a right choice


class TaskFormat(NamedTuple):
    """The roles that a task reads, and its parser, which returns None to drop a row."""

    roles: tuple[str, ...]
    parse_row: Callable[[LabelledRow], Example | None]


def parse_classify_row(row: LabelledRow) -> Example:
    return row.make_example((row.text("text"),), row.label("label"))


def parse_pair_row(row: LabelledRow) -> Example:
    return row.make_example((row.text("text_a"), row.text("text_b")), row.label("label"))


def parse_regress_row(row: LabelledRow) -> Example:
    texts = [row.text(row.first_available_role("text_a", "text"))]
    if row.has_value("text_b"):
        texts.append(row.text("text_b"))
    return row.make_example(tuple(texts), row.score(row.first_available_role("score", "label")))


def parse_choice_row(row: LabelledRow) -> Example | None:
    """Parse a multiple-choice row. A ReCoRD query may have no right answer among its entities.

    Such a query is dropped from training. It stays in a dev set, where every choice is wrong; the official metrics
    compare words and may still score one.
    """
    choices = parse_choices(row)
    entities = row.record.get(RECORD_ENTITIES_COLUMN, {"spans": (), "right": ()})
    no_correct = entities["right"] and "gold" not in row.record
    if no_correct and row.split != "dev":
        row.note_skipped("query", "without a right answer among the entities")
        return None
    if no_correct:
        row.notes.add(
            "query", "without a right answer among the entities, where every choice is wrong", row.location_in_file
        )
    gold = NO_CORRECT_CHOICE if no_correct else row.index("gold")
    if not no_correct and gold is not None and not 0 <= gold < len(choices):
        raise row.column_error(
            "gold", f"is {gold}, but the {len(choices)} choices are counted from 0 to {len(choices) - 1}"
        )
    return row.make_example(
        (row.text("context"), *choices), gold, spans=tuple(entities["spans"]), references=tuple(entities["right"])
    )


def parse_choices(row: LabelledRow) -> tuple[str, ...]:
    """Return the list in the column `choices`, or the columns choice1, choice2 ... of a table, by their numbers."""
    column = row.column("choices")
    numbered = re.compile(re.escape(column.removesuffix("s")) + r"(\d+)")
    if column in row.record:
        choices = row.text_list("choices")
    else:
        matches = [match for match in map(numbered.fullmatch, row.record) if match]
        cells = [row.record[match[0]] for match in sorted(matches, key=lambda match: int(match[1]))]
        cells = cells or [row.value("choices")]
        choices = tuple(row.require_nonempty("choices", "" if cell is None else str(cell)) for cell in cells)
    if len(choices) < 2:
        raise row.column_error("choices", "has fewer than 2 choices")
    return choices


def parse_tag_row(row: LabelledRow) -> Example:
    words = row.word_list("tokens")
    if not words or not all(word and not word.isspace() for word in words):
        raise row.column_error("tokens", "has an empty word" if words else "has no words")
    tags = None if row.is_label_missing("tags") else row.word_list("tags")
    if tags is not None and isinstance(row.value("tags"), str) and isinstance(row.value("tokens"), list):
        raise row.column_error(
            "tags",
            f"is the text {preview_value(row.value('tags'))}, and {quote(row.column('tokens'))} is a list. "
            'Give a list with one tag for each token, as ["B-PER", "O"]',
        )
    if tags is not None and len(tags) != len(words):
        counts = f"{format_count(len(words), 'token')}, but {format_count(len(tags), 'tag')}"
        raise UserError(f"{row.where}: {counts}. Each token needs one.")
    if tags is not None and not all(tags):
        raise row.column_error("tags", "has an empty tag")
    return row.make_example(
        words, tags, spans=(parse_predicate_span(row, len(words)),) if row.has_value("predicate") else ()
    )


def parse_predicate_span(row: LabelledRow, length: int) -> tuple[int, int]:
    """Return the word span of a predicate, given as [start, end] or as the index of a single word."""
    if isinstance(parse_json_list(row.value("predicate")), list):
        return row.span("predicate", length, "words")
    start = row.index("predicate")
    assert start is not None, "the caller checks that there is a predicate"
    return row.check_span("predicate", start, start + 1, length, "words")


def parse_relation_row(row: LabelledRow) -> Example:
    """Parse a text and two spans, in characters, or in words if the row has `tokens`."""
    if row.has_value("text") or not row.has_value("tokens"):
        text = row.text("text")
        spans = [row.span(role, len(text), "characters") for role in ("head", "tail")]
    else:
        words = row.word_list("tokens")
        text = " ".join(words)
        spans = [word_to_char_span(words, *row.span(role, len(words), "words")) for role in ("head", "tail")]
    return row.make_example((row.require_nonempty("text", text),), row.label("label"), spans=tuple(spans))


def word_to_char_span(words: tuple[str, ...], start: int, end: int) -> tuple[int, int]:
    """Return the character span of words [start, end) in the words joined by spaces.

    >>> word_to_char_span(("a", "bcd", "ef"), 1, 3)
    (2, 8)
    """
    before = sum(len(word) + 1 for word in words[:start])
    return before, before + len(" ".join(words[start:end]))


def parse_text_to_text_row(row: LabelledRow) -> Example:
    """Parse a source and its target; without a target column, the first reference is the target."""
    references = row.text_list("references") if row.has_value("references") else ()
    if references and not row.has_value("target"):
        return row.make_example((row.text("source"),), references[0], references=references)
    target = None if row.is_label_missing("target") else row.text("target")
    if references and target is not None:
        references = (target, *(text for text in references if text != target))
    return row.make_example((row.text("source"),), target, references=references)


def parse_extract_row(row: LabelledRow) -> Example:
    """Parse a text and the JSON object to extract; without a target column, every other column is a field."""
    if row.is_column_renamed("target") or row.column("target") in row.record:
        if row.is_label_missing("target"):
            return row.make_example((row.text("text"),))
        target = row.value("target")
        if isinstance(target, str):
            target = parse_json(target, f"{row.where}: column {quote(row.column('target'))}")
        if not isinstance(target, dict):
            raise row.column_error("target", f"holds {preview_value(target)}, which is not a JSON object")
    else:
        others = {row.column("text"), row.column("id")}
        target = {name: x for name, x in row.record.items() if name not in others and x not in (None, "")}
        if not target and row.require_labels:
            raise UserError(
                f"{row.where}: no field: give a column target with a JSON object, or a column for each field."
            )
        if not target:
            return row.make_example((row.text("text"),))
    return row.make_example((row.text("text"),), json.dumps(target, ensure_ascii=False))


def parse_lm_row(row: LabelledRow) -> Example:
    form = row.first_available_role("messages", "prompt", "text")
    if form == "messages" and not row.is_column_renamed(form):
        get_column_value(row.record, "text", form, row.where, ", nor 'prompt' and 'response', nor 'text'")
    if form == "messages":
        messages = parse_messages(row)
        check_role_order(row, form, messages)
        roles = dict.fromkeys(role for role, _ in messages)
        if row.require_labels and "assistant" not in roles:
            raise row.column_error(
                form, f"has no message of the assistant: there is nothing to learn. Its roles are {list_names(roles)}"
            )
        return row.make_example(tuple(part for message in messages for part in message))
    if form == "prompt":
        prompt = parse_prompt(row)
        answer = parse_answer(row, row.first_available_role("response", "completion"), prompt)
        return row.make_example((*prompt, "assistant", answer))
    return row.make_example(("text", row.text("text")))


def holds_messages(row: LabelledRow, column: str) -> bool:
    """Whether a column holds messages and no text; a text such as "[1, 2]" is none of them."""
    value = row.value(column)
    if isinstance(value, str):
        parsed = parse_json_list(value)
        return isinstance(parsed, list) and bool(parsed) and all(isinstance(item, dict) for item in parsed)
    return isinstance(value, list)


def parse_messages(row: LabelledRow, column: str = "messages") -> list[tuple[str, str]]:
    messages = []
    for i, message in enumerate(row.list_items(column), 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise row.column_error(column, f"has no text for the role and the content of message {i}")
        if not content.strip():
            raise row.column_error(
                column, f"has an empty message {i}, of {quote(role)}. Fill it in, or delete the line"
            )
        messages.append((role, content))
    if not messages:
        raise row.column_error(column, "has no messages")
    return messages


def check_role_order(row: LabelledRow, column: str, messages: Sequence[tuple[str, str]]) -> None:
    """Refuse a system message that is not the first, two messages in a row of one side, and an answer to nothing.

    Other roles, as those of tools, may stand anywhere.
    """
    before = ""
    for i, (role, _) in enumerate(messages, 1):
        if role == "system" and i > 1:
            raise row.column_error(column, f"has message {i} of the system, which can only be the first")
        if role in ("user", "assistant") and role == before:
            raise row.column_error(column, f"has messages {i - 1} and {i} both of the {role}. Join them into one")
        if role == "assistant" and before in ("", "system"):
            raise row.column_error(column, f"has message {i} of the assistant before any message of the user")
        before = role


def parse_preference_row(row: LabelledRow) -> Example:
    """Parse a prompt with a chosen and a rejected answer, or with one completion and its label (true: good).

    The prompt is text or a list of messages. An answer is text, or a list with one message of the assistant; where it
    repeats the prompt's messages before it (as in UltraFeedback), these are cut off.
    """
    is_single = row.has_value("completion") or row.column("chosen") not in row.record
    if is_single and row.column("completion") in row.record and not row.has_value("chosen"):
        prompt = parse_prompt(row)
        label = row.label("label")
        if label is not None and label.lower() not in PREFERENCE_LABELS:
            raise row.column_error("label", f"is {quote(label)}; it must be true (good) or false (bad)")
        good = None if label is None else PREFERENCE_LABELS[label.lower()]
        return row.make_example(prompt, good, references=(parse_answer(row, "completion", prompt),))
    return parse_answer_pair(row)


def parse_answer_pair(row: LabelledRow, target: Any = None) -> Example:
    """Parse a prompt with a chosen and a rejected answer."""
    prompt = parse_prompt(row) if row.has_value("prompt") else shared_messages(row)
    chosen, rejected = (parse_answer(row, role, prompt) for role in ("chosen", "rejected"))
    if chosen == rejected:
        raise row.column_error("rejected", "equals the chosen answer: there is nothing to prefer. Delete the line")
    return row.make_example(prompt, target, references=(chosen, rejected))


def parse_prompt(row: LabelledRow) -> tuple[str, ...]:
    """Return role, text, role, text ... of a prompt: a text of the user, or messages."""
    if not holds_messages(row, "prompt"):
        return ("user", row.text("prompt"))
    return flatten_messages(row, "prompt", parse_messages(row, "prompt"))


def flatten_messages(row: LabelledRow, column: str, messages: list[tuple[str, str]]) -> tuple[str, ...]:
    if messages and messages[-1][0] == "assistant":
        raise row.column_error(column, "ends with a message of the assistant, and the answer is to follow")
    check_role_order(row, column, messages)
    if not any(role == "user" for role, _ in messages):
        raise row.column_error(column, "has no message of the user before the answer")
    return tuple(part for message in messages for part in message)


def shared_messages(row: LabelledRow) -> tuple[str, ...]:
    """Return the messages before the last one of `chosen`: a file without a column for the prompt."""
    if not holds_messages(row, "chosen"):
        raise row.column_error(
            "chosen", "is a text, and there is no column 'prompt'. Name it with --columns prompt=NAME"
        )
    return flatten_messages(row, "chosen", parse_messages(row, "chosen")[:-1])


def parse_answer(row: LabelledRow, role: str, prompt: tuple[str, ...]) -> str:
    """Return the text of an answer; of messages, that of the last one, which must follow the prompt's."""
    if not holds_messages(row, role):
        return row.text(role)
    *before, (author, text) = parse_messages(row, role)
    if author != "assistant":
        raise row.column_error(role, f"ends with a message of {quote(author)}, and must end with one of the assistant")
    if before and tuple(part for message in before for part in message) != prompt:
        raise row.column_error(role, "has other messages before its answer than the prompt has")
    return text


def parse_reward_row(row: LabelledRow) -> Example:
    """Parse a pair as of `preference`, with an optional margin; without labels also a prompt with one answer."""
    if row.require_labels or row.has_value("chosen"):
        margin = row.score("margin") if row.has_value("margin") else 0.0
        return parse_answer_pair(row, margin)
    if row.has_value("messages") and not row.has_value("prompt"):
        messages = parse_messages(row)
        check_role_order(row, "messages", messages)
        if messages[-1][0] != "assistant":
            raise row.column_error("messages", "ends without an answer of the assistant, which the reward is for")
        *before, (_, answer) = messages
        return row.make_example(tuple(part for message in before for part in message), references=(answer,))
    prompt = parse_prompt(row)
    answer = parse_answer(row, row.first_available_role("completion", "response"), prompt)
    return row.make_example(prompt, references=(answer,))


def parse_embed_row(row: LabelledRow) -> Example:
    scored = row.first_available_role("score", "label")
    score = row.score(scored) if row.has_value(scored) and row.value(scored) != "" else None
    return row.make_example((row.text("text_a"), row.text("text_b")), score)


def parse_minimal_pair_row(row: LabelledRow) -> Example:
    """Parse a minimal pair, also with BLiMP's column names."""
    group = row.first_available_role("group", "uid", "UID", "phenomenon", "term")
    good, bad = row.first_available_role("good", "sentence_good"), row.first_available_role("bad", "sentence_bad")
    return row.make_example(
        (row.text(good), row.text(bad)), references=(row.text(group),) if row.has_value(group) else ()
    )


def parse_cloze_row(row: LabelledRow) -> Example:
    answer = None if row.is_label_missing("answer") else row.text("answer")
    return row.make_example((row.text("context"),), answer)


def parse_word_in_context_row(row: LabelledRow) -> Example | None:
    """Parse a word in two texts. Its spans are given in characters, or found in any inflected form.

    A row whose texts lack the word is dropped from training. It stays in a dev set, with the whole text as the span.
    """
    texts = row.text("text_a"), row.text("text_b")
    if row.has_value("span_a") or row.has_value("span_b"):
        spans = [
            row.span(role, len(text), "characters") for role, text in zip(("span_a", "span_b"), texts, strict=True)
        ]
    else:
        matches = [find_inflected_word(row.text("word"), text) for text in texts]
        if None in matches and row.split != "dev":
            row.note_skipped("example", "without the word in both texts")
            return None
        if None in matches:
            row.notes.add("example", "scored on, but without the word in both texts", row.location_in_file)
        spans = [span or (0, len(text)) for span, text in zip(matches, texts, strict=True)]
    return row.make_example(texts, row.label("label"), spans=tuple(spans))


def parse_word_similarity_row(row: LabelledRow) -> Example:
    return row.make_example((row.text("word1"), row.text("word2")), row.score("score"))


def parse_analogy_row(row: LabelledRow) -> Example:
    section = (row.text("section"),) if row.has_value("section") else ()
    words = row.text("a"), row.text("b"), row.text("c")
    return row.make_example(words, None if row.is_label_missing("d") else row.text("d"), references=section)


TASK_FORMATS = {
    "classify": TaskFormat(("text", "label"), parse_classify_row),
    "pair": TaskFormat(("text_a", "text_b", "label"), parse_pair_row),
    "regress": TaskFormat(("text_a", "text", "text_b", "score", "label"), parse_regress_row),
    "choice": TaskFormat(("context", "choices", "gold"), parse_choice_row),
    "tag": TaskFormat(("tokens", "tags", "predicate"), parse_tag_row),
    "relation": TaskFormat(("text", "tokens", "head", "tail", "label"), parse_relation_row),
    "span-qa": TaskFormat(("question", "context", "answers", "is_impossible"), parse_span_qa_row),
    "text-to-text": TaskFormat(("source", "target", "references"), parse_text_to_text_row),
    "extract": TaskFormat(("text", "target"), parse_extract_row),
    "lm": TaskFormat(("messages", "prompt", "response", "completion", "text"), parse_lm_row),
    "preference": TaskFormat(("prompt", "chosen", "rejected", "completion", "label"), parse_preference_row),
    "reward": TaskFormat(
        ("prompt", "chosen", "rejected", "margin", "completion", "response", "messages"), parse_reward_row
    ),
    "embed": TaskFormat(("text_a", "text_b", "score", "label"), parse_embed_row),
    "minimal-pairs": TaskFormat(("good", "bad", "group"), parse_minimal_pair_row),
    "cloze": TaskFormat(("context", "answer"), parse_cloze_row),
    "word-in-context": TaskFormat(("text_a", "text_b", "word", "span_a", "span_b", "label"), parse_word_in_context_row),
    "word-similarity": TaskFormat(("word1", "word2", "score"), parse_word_similarity_row),
    "analogy": TaskFormat(("section", "a", "b", "c", "d"), parse_analogy_row),
}

# Names of transformers, TRL and the papers, for messages.
TASK_SYNONYMS = {
    synonym: task
    for task, synonyms in {
        "classify": "classification text-classification sequence-classification sentiment sentiment-analysis topic",
        "pair": "nli entailment paraphrase",
        "regress": "regression sts similarity",
        "tag": "ner pos chunking tagging token-classification",
        "span-qa": "qa squad question-answering",
        "text-to-text": "summarization translation seq2seq text2text-generation",
        "choice": "multiple-choice",
        "word-in-context": "wic",
        "lm": "sft clm chat causal-lm instruction language-modeling",
        "preference": "dpo kto orpo ipo simpo",
        "reward": "rm reward-model",
        "embed": "retrieval sentence-similarity feature-extraction sentence-embedding",
        "perplexity": "ppl",
        "minimal-pairs": "blimp",
        "cloze": "lambada",
    }.items()
    for synonym in synonyms.split()
}
