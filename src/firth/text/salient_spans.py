"""Find salient spans: names, numbers and dates, for salient span masking (REALM, Guu et al. 2020, section 3.4).

REALM finds them with a named entity tagger and a regular expression for dates. Here one regular expression finds all
of them, without a model; `--salient package.module:function` uses any other finder.
"""

from __future__ import annotations

import importlib
import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby

from firth.core.errors import UserError, quote, shorten

SalientSpanFinder = Callable[[str], Sequence[tuple[int, int]]]
DEFAULT_SALIENT_NAME = "default"


def find_salient_spans(text: str) -> list[tuple[int, int]]:
    """Return the [start, end) of names, numbers and dates in characters, in order.

    A name is a sequence of capitalised words that are not English function words. The first word of a sentence counts
    only if another name part follows it. Names are not found in scripts without capitals; in German, every noun is one.

    >>> text = "Yesterday Anna Grey paid $5 in York. Nobody saw it."
    >>> [text[start:end] for start, end in find_salient_spans(text)]
    ['Yesterday Anna Grey', '$5', 'York']
    """
    return [match.span(match.lastindex) for match in compile_salient_pattern().finditer(text) if match.lastindex]


def load_salient_finder(name: str) -> SalientSpanFinder:
    """Return the finder of a name: "default", or "package.module:function"."""
    if name == DEFAULT_SALIENT_NAME:
        return find_salient_spans
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UserError(f"--salient {shorten(name)}: neither 'default' nor package.module:function.")
    try:
        finder = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as e:
        raise UserError(
            f"--salient {shorten(name)}: no module named {quote(e.name)}. Install it, or add its folder to PYTHONPATH."
        ) from None
    if not callable(finder):
        state = "has no" if finder is None else "cannot call its"
        raise UserError(
            f"--salient {shorten(name)}: {shorten(module)} {state} {quote(function)}. Name a function that takes a "
            "text."
        )
    return finder


def salient_finder_name(function: SalientSpanFinder) -> str:
    """Return the name of a finder for the manifest, in the form that `load_salient_finder` takes."""
    if function is find_salient_spans:
        return DEFAULT_SALIENT_NAME
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}:{kind.__qualname__}"


# Possessive quantifiers and bounded repetition avoid backtracking: matching takes linear time on any text.

CAPITAL_PLACEHOLDER = "⇧"  # replaced by the class of capital letters


@cache
def compile_salient_pattern() -> re.Pattern[str]:
    return re.compile(SALIENT_PATTERN_TEMPLATE.replace(CAPITAL_PLACEHOLDER, f"[{capital_letter_ranges()}]"))


def capital_letter_ranges() -> str:
    """Return the upper- and titlecase letters as ranges for a regular expression's [...]."""
    codes = [i for i in range(0x10000) if unicodedata.category(chr(i)) in ("Lu", "Lt")]
    runs = [[i for _, i in run] for _, run in groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0])]
    return "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


# Names

LETTER = r"[\w\u0300-\u036f]"  # and combining accents
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
MULTI_PART_NAME = (
    rf"(?:{INITIALS}|(?:{NAME_PREFIX}){{1,4}}{CAPITALISED_WORD}|{NAME_PART}{NAME_JOINER}{NAME_PART})"
    rf"(?:{NAME_JOINER}{NAME_PART})*"
)

# Dates and numbers

MONTH_NAMES = "January|February|March|April|May|June|July|August|September|October|November|December"
MONTH_OR_ABBREVIATION = rf"(?:{MONTH_NAMES}|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?)"
WEEKDAY = r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?)"
# A number cannot touch these: digits, and letters of scripts that separate words by spaces.
NUMBER_NEIGHBOUR_CHAR = r"[\d_a-zA-Z\u00aa-\u058f]"
DAY, YEAR = r"\d{1,2}(?:st|nd|rd|th)?", r"\d{4}"
DATE = (
    rf"(?<!{NUMBER_NEIGHBOUR_CHAR})(?<![.,:/-])(?:"
    rf"{YEAR}-\d\d(?:-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?)?"
    rf"|\d{{1,2}}/\d{{1,2}}/(?:{YEAR}|\d\d)|\d{{1,2}}\.\d{{1,2}}\.{YEAR}"
    rf"|(?:{WEEKDAY},?[ ])?(?:{DAY}[ ](?:of[ ])?{MONTH_OR_ABBREVIATION}(?:,?[ ]{YEAR})?"
    rf"|{MONTH_OR_ABBREVIATION}[ ]{DAY}(?!\w)(?:,?[ ]{YEAR})?)"
    r"|\d{1,4}年(?:\d{1,2}月(?:\d{1,2}日)?)?|\d{1,2}月\d{1,2}日"
    rf"|{MONTH_OR_ABBREVIATION},?[ ]{YEAR}|{WEEKDAY}|(?!May|March)(?:{MONTH_NAMES})"
    rf")(?!{NUMBER_NEIGHBOUR_CHAR}|-)"
)
NUMBER = (
    rf"(?<!{NUMBER_NEIGHBOUR_CHAR})(?<!\w[.,:/-])[$€£¥]?\d++(?:[.,:]\d++)*+"
    rf"(?:%|(?:st|nd|rd|th|s)?(?!{NUMBER_NEIGHBOUR_CHAR}))"
)

# A sentence starts after a full stop, a line end or an opening quotation mark, with an optional bullet.

SENTENCE_START = (
    r"(?:\A|[.!?…][\"'”’»)\]]{0,3}[ \t]++|\n[ \t]*+|(?<=\s)[\"“«])"
    r"(?:[-*•–—#>]{1,6}[ \t]++|\d{1,2}[.)][ \t]++)?[\"'“‘«(\[]{0,3}"
)
SALIENT_PATTERN_TEMPLATE = (
    rf"{SENTENCE_START}(?:({DATE}|{MULTI_PART_NAME})|{CAPITALISED_WORD})"
    rf"|(?=[$€£¥\d]|{CAPITAL_PLACEHOLDER})({DATE}|{NUMBER}|{PERSON_OR_PLACE_NAME})"
)
