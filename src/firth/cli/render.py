"""Everything that commands print: --help, tables and JSON."""

from __future__ import annotations

import json
import math
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.core.console import (
    escape_character,
    format_count,
    format_duration,
    print_text,
    runnable,
    say,
    show_table,
    stdout_console,
    warn,
)
from firth.core.files import format_bytes, replace_nonfinite
from firth.core.html import format_cell

if TYPE_CHECKING:
    import numpy as np

    from firth.cli.command import Option

HELP_WIDTH, LABEL_WIDTH = 80, 26  # columns of --help, and of its left part with the options
MAX_TEXT_CHARS = 40  # characters: longer texts are shortened in tables
MAX_LISTED_TOKENS = 20  # new tokens of an extended tokenizer that are shown
CORRELATIONS = ("mcc", "pearson", "spearman")
MAX_HELP_CHARS = 110  # characters of one option's text in --help, about two lines
REQUIRED, RUN, OUTPUT, KEY_VALUE = "Required", "Run", "Output", "KEY=VALUE"  # topics: first, the last two, the footer


def render_help(
    path: str,
    description: str,
    examples: str,
    options: Sequence[Option],
    nested: Sequence[tuple[str, str]],
    show_all: bool,
) -> str:
    """One sentence, usage, examples, and options by topic, the required ones first.

    --help shows the options that most people use, each with the first sentence of its text; --help-all shows all.
    `nested` are names and texts of the fields that KEY=VALUE sets.
    """

    def shorten(text: str) -> str:
        """The first sentence; of a long one the first clause."""
        first = re.split(r"(?<=[.?]) (?=[A-Z])", text)[0]
        return (
            text if show_all else first if len(first) <= MAX_HELP_CHARS else first.partition(";")[0].rstrip(".") + "."
        )

    needed = [o for o in options if o.argument] + [o for o in options if o.topic == REQUIRED and not o.argument]
    usage = " ".join(["Usage:", path, *(o.label for o in needed), "[OPTIONS]"])
    lines = [*textwrap.wrap(shorten(description), HELP_WIDTH), "", *wrap(usage, " " * 7)]
    if examples:
        lines += ["", "Examples:", textwrap.indent(examples.strip("\n"), "  ")]
    shown = [o for o in options if (show_all or o.common) and o.topic != KEY_VALUE]
    for topic in sorted(dict.fromkeys(o.topic for o in shown), key=topic_order):
        lines += ["", f"{topic}:"]
        for o in shown:
            if o.topic == topic:
                lines += render_row(o.label, shorten(o.help) + o.default_note)
    if show_all and nested:
        lines += ["", f"{KEY_VALUE}:", *(line for label, text in nested for line in render_row(label, text))]
    lines += [""] + [line for o in options if o.topic == KEY_VALUE for line in wrap(f"KEY=VALUE: {o.help}", "  ")]
    if rest := len(options) - len([o for o in options if o.common]):
        lines += [] if show_all else [f"--help-all shows {format_count(rest, 'more option')} and the full texts."]
    return "\n".join(lines).rstrip() + "\n"


def topic_order(topic: str) -> tuple[bool, bool, bool]:
    return topic != REQUIRED, topic == OUTPUT, topic == RUN


def render_row(label: str, text: str) -> list[str]:
    """An option and its text, beside it or, under a long option, on the next line."""
    indent = " " * (LABEL_WIDTH + 2)
    fits = len(label) + 4 <= len(indent)
    first = f"  {label}".ljust(len(indent)) if fits else indent
    return ([] if fits else [f"  {label}"]) + [line.replace("\xa0", " ") for line in wrap(text, indent, first)]


