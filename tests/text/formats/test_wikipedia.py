"""Wikipedia dumps: a slice in the form of a real dump, the real dump slices that gensim ships, and damaged ones."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text.corpus import Corpus
from firth.text.formats import wikipedia
from firth.text.formats.wikitext import extract_wikitext
from firth.text.open_text import ReadProgress

# The header, the elements and their order, attributes and escapes are those of a dump of 2024 (schema 0.11).
HEAD = """\
<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" \
xsi:schemaLocation="http://www.mediawiki.org/xml/export-0.11/ http://www.mediawiki.org/xml/export-0.11.xsd" \
version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base>
    <generator>MediaWiki 1.42.0-wmf.26</generator>
    <case>first-letter</case>
    <namespaces>
      <namespace key="-2" case="first-letter">Medium</namespace>
      <namespace key="-1" case="first-letter">Spezial</namespace>
      <namespace key="0" case="first-letter" />
      <namespace key="1" case="first-letter">Diskussion</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="10" case="first-letter">Vorlage</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
PAGE = """\
  <page>
    <title>{title}</title>
    <ns>{ns}</ns>
    <id>{id}</id>{redirect}
    <revision>
      <id>{id}01</id>
      <parentid>{id}00</parentid>
      <timestamp>2024-03-05T10:01:46Z</timestamp>
      <contributor>
        <username>Ada</username>
        <id>7</id>
      </contributor>
      <minor />
      <comment>/* Leben */ [[WP:Typo]]</comment>
      <origin>{id}01</origin>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text bytes="{size}" sha1="lt7vpszqvlivqo3ygq1u3rwsvi0jb1u" xml:space="preserve">{text}</text>
      <sha1>lt7vpszqvlivqo3ygq1u3rwsvi0jb1u</sha1>
    </revision>
  </page>
"""
HARD = """\
{{Infobox Person
| Name = Ada Lovelace
| Bild = [[Datei:Ada.jpg|100px]]
| Tabelle =
{| class="wikitable"
! a !! b
|-
| 1 || {{!}}
|}
| Leer =
|}}
[[Datei:Ada Lovelace.jpg|mini|hochkant|Ada, [[Mathematikerin|Mathematik]] {{Kursiv|x}} &amp; [https://a.org Bild]]]
'''Ada Lovelace''' ({{IPA|ˈeɪdə}}; * [[10. Dezember]] [[1815]] in [[London]]<!-- ein
Kommentar --> {{†}}) war eine ''britische'' [[Mathematik]]erin.<ref name="a>b">{{Literatur |Titel=Ada}} [[X]]</ref>\
<ref name="b" /> Sie schrieb das erste [[Computerprogramm|'''Programm''']], siehe [[:Kategorie:Informatik]].

== Leben ==
=== Nur Tabelle ===
{| class="wikitable" style="x"
|-
| a || b
{|
| innen
|}
|}
=== Werk ===
* Erstens &lt;nowiki&gt;[[kein Link]] &amp;amp; '''roh'''&lt;/nowiki&gt;
# Zweitens: 3 &lt; 4, H&lt;sub&gt;2&lt;/sub&gt;O&lt;br /&gt;neue Zeile
: L'''Odyssée'' und {{lang|fr|mot juste}}, {{convert|5|km|mi}}
----
Die Formel &lt;math&gt;x_{i}&lt;/math&gt; und [https://example.org/a?b=c ein Verweis] [http://b.org].

== Einzelnachweise ==
&lt;references /&gt;
{{Normdaten|TYP=p}}
__NOTOC__
[[Kategorie:Mathematiker]]
[[en:Ada Lovelace]]
"""
EXPECTED = """\
Ada Lovelace

Ada Lovelace (* 10. Dezember 1815 in London) war eine britische Mathematikerin. Sie schrieb das erste Programm, siehe \
Kategorie:Informatik.

Leben

Werk

Erstens [[kein Link]] & '''roh'''
Zweitens: 3 < 4, H2O
neue Zeile
L'Odyssée und mot juste, 5 km

Die Formel und ein Verweis."""


def escape(text: str) -> str:
    """As a dump writes a text. The parts of HARD that are escaped once stay so."""
    return re.sub(r"&(?!lt;|gt;|amp;)", "&amp;", text).replace("<", "&lt;").replace(">", "&gt;")


def page(title: str, text: str, ns: int = 0, redirect: str = "", model: str = "wikitext") -> str:
    target = f'\n    <redirect title="{redirect}" />' if redirect else ""
    return PAGE.format(
        title=title, ns=ns, id=len(title), redirect=target, model=model, size=len(text.encode()), text=escape(text)
    )


