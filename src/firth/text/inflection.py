"""Find an English word in a text, in any inflected form."""

from __future__ import annotations

import re
from functools import cache

ENGLISH_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
MAX_ENDING_CHARS = 4  # characters that a regular ending adds at most: run, running

# Each group starts with the dictionary form. Regular forms, which only add an ending, are not listed.
IRREGULAR_FORMS = """
be am is are was were been being, have has had, do did done, go went gone,
arise arose arisen, awake awoke awoken, bear bore borne born, beat beat beaten, become became, begin began begun,
bend bent, bind bound, bite bit bitten, bleed bled, blow blew blown, break broke broken, breed bred, bring brought,
build built, burn burnt, buy bought, catch caught, choose chose chosen, cling clung, come came, creep crept,
deal dealt, die died dying, dig dug, draw drew drawn, dream dreamt, drink drank drunk, drive drove driven,
eat ate eaten, fall fell fallen, feed fed, feel felt, fight fought, find found, flee fled, fly flew flown flies,
forbid forbade, forget forgot forgotten, forgive forgave, freeze froze frozen, get got gotten, give gave given,
grind ground, grow grew grown, hang hung, hear heard, hide hid hidden, hold held, keep kept, kneel knelt,
know knew known, lay laid, lead led, leap leapt, learn learnt, leave left, lend lent, lie lay lain lied lying,
light lit, lose lost, make made, mean meant, meet met, mistake mistook, pay paid, ride rode ridden,
ring rang rung, rise rose risen, run ran, say said, see saw seen, seek sought, sell sold, send sent, sew sewn,
shake shook shaken, shine shone, shoot shot, show shown, shrink shrank shrunk, sing sang sung, sink sank sunk,
sit sat, sleep slept, slide slid, smell smelt, sneak snuck, sow sown, speak spoke spoken, speed sped, spell spelt,
spend spent, spill spilt, spin spun, spit spat, spoil spoilt, spring sprang sprung, stand stood, steal stole stolen,
stick stuck, sting stung, stink stank stunk, strike struck stricken, string strung, strive strove, swear swore sworn,
sweep swept, swell swollen, swim swam swum, swing swung, take took taken, teach taught, tear tore torn, tell told,
think thought, throw threw thrown, tie tied tying, tread trod trodden, understand understood, undo undid undone,
wake woke woken, wear wore worn, weave wove woven, weep wept, win won, wind wound,
withdraw withdrew withdrawn, wring wrung, write wrote written,
child children, foot feet, goose geese, man men, mouse mice, tooth teeth, woman women, knife knives, life lives,
leaf leaves, wolf wolves, half halves, shelf shelves, loaf loaves, wife wives, thief thieves,
good better best, bad worse worst, far farther further
"""


@cache
def get_irregular_forms(word: str) -> frozenset[str]:
    """Return a word and its irregular forms.

    >>> sorted(get_irregular_forms("fall"))
    ['fall', 'fallen', 'fell']
    """
    groups = (group.split() for group in IRREGULAR_FORMS.split(","))
    return frozenset([word, *(form for group in groups if group[0] == word for form in group)])


def find_inflected_word(word: str, text: str) -> tuple[int, int] | None:
    """Return the [start, end) of a word in a text: unchanged, in an irregular form, or with another ending.

    >>> find_inflected_word("carry", "She carried on."), find_inflected_word("come", "He came.")
    ((4, 11), (3, 7))
    >>> find_inflected_word("tea", "He came.") is None
    True
    """
    word = word.casefold()
    if exact := re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
        return exact.span()
    forms = [(match.group().casefold(), match.span()) for match in ENGLISH_WORD.finditer(text)]
    irregular = [span for form, span in forms if form in get_irregular_forms(word)]
    if irregular:
        return irregular[0]
    endings = [
        (not form.startswith(word), len(form), span) for form, span in forms if is_regular_inflection(word, form)
    ]
    return min(endings)[-1] if endings else None


def is_regular_inflection(word: str, form: str) -> bool:
    """Whether a form is the word with another ending; the last letter may change: carry, carried.

    >>> [is_regular_inflection("carry", form) for form in ("carrying", "carried")]
    [True, True]
    >>> is_regular_inflection("car", "cartridge")
    False
    """
    stem = word[:-1] if len(word) > 2 else word
    return form.startswith(stem) and len(form) <= len(word) + MAX_ENDING_CHARS