def wrap(text: str, indent: str, first: str = "") -> list[str]:
    return textwrap.wrap(
        text, HELP_WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def print_json(value: Any) -> None:
    print(json.dumps(replace_nonfinite(value), ensure_ascii=False, allow_nan=False))


def print_result(result: Mapping[str, Any], as_json: bool, title: str) -> None:
    """The JSON of a command, or a table of its names and values. Of several processes only the main one prints."""
    if stdout_console.quiet:
        return
    if as_json:
        print_json(result)
        return
    if result.get("dry_run"):
        result, title = readable_estimate(result), f"{title}, not started: what it would take"
    rows = list[tuple[str, str]]()
    for name, value in result.items():
        if isinstance(value, dict) and any(isinstance(part, list) for part in value.values()):
            rows += [(f"{name}: {key}", format_value(part)) for key, part in value.items()]
        elif isinstance(value, list) and all(isinstance(part, dict) for part in value):  # the first entry is a name
            for part in value:
                (_, part_name), *facts = part.items()
                rows.append((f"{name}: {part_name}", format_value(dict(facts))))
        elif value is not None:
            rows.append((name, format_with_deviation(name, [value], None)[0]))
    show_table(title, ["", ""], rows)


def print_extension(result: Mapping[str, Any]) -> None:
    """The fragmentation of the text before and after, and the new tokens that save most."""
    before, after = result["before"], result["after"]
    measures = {
        "tokens per word": ("tokens_per_word", "{:.3f}"),
        "words of several tokens": ("split_words_share", "{:.1%}"),
        "tokens per MB": ("tokens_per_mb", "{:,.0f}"),
        "unknown tokens per MB": ("unknown_per_mb", "{:,.0f}"),
    }
    rows = [
        (name, form.format(before[key]), form.format(after[key]), f"{after[key] / before[key] - 1:+.1%}")
        for name, (key, form) in measures.items()
        if before[key]
    ]
    kind = "held-out document" if result["measured_apart"] else "document"
    measured = format_count(result["measured_documents"], kind)
    show_table(f"Measured on {measured}", ["", "before", "after", "change"], rows)
    new, shown = result["new_tokens"], result["new_tokens"][:MAX_LISTED_TOKENS]
    columns = ["new token", "form", "count", "tokens saved per MB", "pieces before"]
    listed = [
        (t["text"], t["form"], f"{t['count']:,}", f"{t['saved_tokens_per_mb']:,.1f}", " ".join(t["old_pieces"]))
        for t in shown
    ]
    show_table(f"{format_count(len(new), 'new token')}; the {len(shown)} that save most", columns, listed)
    say(
        f"{result['output_dir']} has {result['vocab_size']:,} tokens; extension.json lists the new ones. "
        "Words without a new token keep their ids. `firth adapt CHECKPOINT` adds such tokens to a model."
    )


def print_pretraining(result: Mapping[str, Any], as_json: bool) -> None:
    """The results of a run, then in one line what they mean and the next command."""
    shown = result if as_json else {k: v for k, v in result.items() if k not in ("report", "summary", "next")}
    print_result(shown, as_json, "Pretraining")
    if not as_json and "report" in result:
        say(f"The report is {result['report']}.")
        say(f"{result['summary']}; next: {runnable(result['next'])}")


def print_adaptation(result: Mapping[str, Any], as_json: bool) -> None:
    """Both texts before and after, then what the figures mean."""
    if as_json or result.get("dry_run"):
        print_result(result, as_json, "Adaptation")
        return
    from firth.lab.adapt_page import measure_table

    show_table(f"{result['checkpoint']} adapted to {result['data']}", *measure_table(result))
    say(f"{result['new_tokens']['decision']}")
    say(f"The model is {Path(result['output_dir']) / 'final'}.")
    if "report" in result:
        say(f"The report is {result['report']}.")
        say(f"{result['summary']}; next: {runnable(result['next'])}")


def print_diagnosis(result: Mapping[str, Any]) -> None:
    """What the loss should be, then one block for each finding: what, evidence, cause, command."""
    names = {"ln_vocab": "ln V", "unigram": "unigrams", "bigram": "bigrams", "trigram": "trigrams"}
    known = [f"{names.get(name, name)} {value:.2f}" for name, value in result["references"].items()]
    if result["loss"] is not None:
        print_text(f"{result['run']}: loss {result['loss']:.2f}" + (f" ({', '.join(known)})" if known else ""))
    for finding in result["findings"]:
        evidence = ", ".join(f"{name} {format_cell(value)}" for name, value in finding["evidence"].items())
        print_text(f"\n{finding['level']}: {finding['title']} [{finding['rule']}]")
        command = runnable(finding["command"] or "")
        for name, text in (("evidence", evidence), ("cause", finding["cause"]), ("try", command)):
            if text:
                print_text(f"  {name:<10}{text}")
    for reason in result["not_examined"]:
        print_text(f"\nnot examined: {reason}")
    if not result["findings"]:
        is_whole = not result["not_examined"]
        print_text(
            f"healthy: {result['rules']} rules, no finding" if is_whole else f"no finding of {result['rules']} rules"
        )


def readable_estimate(result: Mapping[str, Any]) -> dict[str, Any]:
    """A dry run's result with sizes and times as text.

    >>> readable_estimate({"dry_run": True, "memory_bytes": 16_000_000, "seconds": 90.0, "steps": 3})
    {'memory, without activations': '16.0 MB', 'time, about': '1m30s', 'steps': 3}
    """
    found = dict[str, Any]()
    for name, value in result.items():
        if name == "seconds":
            found["time, about"] = format_duration(value)
        elif name == "memory_bytes":
            found["memory, without activations"] = format_bytes(value)
        elif name.endswith("_bytes"):
            found[name.removesuffix("_bytes").replace("_", " ")] = format_bytes(value)
        elif name != "dry_run":
            found[name.replace("_", " ")] = value
    return found


def format_value(value: Any) -> str:
    """
    >>> format_value(0.123456), format_value(1203), format_value([1.5, None]), format_value({"f1": 0.5})
    ('0.1235', '1,203', '1.5, ', 'f1 0.5')
    """
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {format_value(v)}" for k, v in value.items())
    return "" if value is None else str(value)


def format_score(name: str, value: Any, num_examples: int) -> str:
    """Format a score with the digits that this many examples support; a share is a percentage.

    These are shares and correlations. Other scores, such as bits per byte, do not count examples: four digits.

    A share of n examples moves in steps of 1/n, and its standard error is up to 0.5 / sqrt(n). So digits finer than a
    step, or than a tenth of that error, are left out.

    >>> [format_score("accuracy", x, n) for x, n in ((10 / 12, 12), (0.84317, 1000), (0.84317, 10_000))]
    ['83%', '84.3%', '84.32%']
    >>> [format_score(name, x, n) for name, x, n in (("mcc", 0.84317, 1000), ("bits_per_byte", 0.93412, 1))]
    ['0.843', '0.9341']
    """
    from firth.metrics import format_metric, is_share_metric

    is_share = is_share_metric(name)
    is_bounded = isinstance(value, float) and abs(value) <= 1 and (is_share or name in CORRELATIONS)
    if not is_bounded or num_examples < 1:
        return format_metric(name, value) if isinstance(value, float) else format_value(value)
    decimals = min(math.ceil(math.log10(num_examples)), math.ceil(math.log10(20 * math.sqrt(num_examples))))
    decimals = min(max(decimals, 2), 4)
    return f"{100 * value:.{decimals - 2}f}%" if is_share else f"{value:.{decimals}f}"


def format_with_deviation(name: str, values: Sequence[Any], deviation: Any) -> list[str]:
    """Format scores of a metric with two digits of their standard deviation; shares are percentages.

    >>> format_with_deviation("accuracy", [0.73121, 0.02134], 0.02134), format_with_deviation("bleu", [41.2], 1.23)
    (['73.1%', '2.1%'], ['41.2'])
    >>> format_with_deviation("accuracy", [0.73121, None], None)
    ['73.1%', '']
    """
    from firth.metrics import format_metric, is_share_metric

    scale, unit = (100, "%") if is_share_metric(name) else (1, "")
    if not (isinstance(deviation, float) and math.isfinite(deviation) and deviation > 0):
        is_share = is_share_metric(name)
        return [format_metric(name, x) if is_share and isinstance(x, float) else format_value(x) for x in values]
    decimals = min(max(1 - math.floor(math.log10(scale * deviation)), 0), 4)
    return [f"{scale * x:,.{decimals}f}{unit}" if isinstance(x, float) else format_value(x) for x in values]


def format_magnitude(number: float) -> str:
    """
    >>> format_magnitude(124_439_808), format_magnitude(1.5e12)
    ('124M', '1.5T')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def print_seeds(result: Mapping[str, Any], dev: str, output_dir: str) -> None:
    """The scores of each seed of a fine-tuning, their mean and their standard deviation."""
    from firth.evaluate import seed_table
    from firth.evaluate.report import describe_chance, name_positive_class
    from firth.tasks.registry import LABEL_TASKS

    names, rows = seed_table(result)
    cells = [(name, *format_score_row(name, names[1:], values)) for name, *values in rows]
    show_table(f"{result['task']} on {dev}", names, name_positive_class(cells, result))
    if result["task"] in LABEL_TASKS and result.get("chance") is not None and not result["failed"]:
        say(describe_chance(result))
    print_distillation(result)
    name = f"--task {next(iter(result['tasks']))} " if result.get("tasks") else ""
    data = "FILE" if name else shlex.quote(dev)
    command = f"firth predict {shlex.quote(f'{output_dir}/final')} {name}--data {data}"
    say(f"The model is {output_dir}/final, the report {result['report']}; next: {runnable(command)}")


def print_distillation(result: Mapping[str, Any]) -> None:
    """Teacher and student side by side, if the run has a teacher."""
    from firth.evaluate.report import distillation_table

    if result.get("distillation"):
        columns, rows = distillation_table(result)
        show_table("teacher and student, milliseconds per example", columns, rows)


def format_score_row(metric: str, names: Sequence[str], values: Sequence[Any]) -> list[str]:
    """Format the scores of a metric; a column "deviation" says how many digits mean something."""
    return format_with_deviation(metric, values, values[names.index("deviation")] if "deviation" in names else None)


def print_arms(result: Mapping[str, Any]) -> None:
    """The scores of both arms of a fine-tuning with --against."""
    from firth.lab.against import arm_table

    other = result["against"]
    names, rows = arm_table(
        {Path(arm["output_dir"]).name: {**arm, "metric": result["metric"]} for arm in (result, other)}
    )
    cells = [(arm, *format_score_row(result["metric"], names[1:], values)) for arm, *values in rows]
    show_table(f"{result['task']}: two arms", names, cells)
    print_distillation(result)
    say(f"The model is {result['output_dir']}/final, the report {result['report']}.")


def print_plan(result: Mapping[str, Any]) -> None:
    """A plan beside its alternatives, where it extrapolates, and the command to paste."""
    from firth.lab.planner import plan_column

    text, chosen = result["text"], result["chosen"]
    about = "about " if text["is_estimated"] else ""
    runs = [("smaller", result["smaller"]), ("planned", chosen), ("larger", result["larger"])]
    shown = [(name, plan_column(run)) for name, run in runs if run is not None]
    rows = [(row, *(column[row] for _, column in shown)) for row in plan_column(chosen)]
    tokens = f"{about}{text['tokens']:,} tokens in {format_count(text['documents'], 'document')}"
    show_table(f"{tokens}, on {result['device']}", ("", *(name for name, _ in shown)), rows)
    points = "; ".join(f"{name}: {reason}" for name, reason in chosen["extrapolations"].items())
    say(f"The expected loss is extrapolated. {points}." if points else "The expected loss is within what was measured.")
    for note in result["notes"]:
        warn(note)
    print_text(result["command"])


def print_scaling_law(result: Mapping[str, Any]) -> None:
    """The parameters of a fitted law with their intervals, and the size that the compute of the largest run suits."""
    from firth.lab.plan import PARAMETER_NAMES

    rows = [
        (title, f"{result['law'][name]:.3g}", "{:.3g} to {:.3g}".format(*result["intervals"][name]))
        for name, title in PARAMETER_NAMES.items()
    ]
    show_table(f"Scaling law of {len(result['runs'])} runs", ("parameter", "value", "95% interval"), rows)
    error, flops, best = (result[name] for name in ("mean_error", "flops", "optimal_parameters"))
    say(f"The law misses these runs by {100 * error:.1f}% on average. The curves are in {result['page']}.")
    say(
        f"For {flops:.2g} FLOPs, those of the largest run, and unlimited text the best size is "
        f"{best / 1e6:,.1f} million parameters."
    )


def print_evaluation(result: Mapping[str, Any]) -> None:
    from firth.evaluate.report import name_positive_class

    n = result["examples"]
    rows = [(name, format_score(name, value, n)) for name, value in result["metrics"].items()]
    groups = [(f"  {name}", format_score("accuracy", value, n)) for name, value in result.get("by_group", {}).items()]
    if rows:
        name = ", ".join(result["data"]) if isinstance(result["data"], list) else result["data"]
        title = f"{result['task']} on {name}: {format_count(result['examples'], 'example')}"
        if "std" in result:  # over seeds and templates
            title += f", {format_count(result['shots'], 'shot')}"
            deviations = [(*row, format_score(row[0], result["std"].get(row[0]), n)) for row in rows]
            show_table(title, ["metric", "mean", "deviation"], deviations)
        else:
            show_table(title, ["metric", "score"], name_positive_class(rows + groups, result))
    say(f"The predictions are {result['predictions']}, the report {result['report']}.")


def print_suite(result: Mapping[str, Any]) -> None:
    from firth.evaluate.suite import SUITE_COLUMNS, format_suite_rows

    show_table(f"{result['suite']}: {result['checkpoint']}", SUITE_COLUMNS, format_suite_rows(result))
    say(f"The report is {result['report']}.")


def print_generated_texts(results: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"text": results[0]["text"], "results": results})
    else:
        print_text("\n\n".join(result["text"] for result in results))


def visible_text(text: str) -> str:
    """Return a text in one line, with line ends, tabs and control characters visible.

    >>> visible_text("a b\\nc"), visible_text(" ")
    ('a b⏎c', '␣')
    """
    return "".join(c if c == " " and text.strip() else escape_character(c) for c in text)


def print_vectors(texts: Sequence[str], vectors: np.ndarray, similarity: list[list[float]] | None) -> None:
    """The cosine of each two texts, or else the norm and the first components of each vector."""
    names = [text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..." for text in texts]
    if similarity is not None:
        rows = [
            (f"{i}. {name}", *(f"{c:.3f}" for c in row))
            for i, (name, row) in enumerate(zip(names, similarity, strict=True), 1)
        ]
        show_table("Cosines", ["text", *map(str, range(1, len(names) + 1))], rows)
        return
    rows = [
        (name, f"{(vector**2).sum() ** 0.5:.3f}", " ".join(f"{x:+.3f}" for x in vector[:6]) + " ...")
        for name, vector in zip(names, vectors, strict=True)
    ]
    show_table(f"Vectors of {vectors.shape[1]} numbers", ["text", "length", "first numbers"], rows)


def print_similar_words(words: list[str], neighbours: list[Any], as_json: bool) -> None:
    if as_json:
        similar = [{"word": one.word, "similarity": one.similarity} for one in neighbours]
        print_json({"words": words, "similar": similar})
        return
    title = f"{words[0]} : {words[1]} = {words[2]} : ..." if len(words) == 3 else f"Nearest to {words[0]}"
    show_table(title, ["word", "cosine"], [(one.word, f"{one.similarity:.3f}") for one in neighbours])


def print_word_comparison(result: Mapping[str, Any]) -> None:
    """The vectors of a word in several texts: its cosines and its nearest words, by checkpoint."""
    from firth.evaluate.context import Occurrence

    occurrences = [Occurrence(result["texts"][o["text"]], o["begin"], o["end"]) for o in result["occurrences"]]
    checkpoints = result["checkpoints"]
    names = [short_checkpoint_name(one["checkpoint"]) for one in checkpoints]
    kinds = [(name, one["kind"], one["layer"]) for name, one in zip(names, checkpoints, strict=True)]
    show_table("Occurrences", ["", "text"], [(i, one.excerpt(60)) for i, one in enumerate(occurrences, 1)])
    show_table("Vectors", ["", "a word's vector is", "layer"], kinds)
    rows = [
        (f"{i + 1} and {j + 1}", *(f"{one['similarity'][i][j]:.3f}" for one in checkpoints))
        for i in range(len(occurrences))
        for j in range(i + 1, len(occurrences))
    ]
    means = ["" if one["any_two_words"] is None else f"{one['any_two_words']:.3f}" for one in checkpoints]
    show_table(f"Cosines of {result['word']}", ["", *names], [*rows, ("any two words", *means)])
    for name, one in zip(names, checkpoints, strict=True):
        near = [
            (
                f"{i}. {occurrences[i - 1].excerpt(16)}" if k == 0 else "",
                n["word"],
                f"{n['similarity']:.3f}",
                n["where"],
            )
            for i, neighbours in enumerate(one["neighbours"], 1)
            for k, n in enumerate(neighbours)
        ]
        if near:
            show_table(f"Nearest by {name}", ["", "word", "cosine", "where"], near)


def short_checkpoint_name(name: str) -> str:
    """
    >>> short_checkpoint_name("runs/elmo/final"), short_checkpoint_name("vectors.txt")
    ('elmo', 'vectors.txt')
    """
    path = Path(name)
    return path.parent.name if path.name == "final" and path.parent.name else path.name or name


def print_models(models: list[dict[str, Any]]) -> None:
    """A table for each family."""
    for family in dict.fromkeys(m["family"] for m in models):
        sizes = [m for m in models if m["family"] == family]
        rows = [
            (
                m["name"],
                m.get("size") or format_magnitude(m["parameters"]),
                format_magnitude(m["flops_per_token"]),
                m["objective"],
            )
            for m in sizes
        ]
        title = f"{family}, {sizes[0]['architecture']}: {sizes[0]['good_for']}"
        show_table(title, ["name", "parameters", "FLOPs/token", "objective"], rows)
