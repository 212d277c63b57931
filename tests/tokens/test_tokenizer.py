"""Tokenizers are trained, saved, opened by transformers with the same ids, and loaded again."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from firth.core.errors import UserError
from firth.tokens.builders import TOKENIZER_KINDS
from firth.tokens.template import SequenceTemplate, with_template
from firth.tokens.tokenizer import Tokenizer, find_special_tokens, load_tokenizer
from firth.tokens.train import train_tokenizer

TEXTS = [
    "The heron stands in the river, and the heron waits.\nNobody asks why it's waiting; the river doesn't care.",
    "Ọjọ́ dára. Ẹ kú àárọ̀! Báwo ni? Ọjọ́ dára, ẹ kú iṣẹ́.",
    "Zoë's café sells 12 kinds of naïve crème brûlée (at 3.50 each).",
    "def river(heron):\n\treturn heron + 1  # two  spaces",
] * 3
STRANGE = "Ọjọ́ dára 😀👩‍🔬!\r\n\tnbsp\u00a0here, 中文, \x00 and e\u0301 stays apart  "
MODEL_TYPES = {
    "wordpiece": "bert",
    "bpe": "openai-gpt",
    "byte-bpe": "gpt2",
    "unigram": "t5",
    "word": "xlm",
    "char": "xlm",
    "elmo-characters": "xlm",
}


@pytest.fixture(scope="module", params=sorted(TOKENIZER_KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return learn(request.param)


@cache
def learn(kind: str) -> Tokenizer:
    return train_tokenizer(TEXTS, kind, vocab_size=420)


def test_special_tokens_of_wordpiece() -> None:
    vocab = learn("wordpiece").vocab
    assert (vocab.pad, vocab.unk, vocab.cls, vocab.sep, vocab.mask) == (0, 1, 2, 3, 4)
    assert (vocab.bos, vocab.eos, vocab.sentinel_ids) == (None, None, ())
    assert vocab.special_ids == (0, 1, 2, 3, 4)


def test_special_tokens_of_byte_bpe() -> None:
    vocab = learn("byte-bpe").vocab
    assert (vocab.pad, vocab.cls, vocab.sep, vocab.mask) == (0, 1, 2, 3)
    assert vocab.bos == vocab.eos == 4
    assert vocab.unk is None


def test_special_tokens_of_unigram() -> None:
    tokenizer = learn("unigram")
    vocab = tokenizer.vocab
    assert (vocab.pad, vocab.eos, vocab.unk) == (0, 1, 2)
    assert (vocab.cls, vocab.sep, vocab.mask, vocab.bos) == (3, 1, 4, None)
    assert [tokenizer.backend.id_to_token(i) for i in (3, 4)] == ["<s>", "<mask>"]
    assert vocab.sentinel_ids == tuple(range(vocab.size - 1, vocab.size - 101, -1))
    assert tokenizer.backend.id_to_token(vocab.size - 1) == "<extra_id_0>"
    assert tokenizer.backend.id_to_token(vocab.size - 100) == "<extra_id_99>"
    assert set(vocab.special_ids) == {0, 1, 2, 3, 4, *vocab.sentinel_ids}


def test_the_same_text_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(TEXTS, tokenizer.kind, 420).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(TEXTS[:2] * 3, tokenizer.kind, 420).fingerprint != tokenizer.fingerprint


def test_vocabulary_has_the_requested_size() -> None:
    assert train_tokenizer(TEXTS, "byte-bpe", 300).vocab.size == 300
    assert train_tokenizer(TEXTS, "wordpiece", 200).vocab.size == 200
    assert train_tokenizer(TEXTS, "unigram", 190).vocab.size == 190
    lines = "\n<mask>\n" * 40 + "\n<mask>x\n" * 3 + "\n<mask>.\n" * 3  # a special token is no piece of the text
    assert train_tokenizer([lines, *TEXTS], "unigram", 200).vocab.size == 200


@pytest.mark.parametrize("text", [*TEXTS[:4], STRANGE, " a [MASK] b <mask> c <extra_id_3> d </s><|endoftext|> [SEP]"])
def test_transformers_opens_it_with_the_same_ids(tokenizer: Tokenizer, tmp_path: Path, text: str) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[tokenizer.kind]}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text, parse_special=True)
    assert theirs(text)["input_ids"] == tokenizer.backend.encode(text).ids
    assert theirs(text, text)["input_ids"] == tokenizer.backend.encode(text, text).ids
    assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == tokenizer.encode(text)


def test_transformers_knows_the_special_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[tokenizer.kind]}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    vocab = tokenizer.vocab
    assert len(theirs) == vocab.size
    for role in ("pad", "unk", "bos", "eos", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == getattr(vocab, role), role
    assert ("token_type_ids" in theirs("The river")) == (tokenizer.kind == "wordpiece")
    theirs.save_pretrained(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").vocab == vocab


def test_bert_pairs_have_token_types() -> None:
    encoding = learn("wordpiece").backend.encode("river", "heron waits")
    assert encoding.tokens == ["[CLS]", "river", "[SEP]", "heron", "waits", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 1, 1, 1]


def test_t5_ends_a_text() -> None:
    tokenizer = learn("unigram")
    assert tokenizer.backend.encode("the river").ids == [*tokenizer.encode("the river"), tokenizer.vocab.eos]


@pytest.mark.parametrize("text", [*TEXTS[:4], STRANGE, "", " ", "\n\n"])
def test_byte_bpe_loses_nothing(text: str) -> None:
    tokenizer = learn("byte-bpe")
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [*TEXTS[:4], "the  river\n\n the\theron\n"])
def test_unigram_loses_nothing_that_it_has_characters_for(text: str) -> None:
    tokenizer = learn("unigram")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_accents_stay_and_case_goes_only_on_request() -> None:
    plain = learn("wordpiece")
    assert plain.decode(plain.encode("Zoë Ọjọ́")) == "Zoë Ọjọ́"
    for kind in TOKENIZER_KINDS:
        lower = train_tokenizer(TEXTS, kind, 420, lowercase=True)
        assert lower.decode(lower.encode("CAFÉ")) == "café"


def test_text_that_looks_like_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    text = " ".join(["[PAD] [MASK] [SEP] <pad> <s> </s> <unk> <mask> <|endoftext|> <extra_id_0>"] * 2)
    read = (
        set(tokenizer.encode(text))
        | set(tokenizer.encode_batch([text])[0])
        | set(tokenizer.encode_with_offsets([text])[0].ids)
    )
    assert read & set(tokenizer.vocab.special_ids) <= {tokenizer.vocab.unk}


def test_special_tokens_in_a_text_are_read_on_request() -> None:
    tokenizer = learn("unigram")
    ids = tokenizer.encode("the <extra_id_0> waits", parse_special=True)
    assert [tokenizer.backend.id_to_token(i) for i in ids if i in tokenizer.vocab.sentinel_ids] == ["<extra_id_0>"]
    for kind in ("byte-bpe", "unigram"):
        masked = learn(kind)
        ids = [*masked.encode("the"), masked.vocab.mask, *masked.encode(" river" if kind == "byte-bpe" else "river")]
        assert masked.encode("the <mask> river", parse_special=True) == ids


def starts(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokens of a text, joined into words by `word_starts`."""
    encoding = tokenizer.encode_with_offsets([text])[0]
    words: list[str] = []
    for token, is_start in zip(encoding.tokens, tokenizer.word_starts(encoding), strict=True):
        if is_start:
            words.append("")
        words[-1] += token.removeprefix("##")
    return words


