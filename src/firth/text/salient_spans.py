"""Salient spans of a text: names, numbers and dates, found by their spelling (Guu et al. 2020, section 3.4)."""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

from firth.core.errors import UserError

SalientSpanFinder = Callable[[str], Sequence[tuple[int, int]]]
DEFAULT_SALIENT_NAME = "default"


def find_salient_spans(text: str) -> list[tuple[int, int]]:
    """The spans (start, end) of names, numbers and dates, in characters, in order.

    A name is a run of capitalised words. A sentence's first word is one only if another follows it; English function
    words are none. Scripts without capitals have no names here, and languages that capitalise every noun too many.

    >>> text = "Yesterday Anna Grey paid $5 in York. Nobody saw it."
    >>> [text[start:end] for start, end in find_salient_spans(text)]
    ['Yesterday Anna Grey', '$5', 'York']
    """
    return [match.span(match.lastindex) for match in compile_salient_pattern().finditer(text) if match.lastindex]


def load_salient_finder(name: str) -> SalientSpanFinder:
    """The function that finds salient spans: "default", or any by its place, as "package.module:function"."""
    if name == DEFAULT_SALIENT_NAME:
        return find_salient_spans
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UserError(f"--salient {name}: neither 'default' nor package.module:function.")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as e:
        raise UserError(
            f"--salient {name}: no module named {e.name!r}. Install it, or name its folder in PYTHONPATH."
        ) from None
    if not callable(found):
        state = "has no" if found is None else "cannot call its"
        raise UserError(f"--salient {name}: {module} {state} {function!r}. A function of a text is needed.")
    return found


def salient_finder_name(function: SalientSpanFinder) -> str:
    """What the manifest calls a function that finds salient spans, as `load_salient_finder` takes it."""
    if function is find_salient_spans:
        return DEFAULT_SALIENT_NAME
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


# The pattern is tried once at each place, and no part of it looks far ahead in vain: any text takes linear time.

CAPITAL_PLACEHOLDER = "⇧"  # stands here for every letter that can begin a name


@cache
def compile_salient_pattern() -> re.Pattern[str]:
    return re.compile(SALIENT_PATTERN_TEMPLATE.replace(CAPITAL_PLACEHOLDER, f"[{capital_letter_ranges()}]"))


def capital_letter_ranges() -> str:
    """The letters that can begin a name, as the inside of a character class."""
    places = [i for i in range(0x10000) if unicodedata.category(chr(i)) in ("Lu", "Lt")]
    runs = [[i for _, i in run] for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])]
    return "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


# Names

LETTER = r"[\w\u0300-\u036f]"  # also accents that stand as characters of their own
FUNCTION_WORDS = (
    "A|An|And|Any|Are|As|At|Because|Been|Before|But|By|Can|Could|Did|Do|Does|Each|Either|Even|Every|For|From|Had"
    "|Has|Have|He|Hence|Her|Here|Hers|Him|His|How|However|I|If|In|Into|Is|It|Its|Just|Let|Me|Might|Mine|Most|Must"
    "|My|Neither|No|Nor|Not|Now|Of|On|Once|One|Only|Or|Other|Our|Ours|Perhaps|Shall|She|Should|Since|So|Some"
    "|Still|Such|Than|That|The|Their|Theirs|Them|Then|There|These|They|This|Those|Though|Thus|To|Too|Unless|Until"
    "|Up|Upon|Us|Was|We|Were|What|When|Where|Whether|Which|While|Who|Whom|Whose|Why|Will|With|Would|Yes|Yet|You"
    "|Your|Yours"
)
PARTICLES = "of the|of|de la|de|del|della|da|di|du|van der|van den|van|von der|von|bin|ibn|al|y"
TITLES = "Capt|Col|Dr|Gen|Gov|Hon|Lt|Mme|Mr|Mrs|Ms|Prof|Rev|Sen|Sgt|Sir|St"
CAPITALISED_WORD = (
    rf"(?<!\w)(?!(?:{FUNCTION_WORDS})(?![\w-])){CAPITAL_PLACEHOLDER}{LETTER}*+"
    rf"(?:[&-]{LETTER}++|['’](?={CAPITAL_PLACEHOLDER}){LETTER}++)*+"
)
INITIALS = rf"(?<!\w)(?:{CAPITAL_PLACEHOLDER}\.){{2,}}"
NAME_PREFIX = rf"(?<!\w)(?:{CAPITAL_PLACEHOLDER}\.[ ]?|(?:{TITLES})\.[ ])"  # J. or Mr.
NAME_PART = rf"(?:{INITIALS}|(?:{NAME_PREFIX}){{0,4}}{CAPITALISED_WORD})"
NAME_JOINER = rf"[ ](?:(?:{PARTICLES}|&)[ ])?"
PERSON_OR_PLACE_NAME = rf"{NAME_PART}(?:{NAME_JOINER}{NAME_PART})*"
MULTI_PART_NAME = rf"(?:{INITIALS}|(?:{NAME_PREFIX}){{1,4}}{CAPITALISED_WORD}|{NAME_PART}{NAME_JOINER}{NAME_PART})(?:{NAME_JOINER}{NAME_PART})*"

