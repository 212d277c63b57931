"""Every page in a real browser: on a phone and on a desk, light and dark, by pointer and by keys.

pip install playwright && apt-get install chromium
python -m pytest -m browser tests/test_pages_browser.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from serve.test_browser import NAMELESS, SIZES, browser
from test_pages import PAGES, home, make_page

from firth.core.chart import Axis, Series, line_chart, loss_chart
from firth.serve.page_files import read_page_files

__all__ = ["browser", "home"]  # fixtures
pytestmark = [pytest.mark.browser, pytest.mark.slow]

# Elements that stick out of the screen, except those inside of a box that scrolls.
WIDE = """() => [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest(".scroll")
  && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 120))"""
# Texts of ticks of one axis that cover each other.
COVERED = """() => [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const ticks = [...chart.querySelectorAll("text.tick[text-anchor=middle]")].map((t) => t.getBoundingClientRect());
  return ticks.slice(1).filter((box, i) => box.left < ticks[i].right).map(() => chart.getAttribute("aria-label"));
})"""

# What is drawn in a chart; the text of an element where it has no such attribute.
READ = """function read(root) {
  const all = (query, ...names) => [...root.querySelectorAll(query)].map(
    (e) => names.map((name) => e.getAttribute(name) ?? e.textContent));
  return { marks: all("title", "text").flat(), ticks: all("text", "x", "y", "class", "text"),
    paths: all("path.line", "d"), dots: all("circle", "cx", "cy") };
}"""
DRAW = f"""async (options) => {{ {READ}
  const {{ lineChart }} = await import("/page/chart.js");
  const figure = lineChart(options);
  const marks = [...figure.querySelectorAll(".mark")].map((mark) => {{
    mark.dispatchEvent(new PointerEvent("pointerenter"));
    return figure.querySelector(".readout").textContent;
  }});
  return {{ ...read(figure), marks }};
}}"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, home: Path, tmp_path: Path, browser: Any) -> None:
    path = make_page(name, home, tmp_path)
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            page = context.new_page()
            problems: list[str] = []
            page.on("console", lambda m, p=problems: p.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda e, p=problems: p.append(str(e)))
            page.on("dialog", lambda d, p=problems: (p.append(d.message), d.dismiss()))
            page.on("request", lambda r, p=problems: p.append(r.url) if not r.url.startswith("file:") else None)
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (size, scheme)
            assert page.evaluate(WIDE) == [], (size, scheme)
            assert page.evaluate(COVERED) == [], (size, scheme)
            assert page.evaluate(NAMELESS) == []
            dark = (
                sum(map(int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))))
                < 200
            )
            assert dark == (scheme == "dark")
            charts = page.locator("svg.chart")
            for i in range(charts.count()):
                chart, readout = charts.nth(i), page.locator(".chart-figure .readout").nth(i)
                chart.focus()
                page.keyboard.press("ArrowRight")
                first = readout.inner_text()
                page.keyboard.press("End")
                assert re.search(r"\d", first)
                assert chart.locator(".mark.on").count() == 1
            if charts.count():
                charts.first.hover(position={"x": 5, "y": 20})
                assert page.locator(".chart-figure .readout").first.inner_text()
            context.close()
            assert problems == []


def test_paper_is_light(home: Path, tmp_path: Path, browser: Any) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(make_page("evaluate/report.py:write_run_report", home, tmp_path).as_uri())
    page.emulate_media(media="print")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(252, 252, 250)"
    assert not page.locator(".tools, .numbers-table, .readout").first.is_visible()
    assert len(page.pdf(format="A4")) > 10_000
    context.close()


def test_the_playground_draws_the_charts_of_reports(tmp_path: Path, browser: Any) -> None:
    """The same points: the same ticks, paths, dots and numbers by `chart.js` as by `core/chart.py`."""
    train = [(float(i), 9.0 / i + 0.001 * (i * 7919 % 100)) for i in range(1, 400)]
    held_out = [(float(i), 8.0 / i + 3) for i in range(20, 400, 20)]
    wide = [(1e6 * i, 1e-5 * i) for i in range(5)]
    cases = [
        (loss_chart(train, held_out, 6.523), [("training", train, "thin"), ("held out", held_out, "dots")], [6.523]),
        (line_chart([Series("", wide)], Axis("step"), Axis("rate")), [("", wide, "")], []),
    ]
    files = read_page_files()
    context = browser.new_context()
    page = context.new_page()
    page.route(
        "http://page.test/**",
        lambda route: route.fulfill(
            body=files[name].content if (name := route.request.url.rpartition("/")[2]) in files else "<main id=panel>",
            content_type=files[name].media_type if name in files else "text/html",
        ),
    )
    page.goto("http://page.test/")
    for chart, series, lines in cases:
        x_name, y_name = chart.columns[0], chart.label.split(" by ")[0]
        drawn = page.evaluate(
            DRAW,
            {
                "series": [{"name": n, "points": p, "colour": "red", kind or "solid": True} for n, p, kind in series],
                "lines": [{"name": "entropy", "y": y} for y in lines],
                "xLabel": x_name,
                "yLabel": y_name,
                "label": "a chart",
            },
        )
        page.set_content(f"<svg id=ours>{chart.body}</svg>")
        ours = page.evaluate(f"() => {{ {READ} return read(document); }}")
        ours["ticks"] = [[str(float(v)) if re.fullmatch(r"-?[\d.]+", v) else v for v in tick] for tick in ours["ticks"]]
        drawn["ticks"] = [
            [str(float(v)) if re.fullmatch(r"-?[\d.]+", v) else v for v in tick] for tick in drawn["ticks"]
        ]
        assert drawn == ours
        page.goto("http://page.test/")
    context.close()
