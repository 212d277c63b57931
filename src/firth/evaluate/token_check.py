"""Compare the token ids of an exported folder with those of `transformers`, on texts that tokenizers disagree on.

Logits for equal ids prove nothing if `transformers` makes other ids of a text: a class named after a model may rebuild
the tokenizer by its own rules, and versions of the library differ in normalization, in the space before the first word
and in how special tokens that are written out are read. So the check reads the same texts with both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.tasks.chat import CHAT_TEMPLATE_KEY, ChatTemplate
from firth.tokens import Tokenizer, load_tokenizer

SCRIPT_TEXTS = (  # "Where is the library?" or near it, in 25 scripts
    "Where is the library, and who's got the keys?",
    "Wo ist die Straßenbücherei, Größe XXL?",
    "Ở đâu có thư viện?",
    "Где находится библиотека?",
    "Πού είναι η βιβλιοθήκη;",
    "איפה הספרייה?",
    "أين المكتبةُ؟ ٣٤٥",
    "کتابخانه کجاست؟ می‌خواهم",
    "पुस्तकालय कहाँ है? १२३",
    "গ্রন্থাগার কোথায়?",
    "ਲਾਇਬ੍ਰੇਰੀ ਕਿੱਥੇ ਹੈ?",
    "લાઇબ્રેરી ક્યાં છે?",
    "நூலகம் எங்கே இருக்கிறது?",
    "గ్రంథాలయం ఎక్కడ ఉంది?",
    "ಗ್ರಂಥಾಲಯ ಎಲ್ಲಿದೆ?",
    "ലൈബ്രറി എവിടെയാണ്?",
    "පුස්තකාලය කොහෙද?",
    "ห้องสมุดอยู่ที่ไหน",
    "ຫໍສະໝຸດຢູ່ໃສ?",
    "စာကြည့်တိုက် ဘယ်မှာလဲ။",
    "បណ្ណាល័យនៅឯណា?",
    "ቤተ መጻሕፍት የት ነው?",
    "ბიბლიოთეკა სად არის?",
    "Որտե՞ղ է գրադարանը",
    "图书馆在哪里？第２页",
    "図書館はどこですか。ｶﾀｶﾅ",
    "도서관은 어디에 있습니까?",
    "ᎤᏍᏗ ᏗᎪᏪᎵ",
)
ODD_TEXTS = (
    "",
    " ",
    "  two  spaces   three ",
    "\ttab\nline\r\nbreak\x0bvertical\x0cfeed",
    "no\u00a0break \u2009thin \u3000ideographic \u200bzero\u200cwidth\u200djoiner \ufeffmark \u00adhyphen",
    "\u2028line\u2029paragraph\u0085next",
    "e\u0301 vs \u00e9, \u1e9b\u0323, a\u0300\u0301\u0302\u0303",
    "ﬁne ﬂow ½ ² Ⅷ ℃ ㎏ ＡＢＣ",
    "İstanbul ıI ǅ ß ẞ Σσς",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇮 ☺️ ❤",
    "\U0001d504\U0001d51f 𠀀 \U00010348",
    "\u202eright to left\u202c \u2066isolate\u2069",
    "\x00\x01\x7f\x80\ufffd\uffff",
    "1234567890 3.14159 1,000,000 0x1F 1e-5 10²³ ½",
    "don't I'll we've they're DON'T ’tis",
    "https://example.org/a_b?c=d&e=%20f#g me@example.org C:\\a\\b",
    "snake_case camelCase kebab-case SCREAMING_CASE __init__",
    "...!!!???---___***///\\\\\\((()))[[[]]]{{{}}}",
    "a" * 300,
    "ab" * 150 + "é" * 50,
    "[MASK] <mask> [CLS]x[SEP] <s></s> <unk> <|endoftext|> <extra_id_0> <pad>",
    "x [MASK]y <mask>z <|endoftext|> w",
    "##ing ▁word Ġword </w> @@",
)


TEMPLATE_TEXTS = (SCRIPT_TEXTS[0], SCRIPT_TEXTS[3], "")  # with special tokens, alone and in pairs
DIALOGUES = (
    (("user", SCRIPT_TEXTS[0]),),
    (("system", "Be brief."), ("user", SCRIPT_TEXTS[3]), ("assistant", "  In town. "), ("user", "Thanks!")),
)


def compare_token_ids(tokenizer: Tokenizer | None, folder: Path) -> list[str] | None:
    """Return the texts of this module of which `transformers` makes other ids by the tokenizer in a folder.

    Texts are compared without special tokens; some also with them, alone, in pairs and as a dialogue if the tokenizer
    has a chat template. None: `transformers` has no such tokenizer, as for ELMo's characters and for texts that are
    read backwards.
    """
    if tokenizer is None or tokenizer.kind == "elmo-characters" or tokenizer.is_reversed:
        return None
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    texts = (*SCRIPT_TEXTS, *ODD_TEXTS)
    different = [
        text
        for text in texts
        if theirs(text, add_special_tokens=False)["input_ids"] != tokenizer.encode(text, parse_special=True)
    ]
    return different + differing_templates(load_tokenizer(folder), theirs) + differing_dialogues(tokenizer, theirs)


def differing_templates(saved: Tokenizer, theirs: Any) -> list[str]:
    """Return the texts and pairs that have other ids or token types with special tokens, by the tokenizer in a folder.

    `transformers` classes that are named after a model may replace the template of tokenizer.json by their own: some
    add a begin token, some double the separator.
    """
    different = []
    for first in TEMPLATE_TEXTS:
        for second in (None, *filter(None, TEMPLATE_TEXTS)):  # transformers takes an empty second text for none
            ours = saved.backend.encode(first, second, add_special_tokens=True)
            found = theirs(first, second)
            types = found.get("token_type_ids", ours.type_ids)
            if (found["input_ids"], types) != (ours.ids, ours.type_ids):
                different.append(first if second is None else f"{first} + {second}")
    return different


def differing_dialogues(tokenizer: Tokenizer, theirs: Any) -> list[str]:
    """Return the first texts of the dialogues that the chat template renders to other ids."""
    if not tokenizer.config.get(CHAT_TEMPLATE_KEY):
        return []
    template, different = ChatTemplate(tokenizer), []
    for dialogue in DIALOGUES:
        messages = [{"role": role, "content": content} for role, content in dialogue]
        try:
            rendered = template.render(dialogue, add_generation_prompt=True)
        except UserError:  # templates may refuse a role, such as system
            continue
        found = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        if found != tokenizer.encode(rendered, parse_special=True):
            different.append(dialogue[0][1])
    return different
