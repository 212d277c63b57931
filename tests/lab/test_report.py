"""The report is one self-contained page with the given content."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from firth.core.chart import loss_chart
from firth.core.html import ClozeSample, HtmlPage
from firth.lab.report import ArmScore, arm_chart

EVIL = "</style></title><script>alert(\"x\")</script> & 'y'"
TRAIN = [(1, 9.0), (2, 7.0), (3, 6.0)]
EVALS = [(2, 7.5), (3, 6.5)]


class Reader(HTMLParser):
    """A parsed page: its tags with their attributes, and the text of each tag."""

    VOID = frozenset({"meta", "br", "hr", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def full_page(words: str) -> HtmlPage:
    """A page with one of everything, with the same words everywhere."""
    page = HtmlPage(words)
    page.add_heading(words)
    page.add_lead(words)
    page.add_paragraph(words)
    page.add_note("warning", words, words, words, words)
    page.add_facts({words: words})
    page.add_table([words, "n"], [[words, 1]], words)
    page.add_chart(loss_chart({words: TRAIN}, {words: EVALS}, 6.5, words), words)
    page.add_charts([arm_chart([ArmScore(words, words, 8, [0.5]), ArmScore("b", words, 8, [0.5])], 0.1, words)], words)
    page.add_cloze_samples([ClozeSample(words, words, words, [(words, 0.5)])], words)
    page.add_code(words, words)
    return page


def test_everything_is_escaped() -> None:
    html = full_page(EVIL).to_html()
    assert "<script>" not in html
    page = Reader(html)
    assert page.open == []
    for tag in ("title", "h1", "h2", "h3", "p", "dt", "dd", "th", "td", "mark", "pre", "figcaption", "text", "li"):
        assert EVIL in " ".join(page.of(tag)), tag
    titles = [data for (parent, data) in page.texts if parent == "title"]
    assert sum(EVIL in title for title in titles) > 3, "those of marks too"
    values = [value for _, attributes in page.tags for value in attributes.values() if value and "alert" in value]
    assert len(values) == 3, "two charts and a bar"
    assert all(EVIL in value for value in values), "no quote ends an attribute"


def test_the_page_needs_nothing_from_outside() -> None:
    html = full_page("words").to_html()
    tags = Reader(html).tags
    assert {"link", "img", "iframe", "object", "image", "use", "base"}.isdisjoint(tag for tag, _ in tags)
    assert not [name for _, attributes in tags for name in attributes if name.endswith(("href", "src", "style"))]
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html


def test_the_policy_names_the_style_and_the_script_of_the_page() -> None:
    html = full_page("words").to_html()
    (policy,) = [a["content"] for tag, a in Reader(html).tags if a.get("http-equiv") == "Content-Security-Policy"]
    for directive, start, end in (
        ("style-src", "<style>", "</style>"),
        ("script-src", '<script type="module">', "</script>"),
    ):
        text = html.split(start)[1].split(end)[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    assert "unsafe" not in str(policy)
    assert "script-src" not in HtmlPage("no chart").to_html()


def test_a_wide_table_becomes_a_list_on_a_phone() -> None:
    page = HtmlPage("tables")
    page.add_table(["a", "b"], [["x", 1]])
    page.add_table(["a name", *(f"column {i}" for i in range(9))], [["x", *range(9)]])
    tables = [a.get("class") for tag, a in Reader(page.to_html()).tags if tag == "table"]
    assert tables == [None, "wide"]
    assert page.to_html().count('data-name="column 3"') == 1


def test_the_same_page_gives_the_same_file(tmp_path: Path) -> None:
    full_page("words").save(tmp_path / "a.html")
    full_page("words").save(str(tmp_path / "b.html"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_half_a_character_does_not_spoil_the_page(tmp_path: Path) -> None:
    page = HtmlPage("half \ud83d")
    page.save(tmp_path / "page.html")
    assert "<title>half ?</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_table_cells_and_sides() -> None:
    page = HtmlPage("table")
    page.add_table(
        ["model", "tokens", "accuracy", "note"],
        [["tiny", 1234567, "0.81 ± 0.02", None], ["2-layer", 20412.25, "−0.10", "new"], ["base", 0.123456, None, True]],
        "caption",
    )
    reader = Reader(page.to_html())
    assert reader.of("td") == [
        *("tiny", "1,234,567", "0.81 ± 0.02", "–"),
        *("2-layer", "20,412", "−0.10", "new"),
        *("base", "0.1235", "–", "yes"),
    ]
    sides = [attributes["class"] for tag, attributes in reader.tags if tag == "th"]
    assert sides == ["words", "number", "number", "words"]


def test_a_row_of_another_length_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        HtmlPage("table").add_table(["a", "b"], [[1]])


def test_samples_mark_the_blank_and_the_right_guess() -> None:
    page = HtmlPage("samples")
    page.add_cloze_samples(
        [
            ClozeSample("The ", " sat.", "cat", [("dog", 0.5), ("cat", 0.25)]),
            ClozeSample("It ", ".", None, [("rains", 1.0)]),
        ]
    )
    reader = Reader(page.to_html())
    assert reader.of("mark") == ["cat", "?"]
    assert reader.of("p")[1:] == ["The ", " sat.", "It ", "."]
    assert reader.of("span") == ["dog", "50.0%", "cat", "25.0%", "rains", "100.0%"]
    bars = [a["class"] for tag, a in reader.tags if str(a.get("class")).startswith("bar") and tag == "li"]
    assert bars == ["bar", "bar best", "bar"]
    assert [a["width"] for tag, a in reader.tags if tag == "rect"] == ["50.0%", "25.0%", "100.0%"]