def test_word_starts() -> None:
    text = "herons'  rivers.\nwait"
    assert starts(learn("wordpiece"), text) == ["herons", "'", "rivers", ".", "wait"]
    assert starts(learn("byte-bpe"), text) == ["herons", "'", "Ġ", "Ġrivers", ".", "Ċ", "wait"]
    assert starts(learn("unigram"), text) == ["▁herons'", "▁", "▁rivers.", "\n", "wait"]


def test_word_starts_of_several_texts() -> None:
    tokenizer = learn("byte-bpe")
    a, b = tokenizer.encode_with_offsets(["herons", "rivers wait"])
    assert tokenizer.word_starts(a, b).tolist() == [*tokenizer.word_starts(a), *tokenizer.word_starts(b)]
    assert tokenizer.word_starts().tolist() == []


def test_a_saved_tokenizer_is_loaded_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.vocab, again.fingerprint) == (tokenizer.kind, tokenizer.vocab, tokenizer.fingerprint)
    assert again.encode(STRANGE) == tokenizer.encode(STRANGE)
    again.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / name).read_text()


# --- published folders --------------------------------------------------------------------------------------------


def test_specials_may_be_dicts(tmp_path: Path) -> None:
    learn("unigram").save(tmp_path)
    config = {"pad_token": {"content": "<pad>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = load_tokenizer(tmp_path).vocab
    assert (vocab.pad, vocab.eos, vocab.unk) == (0, 1, None)
    assert len(vocab.sentinel_ids) == 100


def test_specials_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    learn("byte-bpe").save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    )
    vocab = load_tokenizer(tmp_path).vocab
    assert (vocab.bos, vocab.eos, vocab.mask) == (1, 2, None)
    assert vocab.pad == vocab.eos, "without a padding token the end token serves"


def test_special_tokens_by_convention_without_a_config(tmp_path: Path) -> None:
    learn("wordpiece").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    vocab = load_tokenizer(tmp_path).vocab
    assert (vocab.pad, vocab.unk, vocab.cls, vocab.sep, vocab.mask) == (0, 1, 2, 3, 4)


def test_a_missing_special_token_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learn("unigram").save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": "[HIDE]"}))
    assert load_tokenizer(tmp_path).vocab.mask is None
    assert "[HIDE]" in capsys.readouterr().err


def test_a_published_t5_has_neither_cls_nor_mask(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("a", -4.0)]
    theirs = transformers.T5Tokenizer(vocab=pieces, extra_ids=100)
    theirs.save_pretrained(tmp_path)
    vocab = load_tokenizer(tmp_path).vocab
    assert (vocab.pad, vocab.eos, vocab.unk, len(vocab.sentinel_ids)) == (0, 1, 2, 100)
    assert (vocab.cls, vocab.sep, vocab.mask, vocab.bos) == (None, None, None, None)
    assert load_tokenizer(tmp_path).encode("the a") == theirs("the a", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("lower", [True, False])
def test_vocab_txt_reads_as_in_transformers(tmp_path: Path, lower: bool) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "cafe", "café", "river", "##s", "!", "E", "e"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    text = "The rivers, the café! É [MASK]"
    assert ours.backend.encode(text).ids == theirs(text)["input_ids"]
    assert ours.encode("café The") == ([7, 5] if lower else [8, 6])
    ours.save(tmp_path / "new")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again(text)["input_ids"] == theirs(text)["input_ids"]


def test_merges_read_as_in_transformers(tmp_path: Path) -> None:
    model = json.loads(learn("byte-bpe").backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps({t: i for t, i in model["vocab"].items() if t != "<mask>"}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    text = "the heron's river<|endoftext|> 😀"
    assert ours.encode(text, parse_special=True) == theirs(text)["input_ids"]
    assert ours.vocab.eos == ours.vocab.bos == ours.vocab.pad == 4


def test_merges_of_gpt_read_as_in_transformers(tmp_path: Path) -> None:
    model = json.loads(train_tokenizer(TEXTS, "bpe", 420, lowercase=True).backend.to_str())["model"]
    vocab = {token: i for i, token in enumerate(["<unk>", *(t for t in model["vocab"] if not t.startswith("<"))])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    ours = load_tokenizer(tmp_path)
    theirs = transformers.OpenAIGPTTokenizer.from_pretrained(tmp_path)
    text = "The heron's River café 😀"
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert (ours.kind, ours.vocab.pad, ours.vocab.unk, ours.vocab.eos) == ("bpe", 0, 0, None)


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_unknown_kind() -> None:
    with pytest.raises(UserError, match="Did you mean 'wordpiece'"):
        train_tokenizer(TEXTS, "wordpieces", 420)


@pytest.mark.parametrize("kind", sorted(TOKENIZER_KINDS))
def test_no_text(kind: str) -> None:
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(["", " \n"], kind, 420)


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 60), ("byte-bpe", 260), ("unigram", 130), ("unigram", 20)])
def test_vocabulary_too_small_for_the_characters(kind: str, size: int) -> None:
    with pytest.raises(UserError, match=f"A vocabulary of {size} tokens is too small"):
        train_tokenizer(TEXTS, kind, size)


def test_lost_characters_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    rare = "".join(map(chr, range(0xAC00, 0xAC00 + 1100)))
    train_tokenizer(["the river " * 5 + rare], "wordpiece", 2500)
    assert "rare characters" in capsys.readouterr().err


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"spiece.model but no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece", "BPE"])
def test_an_id_far_beyond_the_number_of_tokens_is_refused(model: str, tmp_path: Path) -> None:
    """`tokenizers` would count to it, and arrays over the vocabulary would be as long."""
    vocab = {"[UNK]": 0, "[PAD]": 1, "a": 2, "b": 4_000_000_000}
    more = {"merges": []} if model == "BPE" else {"max_input_chars_per_word": 9, "continuing_subword_prefix": "##"}
    state = {"model": {"type": model, "vocab": vocab, "unk_token": "[UNK]", **more}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    with pytest.raises(UserError, match=r"token 'b' .* has the id 4,000,000,000, and there are only 4 tokens"):
        load_tokenizer(tmp_path)
    vocab["b"] = 50_000  # a gap, as between a vocabulary and added tokens
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert load_tokenizer(tmp_path).vocab.size == 50_001


def test_a_tokenizer_without_its_unknown_token_fails_when_it_encodes(tmp_path: Path) -> None:
    learn("wordpiece").save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    del state["model"]["vocab"]["[UNK]"]
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] != "[UNK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"tokenizer.json is damaged \(WordPiece error: Missing"):
        load_tokenizer(tmp_path).encode("\U0001f600")


def test_a_panic_of_the_library_is_an_error(tmp_path: Path) -> None:
    learn("wordpiece").save(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"tokenizer.json is damaged \(no entry found"):
        with_template(load_tokenizer(tmp_path), SequenceTemplate((2,), (3,)))


def test_a_special_token_that_is_half_a_character_is_left_out(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"a": 0}, "a"))
    assert find_special_tokens(tmp_path, {"mask_token": "\ud800", "pad_token": "a"}, backend) == {"pad": "a"}