DUMP = "".join(
    [
        HEAD,
        page("Ada Lovelace", HARD),
        page("Lovelace", "#WEITERLEITUNG [[Ada Lovelace]]", redirect="Ada Lovelace"),
        page("Diskussion:Ada Lovelace", "Eine Frage.", ns=1),
        page("Modul", "return 1", model="Scribunto"),
        page("Nur Vorlage", "{{Begriffsklärung}}"),
        page("Zweite Seite", "Ein &amp;bdquo;kurzer&amp;ldquo; Text.").replace("&amp;amp;", "&amp;"),
        "</mediawiki>\n",
    ]
)


def test_a_dump_gives_its_articles(tmp_path: Path) -> None:
    (tmp_path / "dewiki-20240301-pages-articles-multistream1.xml-p1p297012.bz2").write_bytes(
        b"".join(bz2.compress(part.encode()) for part in (DUMP[:3000], DUMP[3000:]))  # several streams in one file
    )
    corpus = Corpus(tmp_path)
    first, second = corpus
    assert first.text == EXPECTED
    assert first.source.endswith(".bz2:Ada Lovelace")
    assert second.text == "Zweite Seite\n\nEin „kurzer“ Text."
    assert corpus.describe().endswith(
        "bz2 with one document per article; 1 skipped: articles without text; 1 skipped: pages that are no articles; "
        "1 skipped: pages that are not wikitext; 1 skipped: redirects"
    )


def test_pages_without_text_or_title(tmp_path: Path) -> None:
    """As in dumps of titles and of deleted revisions: they are counted, like articles whose text is only markup."""
    bare = "<page><title>Leer</title><ns>0</ns><revision><model>wikitext</model></revision></page>"
    path = tmp_path / "dewiki.xml"
    path.write_text(HEAD + page("Baum", "Ein Baum.") + bare + "<page></page>" + "</mediawiki>\n")
    skipped = Counter[str]()
    found = list(wikipedia.read_wikipedia_dump(path, path.name, ReadProgress(), skipped))
    assert found == [("Baum", "Baum\n\nEin Baum.")]
    assert skipped == {"articles without text": 2}


def test_a_history_gives_the_last_revision(tmp_path: Path) -> None:
    older, newer = page("A", "Alt."), page("A", "Neu.")
    revision = newer[newer.index("    <revision>") : newer.index("  </page>")]
    (tmp_path / "a.xml").write_text(HEAD + older.replace("  </page>", revision + "  </page>") + "</mediawiki>")
    assert [d.text for d in Corpus(tmp_path / "a.xml")] == ["A\n\nNeu."]


REAL = {  # articles, a phrase of the text, and how many skipped pages
    "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (
        106,
        "The term anarchism is a compound word composed from the word anarchy and the suffix -ism",
        100,
    ),
    "bgwiki-latest-pages-articles-shortened.xml.bz2": (1, "календар (понякога наричан и Грегориански календар,", 2),
    "enwiki-table-markup.xml.bz2": (5, "only two constructive votes of no confidence have been attempted", 0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("enwiki-latest")) for n in REAL]
)
def test_slices_of_real_dumps(name: str) -> None:
    """gensim tests its own reader with them; bgwiki's is UTF-16."""
    spec = importlib.util.find_spec("gensim")
    if spec is None:  # it has no wheel for Python 3.14
        pytest.skip("gensim is not installed")
    assert spec.origin is not None
    path = Path(spec.origin).parent / "test" / "test_data" / name
    num_articles, phrase, num_skipped = REAL[name]
    skipped: Counter[str] = Counter()
    texts = [text for _, text in wikipedia.read_wikipedia_dump(path, name, ReadProgress(), skipped)]
    assert (len(texts), skipped.total()) == (num_articles, num_skipped)
    whole = "\n".join(texts)
    assert phrase in whole
    assert not re.search(r"\[\[|\]\]|\{\{|\}\}|'''|</?ref|\{\||^\s*\|-|\bthumb\||&nbsp;", whole, re.MULTILINE)
    assert len(re.findall(r"\(\s*[,;)]", whole)) == 0


