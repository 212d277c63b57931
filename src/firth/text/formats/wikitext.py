"""Wikitext to plain text: the prose of a page, as a reader of the wiki sees it.

MediaWiki expands a page in steps, and so does this file:

1. Comments go, and tags whose content is not wikitext, with that content: `<ref>`, `<math>`, `<gallery>`. The content
   of `<nowiki>` and `<pre>` is kept aside as it is.
2. Templates `{{...}}`, links `[[...]]` and tables `{| ... |}` nest in each other. One pass with a stack replaces each
   by what it shows, from the inside out: a link by its label, a file or a category by nothing, a table by nothing, a
   template by nothing unless it only marks up its text (`{{lang|fr|mot}}`).
3. Headings, lists, bold and italics are marks at lines; a heading without text below it goes.
4. HTML tags and entities, and the commas and brackets that are left of what was removed.

Broken markup is text in MediaWiki, and its text is kept here. Every step takes time in proportion to the page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from firth.text.formats.mail_html import unescape_html

MAX_NESTING = 100  # levels of templates, links and tables; MediaWiki allows 100 expansions in each other
MAX_TABLES = 10  # levels of tables; each looks at every line within it, if nobody closes it
FILE_NAMESPACES = frozenset({"file", "image", "media", "category"})  # valid in every language, beside the local names

# Tags whose content is no wikitext of the page. MediaWiki and its extensions read it themselves.
REMOVED_TAGS = (
    "ref|references|math|chem|ce|gallery|timeline|score|imagemap|hiero|syntaxhighlight|source|graph|mapframe|maplink|"
    "templatedata|templatestyles|inputbox|categorytree|indicator|includeonly|table|style|script"
)
LITERAL_TAGS = "nowiki|pre"
OPAQUE_TAG = re.compile(rf"<!--|<({REMOVED_TAGS}|{LITERAL_TAGS})(?=[\s/>])", re.IGNORECASE)
CLOSING_TAGS = {
    name: re.compile(rf"</{name}\s*>", re.IGNORECASE) for name in f"{REMOVED_TAGS}|{LITERAL_TAGS}".split("|")
}
HTML_TAG = re.compile(
    rf"</?(?:{REMOVED_TAGS}|{LITERAL_TAGS}|abbr|b|bdi|bdo|big|blockquote|caption|center|cite|code|col|colgroup|data|dd|"
    "del|dfn|div|dl|dt|em|font|h[1-6]|i|ins|kbd|li|mark|noinclude|ol|onlyinclude|p|poem|q|rb|rp|rt|rtc|ruby|s|samp|"
    r"section|small|span|strike|strong|sub|sup|tbody|td|th|thead|time|tr|tt|u|ul|var|wbr)(?:\s[^<>]*|/)?>",
    re.IGNORECASE,
)
LINE_BREAK_TAG = re.compile(r"<(?:br|hr)\b[^<>]*>|</(?:p|div|li|blockquote)\s*>", re.IGNORECASE)

NESTED_TOKEN = re.compile(r"^[ \t:]*\{\|(?!\})|^[ \t]*\|\}(?!\})|\{\{|\}\}|\[\[|\]\](?!\](?!\]))|\|", re.MULTILINE)
TEMPLATE_ARGUMENT = re.compile(r"\{\{\{[^{}]*\}\}\}")
NAMED_ARGUMENT = re.compile(r"\s*+[\w -]++=")
EXTERNAL_LINK = re.compile(r"\[(?:https?:|ftp:|mailto:|//)[^\s\[\]<>]*+([^\[\]\n]*+)\]")
LANGUAGE_LINK = re.compile(r"[a-z]{2,3}(?:-[a-z]{2,8})?:\S")
VARIANT = re.compile(r"-\{([^{}]*)\}-")  # of a language with several scripts: -{zh-hans:网;zh-hant:網}-
BEHAVIOR_SWITCH = re.compile(r"__[A-Z]{3,30}__")  # __NOTOC__
QUOTES = re.compile(r"'{2,}")
LIST_MARKS = re.compile(r"[*#:;]+[ \t]*")
LEFT_BRACES = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}")
LITERAL_MARK = re.compile(r"\0(\d+)\0")
SPACES = re.compile(r"[ \t\u00a0\u2009\u202f]+")
# What is left around removed templates: "Aristotle ( , ; 384 BC )".
EMPTY_BRACKETS = re.compile(r" ?\([\s,;:]*\)")
SPACE_BEFORE = re.compile(r" ([,.)])(?=[\s,.;:)]|$)", re.MULTILINE)
MARK_AFTER_BRACKET = re.compile(r"\([ ,;:]+")
MARK_BEFORE_BRACKET = re.compile(r"(?<![ ,;:])[ ,;:]++\)")  # tried at the start of a run alone: linear time
BLANK_LINES = re.compile(r"\n{3,}")

# Templates that show an argument: its number, from 0, among those without a name. -1 is the last.
SHOWN_ARGUMENTS = {
    **dict.fromkeys(
        ("nowrap", "nobr", "abbr", "small", "smaller", "big", "em", "strong", "sc", "smallcaps", "mvar"), 0
    ),
    **dict.fromkeys(("math", "not a typo", "visible anchor", "vanchor", "ill", "interlanguage link", "nihongo"), 0),
    **dict.fromkeys(("quote", "blockquote", "cquote", "poem quote", "angle bracket", "char", "kbd", "var"), 0),
    **dict.fromkeys(("lang", "langue", "color", "nihongo2", "tooltip"), 1),
    **dict.fromkeys(("transl", "transliteration", "script"), -1),
}
# Templates that stand for characters.
CHARACTER_TEMPLATES = {
    "!": "|",
    "=": "=",
    "'": "'",
    "-": "",
    "·": " ·",
    "dot": " ·",
    "snd": " – ",
    "spaced ndash": " – ",
    "ndash": "–",
    "mdash": "—",
    "nbsp": " ",
    "spaces": " ",
    "thinsp": " ",
    "'s": "'s",
    "zwj": "",
    "shy": "",
    "br": "\n",
}


def extract_wikitext(source: str, file_namespaces: Collection[str] = FILE_NAMESPACES) -> str:
    """Return the plain text of a page; `file_namespaces` are the lowercase names whose links show no text.

    >>> extract_wikitext("'''Ada''' ({{born|1815}}) wrote [[program (computing)|program]]s.<ref>{{cite|a}}</ref>")
    'Ada wrote programs.'
    """
    literals: list[str] = []
    text = remove_opaque_tags(source.replace("\0", "").replace("\r\n", "\n"), literals)
    text = expand_nested(TEMPLATE_ARGUMENT.sub("", text), file_namespaces)
    text = VARIANT.sub(lambda match: choose_variant(match[1]), text)
    text = EXTERNAL_LINK.sub(lambda match: match[1].strip(), text)
    text = HTML_TAG.sub("", LINE_BREAK_TAG.sub("\n", text))
    text = "\n".join(format_lines(BEHAVIOR_SWITCH.sub("", text)))
    text = unescape_html(LEFT_BRACES.sub("", text))
    return tidy(LITERAL_MARK.sub(lambda match: literals[int(match[1])], tidy(text)))


def remove_opaque_tags(text: str, literals: list[str]) -> str:
    """Remove comments and `REMOVED_TAGS`; move the content of `LITERAL_TAGS` to `literals`, and leave a mark."""
    kept: list[str] = []
    start = search_from = 0  # of the text that is not copied yet, and of the search
    unclosed: set[str] = set()
    while match := OPAQUE_TAG.search(text, search_from):
        if match[1] is None:
            close = text.find("-->", match.end())
            end = len(text) if close < 0 else close + 3
            shown = ""
        else:
            name, tag_end, shown = match[1].lower(), text.find(">", match.end()), ""
            if tag_end < 0:
                break
            end = tag_end + 1
            if text[tag_end - 1] != "/":
                closing = None if name in unclosed else CLOSING_TAGS[name].search(text, end)
                if closing is None:  # as MediaWiki does, keep the text after a tag that nobody closes
                    unclosed.add(name)
                    search_from = end
                    continue
                if name in LITERAL_TAGS:
                    shown = f"\0{len(literals)}\0"
                    literals.append(unescape_html(text[end : closing.start()]))
                end = closing.end()
        kept += (text[start : match.start()], shown)
        start = search_from = end
    kept.append(text[start:])
    return "".join(kept)


# Templates, links and tables


class OpenMarkup:
    """A template, link or table that is not closed yet: its opening mark, and the pieces of each argument."""

    def __init__(self, mark: str, num_tables: int = 0) -> None:
        self.mark = mark
        self.num_tables = num_tables  # that are open, with this one
        self.arguments: list[list[str]] = [[]]

    def append(self, text: str) -> None:
        if text == "|" and self.mark in ("{{", "[["):
            self.arguments.append([])
        else:
            self.arguments[-1].append(text)

    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in self.arguments]

    def flatten(self) -> str:
        """Return the text of markup that nobody closes; of a table, the lines that are no rows."""
        text = "|".join(self.texts())
        if self.mark != "{|":
            return text
        return "\n".join(line for line in text.split("\n")[1:] if not line.lstrip().startswith(("|", "!")))


CLOSING_MARKS = {"}}": "{{", "]]": "[[", "|}": "{|"}


def expand_nested(text: str, file_namespaces: Collection[str]) -> str:
    """Replace templates, links and tables by what they show."""
    stack = [OpenMarkup("")]
    start = 0
    for match in NESTED_TOKEN.finditer(text):
        if match.start() > start:
            stack[-1].append(text[start : match.start()])
        start = match.end()
        token = match[0].strip(" \t:")
        if token in ("{{", "[[", "{|"):
            num_tables = stack[-1].num_tables + (token == "{|")
            if len(stack) <= MAX_NESTING and num_tables <= MAX_TABLES:
                stack.append(OpenMarkup(token, num_tables))
        elif token == "|" or not close_markup(stack, token, file_namespaces):
            stack[-1].append("|" if token == "|" else "")
    stack[-1].append(text[start:])
    while len(stack) > 1:
        shown = stack.pop().flatten()
        stack[-1].arguments[-1].append(shown)
    return "".join(stack[0].texts())


def close_markup(stack: list[OpenMarkup], token: str, file_namespaces: Collection[str]) -> bool:
    """Close the innermost markup that `token` ends, and append what it shows; False if there is none."""
    opening, level = CLOSING_MARKS[token], len(stack) - 1
    # MediaWiki expands templates before links and tables: those cannot end outside of the template they begin in.
    while stack[level].mark != opening and level > 0 and (token == "}}" or stack[level].mark == "[["):
        level -= 1
    if stack[level].mark != opening:
        return False
    while len(stack) - 1 > level:
        shown = stack.pop().flatten()
        stack[-1].arguments[-1].append(shown)
    closed = stack.pop()
    if opening == "{{":
        shown = expand_template(closed.texts())
    elif opening == "[[":
        shown = expand_link(closed.texts(), file_namespaces)
    else:
        shown = ""
    stack[-1].arguments[-1].append(shown)
    return True


def expand_template(arguments: list[str]) -> str:
    """Return what a template shows, if it only marks up its text; most show boxes, notes and sources: nothing.

    >>> expand_template(["lang", "fr", "mot"]), expand_template(["Convert", "5", "km", "mi", "abbr=on"])
    ('mot', '5 km')
    """
    name = arguments[0].strip().lower().replace("_", " ")
    if name in CHARACTER_TEMPLATES:
        return CHARACTER_TEMPLATES[name]
    values = [value.strip() for value in arguments[1:] if not NAMED_ARGUMENT.match(value)]
    if not values:
        quoted = (value.split("=", 1)[1].strip() for value in arguments[1:] if value.strip().startswith("text="))
        return next(quoted, "") if name in SHOWN_ARGUMENTS else ""
    if name in ("convert", "cvt"):
        return " ".join(values[:2])
    if name in ("circa", "c."):
        return f"c. {values[0]}"
    if name == "as of":
        return f"As of {values[0]}"
    if name.startswith("lang-"):
        return values[0]
    number = SHOWN_ARGUMENTS.get(name)
    return values[number] if number is not None and len(values) > number else ""


def expand_link(arguments: list[str], file_namespaces: Collection[str]) -> str:
    """Return the label of a link, or its target; nothing for files, categories and the same page in other languages.

    >>> expand_link(["Bus (vehicle)", "bus"], FILE_NAMESPACES), expand_link(["File:a.jpg", "thumb"], FILE_NAMESPACES)
    ('bus', '')
    """
    target = arguments[0].strip()
    namespace = target.partition(":")[0].strip().lower().replace("_", " ")
    if ":" in target and (namespace in file_namespaces or (len(arguments) == 1 and LANGUAGE_LINK.match(target))):
        return ""
    return arguments[-1] if len(arguments) > 1 else target.removeprefix(":")


def choose_variant(rule: str) -> str:
    """Return the first script variant of a rule: `zh-hans:网;zh-hant:網`, `A|zh:网`, or a plain text."""
    text = rule.rpartition("|")[2].partition(";")[0]
    code, colon, value = text.partition(":")
    return value.strip() if colon and code.strip().lower().startswith(("zh", "sr", "kk", "uz", "shi")) else text


# Lines


def format_lines(text: str) -> Iterator[str]:
    """Remove the marks of headings, lists, bold and italics; a heading appears with the first text below it."""
    waiting: list[tuple[int, str]] = []  # headings without text so far
    for raw in text.split("\n"):
        line = raw.strip()
        if len(line) > 2 and line[0] == line[-1] == "=" and (title := line.strip("=").strip()):
            level = len(line) - len(line.lstrip("="))
            waiting = [heading for heading in waiting if heading[0] < level]
            waiting.append((level, remove_quotes(title)))
            continue
        if line.startswith("----"):
            line = line.lstrip("-")
        line = remove_quotes(LIST_MARKS.sub("", line, count=1) if LIST_MARKS.match(line) else line)
        if line.strip():
            for _, title in waiting:
                yield from ("", title, "")
            waiting = []
        yield line


def remove_quotes(line: str) -> str:
    """Remove the apostrophes of bold and italics from a line, and keep those that are letters.

    Two are italic, three bold, five both; of four, or of more than five, the first ones are text. If bold and italic
    are both left open, one of the threes is an apostrophe and an italic mark: L'''Odyssée'' is L' and an italic word.

    >>> remove_quotes("'''a''' ''b''"), remove_quotes("L'''Odyssée''"), remove_quotes("''''tis")
    ('a b', "L'Odyssée", "'tis")
    """
    runs = list(QUOTES.finditer(line))
    if not runs:
        return line
    lengths = [len(run[0]) for run in runs]
    marks = [3 if size == 4 else min(size, 5) for size in lengths]
    if sum(mark in (2, 5) for mark in marks) % 2 and sum(mark in (3, 5) for mark in marks) % 2:
        threes = [i for i, mark in enumerate(marks) if mark == 3]
        before = {i: line[max(0, runs[i].start() - 2) : runs[i].start()] for i in threes}
        one_letter = [i for i in threes if before[i].strip() and len(before[i].strip()) == 1 and before[i][-1] != " "]
        in_words = [i for i in threes if len(before[i]) == 2 and " " not in before[i]]
        for i in (one_letter or in_words or threes)[:1]:
            marks[i] = 2
    kept: list[str] = []
    start = 0
    for run, size, mark in zip(runs, lengths, marks, strict=True):
        kept += (line[start : run.start()], "'" * (size - mark))
        start = run.end()
    return "".join(kept) + line[start:]


def tidy(text: str) -> str:
    """Remove empty brackets, spaces before commas, repeated spaces and blank lines."""
    text = SPACES.sub(" ", text)
    text = EMPTY_BRACKETS.sub("", text)
    text = SPACE_BEFORE.sub(r"\1", MARK_BEFORE_BRACKET.sub(")", MARK_AFTER_BRACKET.sub("(", text)))
    text = "\n".join(line.strip() for line in text.split("\n"))
    return BLANK_LINES.sub("\n\n", text).strip()
