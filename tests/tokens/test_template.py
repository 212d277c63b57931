"""Special tokens around one text or two, by hand and in the tokenizer's post-processor."""

from __future__ import annotations

import pytest

from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.template import SequenceTemplate, with_template

CLS, SEP, A, B = 1, 2, [7, 8], [9]
BERT = SequenceTemplate((CLS,), (SEP,), separator_ids=(SEP,), has_token_types=True)
ROBERTA = SequenceTemplate((CLS,), (SEP,), separator_ids=(SEP, SEP))
XLNET = SequenceTemplate((), (SEP, CLS), separator_ids=(SEP,), has_token_types=True, last_token_type=2)


def test_by_hand() -> None:
    assert BERT.apply(A) == ([CLS, 7, 8, SEP], [0, 0, 0, 0])
    assert BERT.apply(A, B) == ([CLS, 7, 8, SEP, 9, SEP], [0, 0, 0, 0, 1, 1])
    assert ROBERTA.apply(A, B)[0] == [CLS, 7, 8, SEP, SEP, 9, SEP]
    assert XLNET.apply(A, B) == ([7, 8, SEP, 9, SEP, CLS], [0, 0, 0, 1, 1, 2])
    assert SequenceTemplate((), (SEP,)).apply(A) == ([7, 8, SEP], [0, 0, 0])


def test_special_tokens_are_counted() -> None:
    for template in (BERT, ROBERTA, XLNET):
        assert template.num_special_tokens() == len(template.apply(A)[0]) - len(A)
        assert template.num_special_tokens(2) == len(template.apply(A, B)[0]) - len(A) - len(B)
        assert template.eos_id == SEP


@pytest.fixture(scope="module", params=["wordpiece", "byte-bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return train_tokenizer(["a heron waits at the river, and a b c d e f"] * 20, request.param, 400)


@pytest.mark.parametrize("kind", [BERT, ROBERTA, XLNET])
def test_the_saved_tokenizer_applies_the_template(tokenizer: Tokenizer, kind: SequenceTemplate) -> None:
    vocab = tokenizer.vocab
    assert vocab.cls is not None
    assert vocab.sep is not None
    new_ids = {CLS: vocab.cls, SEP: vocab.sep}
    fields = {name: tuple(new_ids[i] for i in getattr(kind, name)) for name in ("prefix_ids", "suffix_ids")}
    template = SequenceTemplate(
        **fields,
        separator_ids=tuple(new_ids[i] for i in kind.separator_ids),
        has_token_types=kind.has_token_types,
        last_token_type=kind.last_token_type,
    )
    templated = with_template(tokenizer, template)
    a, b = "a heron waits", "at the river"
    for texts in ((a,), (a, b)):
        ids, token_type_ids = template.apply(*(tokenizer.encode(text) for text in texts))
        encoding = templated.backend.encode(*texts)
        assert encoding.ids == ids
        assert not kind.has_token_types or encoding.type_ids == token_type_ids
    assert templated.encode(a) == tokenizer.encode(a)
    assert templated.fingerprint == tokenizer.fingerprint
    assert with_template(templated, template) is templated
    assert not kind.has_token_types or "token_type_ids" in templated.config["model_input_names"]