MARKUP = {
    "nested links": ("[[File:a.jpg|thumb|a [[b|c]] d]]x", "x"),
    "link trail": ("[[bus]]es and [[London|the city]]", "buses and the city"),
    "unclosed template": ("a {{b|c\n\nd", "a b|c\n\nd"),
    "unclosed table": ("{|\n|-\n| a\nprose after\n", "prose after"),
    "unclosed comment": ("a <!-- b", "a"),
    "unclosed ref": ("a<ref>b c", "ab c"),
    "stray ends": ("a }} b ]] c |} d", "a b c d"),
    "template ends a line": ("{{a\n|b=c\n|}}\nd", "d"),
    "table in a template": ("{{a|\n{|\n| x\n|}\n}}b", "b"),
    "empty sections": ("== A ==\n=== B ===\n== C ==\nd", "C\n\nd"),
    "four apostrophes": ("''''tis'''", "'tis"),
    "script variants": ("-{zh-hans:网络;zh-hant:網路}-上", "网络上"),
    "text template": ("{{quote|text=Be bold.}} {{nowrap|5 km}} {{ndash}}", "Be bold. 5 km –"),
}


@pytest.mark.parametrize("name", MARKUP)
def test_markup(name: str) -> None:
    source, expected = MARKUP[name]
    assert extract_wikitext(source) == expected


@pytest.mark.parametrize(
    "unit",
    [
        "{{",
        "[[",
        "{|\n",
        "}}",
        "<ref>",
        "<nowiki>",
        "<!--",
        "'''''",
        "=",
        "[http://a ",
        "{{{",
        "-{",
        "(",
        " ",
        "|",
        "\n|}",
        "\0",
    ],
)
def test_time_grows_with_the_text(unit: str) -> None:
    started = time.process_time()
    extract_wikitext(unit * (2**15 // len(unit)) + " the end")
    assert time.process_time() - started < 3


# Bad input


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as told:
        list(Corpus(path))
    message = str(told.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_cut_dump(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(DUMP[:2500])
    assert "the dump is cut in the page 'Ada Lovelace'. Download it again." in refusal(tmp_path / "a.xml")
    (tmp_path / "b.xml.bz2").write_bytes(bz2.compress(DUMP.encode())[:-200])
    assert "the compressed file is truncated" in refusal(tmp_path / "b.xml.bz2")


@pytest.mark.parametrize("encoding", ["shift_jis", "utf-7", "big5", "idna", "no-such"])
def test_declared_encodings(encoding: str, tmp_path: Path) -> None:
    dump = tmp_path / "dump.xml"
    dump.write_text(f'<?xml version="1.0" encoding="{encoding}"?>\n{HEAD}</mediawiki>\n')
    assert "encoding" in refusal(dump)


def test_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.xml").write_text("<rss><a>b</a></rss>")
    assert "not a MediaWiki dump: its first element is <rss>. Convert other XML" in refusal(tmp_path / "a.xml")
    (tmp_path / "b.xml").write_bytes(HEAD.encode() + page("Ä", "a").encode("latin-1"))
    assert re.search(r"b.xml:\d+: not the XML of a MediaWiki dump \(not well-formed", refusal(tmp_path / "b.xml"))
    (tmp_path / "c.xml").write_bytes(gzip.compress(DUMP.encode()))
    assert "not the XML of a MediaWiki dump" in refusal(tmp_path / "c.xml")
    (tmp_path / "d.txt").write_text("a text")
    (tmp_path / "b.xml").unlink()
    (tmp_path / "c.xml").unlink()
    assert [d.text for d in Corpus(tmp_path)] == ["a text"]
    assert ".xml that is no Wikipedia dump" in capsys.readouterr().err


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entities = '<!DOCTYPE m [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><mediawiki>&b;</mediawiki>'
    (tmp_path / "a.xml").write_text(entities)
    assert "it declares a document type" in refusal(tmp_path / "a.xml")
    (tmp_path / "b.xml").write_text("<mediawiki>" + "<a>" * 10**5)
    assert "elements are nested 50 deep" in refusal(tmp_path / "b.xml")
    monkeypatch.setattr(wikipedia, "MAX_TOKEN_BYTES", 2**17)
    (tmp_path / "c.xml.bz2").write_bytes(bz2.compress(b"<mediawiki " + b"a" * 2**20))
    assert "a tag of more than 131,072 bytes" in refusal(tmp_path / "c.xml.bz2")
    monkeypatch.setattr(wikipedia, "MAX_PAGE_CHARS", 1000)
    (tmp_path / "d.xml").write_text(HEAD + page("A", "a" * 2000) + page("B", "b") + "</mediawiki>")
    corpus = Corpus(tmp_path / "d.xml")
    assert [d.text for d in corpus] == ["B\n\nb"]
    assert "1 skipped: pages over 1,000 characters" in corpus.describe()
