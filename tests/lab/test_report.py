"""The report is one self-contained page with the given content."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from firth.core.html import INK_SENTINEL_COLOUR, MAX_PLOT_POINTS, ClozeSample, HtmlPage, plot_loss_curve
from firth.lab.report import ArmScore, plot_arms

EVIL = "<script>alert(\"x\")</script> & 'y'"
TRAIN = [(1, 9.0), (2, 7.0), (3, 6.0)]
EVALS = [(2, 7.5), (3, 6.5)]


class Reader(HTMLParser):
    """A parsed page: its tags with their attributes, and the text of each tag."""

    VOID = frozenset({"meta", "br", "hr", "img"})

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
    page.add_paragraph(words)
    page.add_table([words, "n"], [[words, 1]], words)
    page.add_figure(plot_loss_curve({words: TRAIN}, {words: EVALS}, 6.5), words)
    page.add_figure(plot_arms([ArmScore(words, words, 8, [0.5]), ArmScore("b", words, 8, [0.5])]), words)
    page.add_cloze_samples([ClozeSample(words, words, words, [(words, 0.5)])], words)
    page.add_code(words, words)
    return page


def test_everything_is_escaped() -> None:
    html = full_page(EVIL).to_html()
    assert "<script" not in html
    page = Reader(html)
    assert page.open == []
    for tag in ("title", "h1", "h2", "p", "th", "td", "mark", "pre", "figcaption"):
        assert EVIL in " ".join(page.of(tag)), tag
    assert any(EVIL in text for text in page.of("text"))


def test_the_page_needs_nothing_from_outside() -> None:
    html = full_page("words").to_html()
    tags = Reader(html).tags
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in tags)
    links = [value for _, attributes in tags for key, value in attributes.items() if key.endswith(("href", "src"))]
    assert links
    assert all(str(link).startswith("#") for link in links), "links inside figures point into the page"
    assert all("#" in match for match in re.findall(r"url\([^)]*\)", html))
    assert "@import" not in html


def test_names_inside_figures_are_used_once() -> None:
    page = HtmlPage("twice the same figure")
    page.add_figure(plot_loss_curve(TRAIN, EVALS))
    page.add_figure(plot_loss_curve(TRAIN, EVALS))
    ids = [attributes["id"] for _, attributes in Reader(page.to_html()).tags if "id" in attributes]
    assert ids
    assert len(ids) == len(set(ids))


def test_figures_take_the_colour_of_the_page() -> None:
    figure = Figure()
    figure.add_subplot().set_title("any figure at all")
    page = HtmlPage("colours")
    page.add_figure(figure, "a caption")
    html = page.to_html()
    assert "currentColor" in html
    assert INK_SENTINEL_COLOUR not in html
    svg = html[html.index("<svg") : html.index("</svg>")]
    assert re.search(r"fill: currentColor[^>]*>any figure at all<", svg)
    assert "#ffffff" not in svg
    assert 'role="img" aria-label="a caption"' in svg


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
    assert reader.of("p") == ["The ", " sat.", "It ", "."]
    assert reader.of("span") == ["dog", "50.0%", "cat", "25.0%", "rains", "100.0%"]
    guesses = [
        attributes["class"] for tag, attributes in reader.tags if str(attributes.get("class")).startswith("guess ")
    ]
    assert guesses == ["guess right"]
    assert 'style="width: 25.0%"' in page.to_html()


def test_loss_curve_of_one_run() -> None:
    (axes,) = plot_loss_curve(TRAIN, EVALS, 6.523).axes
    train, held_out, unigram = axes.get_lines()
    assert train.get_xydata().tolist() == [[1, 9], [2, 7], [3, 6]]  # type: ignore[union-attr]
    assert held_out.get_xydata().tolist() == [[2, 7.5], [3, 6.5]]  # type: ignore[union-attr]
    assert list(unigram.get_ydata()) == [6.523, 6.523]
    assert not axes.texts, "the legend is above the plot, and covers no line"
    words = "word frequencies only (unigram entropy): 6.52"
    assert axes.get_legend_handles_labels()[1] == ["training", "held out", words]


def test_loss_curve_of_several_runs() -> None:
    (axes,) = plot_loss_curve({"a": TRAIN, "$b$": TRAIN}, {"a": EVALS, "c": EVALS}).axes
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    assert list(colours) == ["a: training", "a: held out", r"\$b\$: training", "c: held out"]
    assert colours["a: training"] == colours["a: held out"]
    assert len(set(colours.values())) == 3
    assert len(axes.texts) == 0


def test_a_long_run_is_thinned_by_means() -> None:
    (axes,) = plot_loss_curve([(step, step % 2) for step in range(2 * MAX_PLOT_POINTS)], []).axes
    (line,) = axes.get_lines()
    assert len(line.get_xdata()) == MAX_PLOT_POINTS  # type: ignore[arg-type]
    assert set(line.get_ydata()) == {0.5}  # type: ignore[arg-type]
    assert list(line.get_xdata())[:2] == [0.5, 2.5]  # type: ignore[arg-type]


def test_nothing_to_plot_is_an_empty_plot() -> None:
    page = HtmlPage("empty")
    page.add_figure(plot_loss_curve([], []))
    page.add_figure(plot_arms([]))
    assert page.to_html().count("<svg") == 2


def test_arms_are_bars_with_a_dot_for_each_seed() -> None:
    rows = [
        ArmScore("tiny", start, labels, [mean - 2, mean, mean + 2])
        for labels, means in ((64, (16.0, 28.0, 44.0)), (256, (20.0, 40.0, 60.0)))
        for start, mean in zip(("from scratch", "counted embeddings", "pretrained"), means, strict=True)
    ]
    (axes,) = plot_arms(rows[:3], chance=11.2).axes
    assert [bar.get_height() for bar in axes.patches] == [16.0, 28.0, 44.0]  # type: ignore[attr-defined]
    assert [dots.get_offsets()[:, 1].tolist() for dots in axes.collections] == [  # type: ignore[index]
        [14.0, 16.0, 18.0],
        [26.0, 28.0, 30.0],
        [42.0, 44.0, 46.0],
    ]
    assert [text.get_text() for text in axes.texts] == ["16.0", "28.0", "44.0"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["from scratch", "counted embeddings", "pretrained"]
    assert axes.get_xlabel() == "64 labels"
    assert axes.get_legend_handles_labels()[1] == ["guessing: 11.2"]
    (axes,) = plot_arms(rows).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64 labels", "256 labels"]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]  # type: ignore[attr-defined]
    assert [round(x) for x in centres] == [0, 1, 0, 1, 0, 1], "by start, then by the number of labels"


def test_groups_of_bars_name_several_models() -> None:
    (axes,) = plot_arms([ArmScore(model, "pretrained", 32, [0.5]) for model in ("a", "b")]).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a\n32 labels", "b\n32 labels"]