# Dates and numbers

MONTH_NAMES = "January|February|March|April|May|June|July|August|September|October|November|December"
MONTH_OR_ABBREVIATION = rf"(?:{MONTH_NAMES}|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?)"
WEEKDAY = r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?)"
NUMBER_NEIGHBOUR_CHAR = (
    r"[\d_a-zA-Z\u00aa-\u058f]"  # what a number cannot touch: digits, and letters of scripts that put spaces
)
DAY, YEAR = r"\d{1,2}(?:st|nd|rd|th)?", r"\d{4}"
DATE = (
    rf"(?<!{NUMBER_NEIGHBOUR_CHAR})(?<![.,:/-])(?:"
    rf"{YEAR}-\d\d(?:-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?)?"
    rf"|\d{{1,2}}/\d{{1,2}}/(?:{YEAR}|\d\d)|\d{{1,2}}\.\d{{1,2}}\.{YEAR}"
    rf"|(?:{WEEKDAY},?[ ])?(?:{DAY}[ ](?:of[ ])?{MONTH_OR_ABBREVIATION}(?:,?[ ]{YEAR})?|{MONTH_OR_ABBREVIATION}[ ]{DAY}(?!\w)(?:,?[ ]{YEAR})?)"
    r"|\d{1,4}年(?:\d{1,2}月(?:\d{1,2}日)?)?|\d{1,2}月\d{1,2}日"
    rf"|{MONTH_OR_ABBREVIATION},?[ ]{YEAR}|{WEEKDAY}|(?!May|March)(?:{MONTH_NAMES})"
    rf")(?!{NUMBER_NEIGHBOUR_CHAR}|-)"
)
NUMBER = rf"(?<!{NUMBER_NEIGHBOUR_CHAR})(?<!\w[.,:/-])[$€£¥]?\d++(?:[.,:]\d++)*+(?:%|(?:st|nd|rd|th|s)?(?!{NUMBER_NEIGHBOUR_CHAR}))"

# A sentence begins after a full stop, a line end or an opening quotation mark, perhaps with a bullet.

SENTENCE_START = (
    r"(?:\A|[.!?…][\"'”’»)\]]{0,3}[ \t]++|\n[ \t]*+|(?<=\s)[\"“«])"
    r"(?:[-*•–—#>]{1,6}[ \t]++|\d{1,2}[.)][ \t]++)?[\"'“‘«(\[]{0,3}"
)
SALIENT_PATTERN_TEMPLATE = rf"{SENTENCE_START}(?:({DATE}|{MULTI_PART_NAME})|{CAPITALISED_WORD})|(?=[$€£¥\d]|{CAPITAL_PLACEHOLDER})({DATE}|{NUMBER}|{PERSON_OR_PLACE_NAME})"
