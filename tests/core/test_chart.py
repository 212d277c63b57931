"""Charts: where things are drawn, round ticks, and the numbers of marks."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from firth.core.chart import (
    MAX_MARKS,
    MAX_PLOT_POINTS,
    Axis,
    Chart,
    ParallelAxis,
    Reference,
    Row,
    Series,
    histogram,
    line_chart,
    log_ticks,
    loss_chart,
    mask_chart,
    nice_ticks,
    parallel_chart,
    row_chart,
)
from firth.lab.report import ArmScore, arm_chart

TRAIN = [(1.0, 9.0), (2.0, 7.0), (3.0, 6.0)]
EVALS = [(2.0, 7.5), (3.0, 6.5)]


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(f"<svg>{chart.body}</svg>")


def texts(chart: Chart, css_class: str) -> list[str]:
    return [e.text or "" for e in parsed(chart).iter("text") if e.get("class") == css_class]


def titles(chart: Chart) -> list[str]:
    return [str(e.text) for e in parsed(chart).iter("title")]


def drawn(chart: Chart, tag: str, css_class: str) -> list[ElementTree.Element]:
    return [e for e in parsed(chart).iter(tag) if css_class in str(e.get("class")).split()]


def test_loss_of_one_run() -> None:
    chart = loss_chart(TRAIN, EVALS, 6.523)
    assert [entry.name for entry in chart.legend] == [
        "training",
        "held out",
        "word frequencies only (unigram entropy): 6.523",
    ]
    assert titles(chart) == [
        "step 1 · training 9",
        "step 2 · training 7 · held out 7.5",
        "step 3 · training 6 · held out 6.5",
    ]
    assert chart.columns == ["step", "training", "held out"]
    assert chart.rows == [["1", "9", ""], ["2", "7", "7.5"], ["3", "6", "6.5"]]
    assert texts(chart, "name") == ["loss (nats per token)", "step"]
    assert texts(chart, "tick")[-3:] == ["1", "2", "3"], "there is no step 1.5"
    thin, thick = drawn(chart, "path", "line")
    assert "thin" in str(thin.get("class"))
    # y runs from 5.85 to 9.15: the range of the values, and a twentieth of it on both sides
    assert thin.get("d") == "M0.0 45.5L500.0 651.5L1000.0 954.5"
    assert str(thick.get("d")).startswith("M500.0 500.0L")
    assert [dot.get("cx") for dot in drawn(chart, "circle", "dot")] == ["50%", "100%"]
    (entropy,) = drawn(chart, "line", "dashed")
    assert entropy.get("y1") == entropy.get("y2") == "79.61%"


def test_loss_of_several_runs() -> None:
    chart = loss_chart({"a": TRAIN, "$b$": TRAIN}, {"a": EVALS, "c": EVALS})
    colours = {entry.name: entry.colour for entry in chart.legend}
    assert colours == {"a: training": 0, "a: held out": 0, "$b$: training": 1, "c: held out": 2}


def test_a_long_run_is_thinned_by_means() -> None:
    chart = loss_chart([(step, step % 2) for step in range(2 * MAX_PLOT_POINTS)], [])
    (line,) = drawn(chart, "path", "line")
    assert str(line.get("d")).count("L") == MAX_PLOT_POINTS - 1
    assert len(set(re.findall(r" ([\d.]+)", str(line.get("d"))))) == 1, "each point is the mean of two"
    assert len(chart.rows) == len(titles(chart)) == MAX_MARKS


def test_nothing_to_draw_is_an_empty_chart() -> None:
    for chart in (loss_chart([], []), arm_chart([]), line_chart([Series("a", [(1, math.nan)])], Axis("x"), Axis("y"))):
        assert titles(chart) == []
        assert texts(chart, "tick")


@pytest.mark.parametrize("factor", [-0.3, 0.0, 1.0, 1234.5])
@pytest.mark.parametrize("length", [1e-8, 0.37, 9.0, 4e6])
def test_ticks_are_round_and_inside(factor: float, length: float) -> None:
    low = factor * length
    ticks = nice_ticks(low, low + length)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 * length <= tick <= low + length * (1 + 1e-9) for tick in ticks)
    step = ticks[1] - ticks[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-6), 3) in (1, 2, 5, 10)


def test_ticks_of_logarithms() -> None:
    assert log_ticks(1, 1e12, 10) == [1, 100, 1e4, 1e6, 1e8, 1e10, 1e12]
    assert log_ticks(1000, 60_000, 2) == [1024, 2048, 4096, 8192, 16384, 32768]
    assert log_ticks(310, 420, 10) == [350, 400]
    chart = line_chart([Series("", [(10, 1), (100, 10), (1000, 100)])], Axis("x", 10), Axis("y", 10))
    (line,) = drawn(chart, "path", "line")
    assert str(line.get("d")).split("L")[1] == "500.0 500.0", "powers are at equal distances"
    assert texts(chart, "tick") == ["1", "10", "100", "10", "100", "1,000"]


def test_zero_has_no_logarithm_and_is_left_out() -> None:
    chart = line_chart([Series("a", [(0, 1), (10, 2), (100, 3)])], Axis("x", 10), Axis("y"))
    assert [row[0] for row in chart.rows] == ["10", "100"]


def test_rows_have_bars_and_a_dot_for_each_seed() -> None:
    scores = [
        ArmScore("tiny", start, labels, [mean - 2, mean, mean + 2])
        for start, means in (("from scratch", (16.0, 20.0)), ("pretrained", (44.0, 60.0)))
        for labels, mean in zip((64, 256), means, strict=True)
    ]
    chart = arm_chart(scores, chance=11.2)
    assert texts(chart, "group") == ["64 labels", "256 labels"]
    assert texts(chart, "row-name") == ["from scratch", "pretrained"] * 2
    assert texts(chart, "row-value") == ["16.0", "44.0", "20.0", "60.0"]
    assert titles(chart)[1] == "64 labels · pretrained 44.0 · 42.0, 44.0, 46.0"
    assert chart.rows[1] == ["64 labels: pretrained", "44.0", "42.0, 44.0, 46.0"]
    assert [entry.name for entry in chart.legend] == ["guessing: 11.2"]
    widths = [float(str(bar.get("width")).rstrip("%")) for bar in drawn(chart, "rect", "bin")]
    assert widths[1] / widths[0] == pytest.approx(44 / 16, rel=1e-3), "bars begin at 0"
    assert len(drawn(chart, "circle", "dot")) == 12


def test_rows_of_several_models_name_them() -> None:
    chart = arm_chart([ArmScore(model, "pretrained", 32, [0.5]) for model in ("a", "b")])
    assert texts(chart, "group") == ["a, 32 labels", "b, 32 labels"]


def test_markers_with_errors_need_no_zero() -> None:
    rows = [Row("a", 0.9, error=0.01, is_bar=False), Row("b", None, [0.88, 0.91], is_bar=False)]
    chart = row_chart(rows, Axis("accuracy"), [Reference("chance", 0.85)])
    assert texts(chart, "row-value") == ["0.9 ± 0.01", ""]
    assert chart.rows == [["a", "0.9", "± 0.01"], ["b", "", "0.88, 0.91"]]
    (line,) = drawn(chart, "line", "error-bar")
    assert float(str(line.get("x1")).rstrip("%")) < float(str(line.get("x2")).rstrip("%"))
    assert "0" not in texts(chart, "tick")


def test_a_histogram_counts_every_value() -> None:
    chart = histogram([0.0, 0.1, 0.9, 1.0, 1.0], 2, Axis("margin"), Axis("pairs"), [Reference("zero", 0.0)])
    assert chart.rows == [("0 to 0.5", "2"), ("0.5 to 1", "3")]
    bars = drawn(chart, "rect", "bin")
    assert [bar.get("width") for bar in bars] == ["50%", "50%"]
    heights = [float(str(bar.get("height")).rstrip("%")) for bar in bars]
    assert heights[1] / heights[0] == pytest.approx(3 / 2, rel=1e-3)
    assert sum(int(row[1]) for row in histogram([7.0] * 4, 5, Axis("x"), Axis("y")).rows) == 4  # type: ignore[call-overload]


def test_parallel_axes() -> None:
    axes = [
        ParallelAxis("learning rate", [1e-5, 1e-3], ["1e-5", "1e-3"], 10),
        ParallelAxis("epochs", [3, 3], ["3", "3"]),
    ]
    chart = parallel_chart(axes, ["one", "two"], [0, 1])
    assert titles(chart) == ["one · learning rate 1e-5 · epochs 3", "two · learning rate 1e-3 · epochs 3"]
    paths = [path.get("d") for path in drawn(chart, "path", "line")][::2]
    assert paths == ["M250.0 1000.0L750.0 500.0", "M250.0 0.0L750.0 500.0"]


def test_a_mask_has_a_mark_for_each_row() -> None:
    chart = mask_chart("M0 0h1v1h-1z", 2, 2, Axis("attended"), Axis("position"), ["0: 0", "1: 0–1"])
    assert titles(chart) == ["0: 0", "1: 0–1"]
    assert chart.rows == [["0", "0"], ["1", "0–1"]]
    assert texts(chart, "name") == ["position", "attended"]
