"""A Jinja sandbox with limits on work, memory and time, for chat templates of unknown origin.

Jinja's sandbox keeps a template away from Python's internals, and lets it loop and double a string without end. Here
each operation that takes time or memory is counted against a budget: each turn of a loop, each call, each
operator and filter, and each text that is written. Sizes are computed before a text or list is made. The budget belongs
to one rendering (a context variable), so any number of threads can render, and no signal is needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 2**17  # of a template; published ones have up to 20,000
MAX_OPERATIONS = 300_000  # of one rendering: turns of loops, calls, operators, filters
MAX_SECONDS = 10.0  # of one rendering
MAX_TEXT_CHARS = 2**24  # of one text, and of all texts in a list
MAX_WRITTEN_CHARS = 2**26  # of one rendering, with texts that are written into variables
MAX_SLOW_TEXT_CHARS = 2**20  # of a text for a filter that takes microseconds or a list entry per character
MAX_ITEMS = 100_000  # of a list, with the lists in it
MAX_WORK_CHARS = 2**28  # text length times argument length, of one filter or method
MAX_INT = 10_000  # an argument: a width, a number of repetitions
MAX_INT_BITS = 1024  # of a product or power
# Filters that copy a text, at nanoseconds per character. All others get short texts: wordwrap took 20 s for 10 million
# characters, and batch 1.5 GB.
FAST_TEXT_FILTERS = frozenset(
    (
        *("capitalize", "count", "d", "default", "e", "escape", "first", "forceescape", "format", "indent", "join"),
        *("last", "length", "lower", "replace", "reverse", "safe", "string", "tojson", "trim", "truncate", "upper"),
    )
)


class TemplateLimitError(TemplateError):
    """A template needs more work, memory or time than any dialogue does."""


class RenderBudget:
    """What one rendering has left. `static_chars` is the length of the template's own text, written in every turn."""

    def __init__(self, static_chars: int) -> None:
        self.static_chars = static_chars
        self.num_operations, self.num_chars = 0, 0
        self.pieces: list[str] = []  # the text so far
        self.marked: list[tuple[int, str]] = []  # start and text of each {% generation %} block
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, num_chars: int = 0) -> None:
        self.num_operations += 1
        self.num_chars += num_chars
        if self.num_operations > MAX_OPERATIONS:
            raise TemplateLimitError(f"it takes more than {MAX_OPERATIONS:,} operations")
        if self.num_chars > MAX_WRITTEN_CHARS:
            raise TemplateLimitError(f"it writes more than {MAX_WRITTEN_CHARS:,} characters")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")


BUDGET: ContextVar[RenderBudget] = ContextVar("budget")


def text_size(value: Any) -> int:
    """Return the characters of a text, or of all texts in a nested value; a value over the limits is an error."""
    num_chars = num_items = 0
    stack = [value]
    while stack:
        part = stack.pop()
        num_chars += len(part) if isinstance(part, str | bytes) else 1
        if isinstance(part, dict | list | tuple | set | frozenset):
            num_items += len(part)
            if num_items <= MAX_ITEMS:
                stack += [*part, *part.values()] if isinstance(part, dict) else part
        if num_chars > MAX_TEXT_CHARS or num_items > MAX_ITEMS:
            raise TemplateLimitError(
                f"a text has over {MAX_TEXT_CHARS:,} characters, or a list over {MAX_ITEMS:,} items"
            )
    return num_chars


def check_product(a: int, b: int) -> None:
    if a * b > MAX_WORK_CHARS:
        raise TemplateLimitError(f"one operation writes up to {a * b:,} characters")


def check_arguments(value: Any, arguments: Iterable[Any]) -> None:
    """Refuse large numbers, and a text with arguments that could multiply its length (replace, join, indent)."""
    sizes = 0
    for argument in arguments:
        if isinstance(argument, int | float) and not -MAX_INT <= argument <= MAX_INT:
            raise TemplateLimitError(f"an argument is a number over {MAX_INT:,}")
        sizes += abs(int(argument)) if isinstance(argument, int | float) else text_size(argument)
    check_product(text_size(value), sizes + 1)


def check_format(form: str) -> None:
    """Refuse widths over the limit in `"%9d" % x` and `"{:9}".format(x)`, and widths that are arguments."""
    if sum(int(digits[:9]) for digits in re.findall(r"\d+", form)) > MAX_INT or re.search(r"\*|:[^}]*{", form):
        raise TemplateLimitError("a format has a large or variable width")


def check_slow_text(text: str) -> None:
    if len(text) > MAX_SLOW_TEXT_CHARS:
        raise TemplateLimitError(f"a slow operation gets a text of {len(text):,} characters")


def check_split(text: str, arguments: Sequence[Any]) -> None:
    """Refuse to split a long text into more parts than a list may have."""
    separator = arguments[0] if arguments else None
    if not separator or not isinstance(separator, str) or text.count(separator) > MAX_ITEMS:
        check_slow_text(text)


def bounded(result: Any) -> Any:
    """Return a result; an error if it is too large to go on with."""
    text_size(result)
    return result


def limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # keeps Jinja's marks: which filters read the environment
    def limited(*args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        given = [arg for arg in args if isinstance(arg, Iterable | int | float)]  # without Jinja's own objects
        if name == "format":
            check_format(str(given[0]))
        if given and isinstance(given[0], str) and name not in FAST_TEXT_FILTERS:
            check_slow_text(given[0])
        check_arguments(given[0] if given else "", [*given[1:], *kwargs.values()])
        return bounded(function(*args, **kwargs))

    return limited


def counted(iterable: Any) -> Iterator[Any]:
    """Yield the items of a loop, each at the price of one operation and of the text that the loop may write."""
    budget = BUDGET.get()
    for item in iterable:
        budget.spend(budget.static_chars)
        yield item


def concatenate(parts: tuple[Any, ...]) -> str:
    """`a ~ b ~ c`, with the length checked before."""
    BUDGET.get().spend()
    text_size(parts)
    return str_join(parts)


class LimitNodes(NodeTransformer):
    """Puts `counted` around what loops iterate over, and `concatenate` instead of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802, Jinja's name
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802, Jinja's name
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, "concatenate", [], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """{% generation %} marks an answer, as in `transformers`: its body is rendered, and its characters are noted."""

    tags = {"generation"}  # noqa: RUF012, Jinja reads it from the class

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body, lineno=line)

    def mark(self, caller: Any) -> str:
        budget, text = BUDGET.get(), str(caller())
        budget.marked.append((sum(map(len, budget.pieces)), text))
        return text


@pass_context  # so that Jinja writes no constants at compile time, before there is a budget
def charge_output(_: Any, value: Any) -> Any:
    BUDGET.get().spend(text_size(value))
    return value


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with every operator, call, filter and loop counted."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,  # computes constants at compile time
            finalize=charge_output,
        )
        self.globals.pop("lipsum")

    def limit_filters(self) -> None:
        self.filters = {name: limit_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"counted": counted, "concatenate": concatenate}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        BUDGET.get().spend()
        if operator == "+":
            text_size((left, right))
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            check_product(text_size(left), text_size(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > MAX_INT_BITS:
                raise TemplateLimitError(f"a number has more than {MAX_INT_BITS:,} bits")
        else:
            sizes = (abs(x) if isinstance(x, int) else text_size(x) for x in (left, right))
            check_product(*sizes)
        return bounded(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandbox's own `str.format`, behind checks of the widths and of the length."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> Any:
            check_format(value.__self__)
            check_product(text_size(value.__self__), text_size((args, kwargs)))
            return formatted(*args, **kwargs)

        return limited

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = BUDGET.get()
        budget.spend(budget.static_chars * isinstance(function, Macro | LoopContext))
        target = getattr(function, "__self__", "")
        if isinstance(target, str) and getattr(function, "__name__", "").startswith("format"):  # Jinja before 3.1.5
            check_format(target)
        if isinstance(target, str) and "split" in getattr(function, "__name__", ""):
            check_split(target, args)
        check_arguments(target if isinstance(target, str | bytes) else "", [*args, *kwargs.values()])
        return bounded(super().call(context, function, *args, **kwargs))


class LimitedTemplate:
    """A compiled template; `render` raises an exception for whatever the template does wrong."""

    def __init__(self, source: str, filters: dict[str, Any], functions: dict[str, Any]) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitError(f"it has {len(source):,} characters, and may have {MAX_SOURCE_CHARS:,}")
        sandbox = LimitedSandbox()
        sandbox.filters |= filters
        sandbox.globals |= functions
        sandbox.limit_filters()
        tree = LimitNodes().visit(sandbox.parse(source))
        tree.set_environment(sandbox)
        self.static_chars = sum(len(data.data) for data in tree.find_all(nodes.TemplateData))
        self.template = sandbox.template_class.from_code(sandbox, sandbox.compile(tree), sandbox.make_globals(None))

    def render(self, **variables: Any) -> str:
        return self.render_marked(**variables)[0]

    def render_marked(self, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans of its {% generation %} blocks.

        A block inside of a macro or of {% set %} is written later than it is rendered: then there are no spans.
        """
        budget = RenderBudget(self.static_chars)
        token = BUDGET.set(budget)
        try:
            for piece in self.template.root_render_func(self.template.new_context(variables)):
                budget.spend()
                budget.pieces.append(piece)
            text = "".join(budget.pieces)
            spans = [(start, start + len(marked)) for start, marked in budget.marked]
            is_exact = all(text[start:end] == own for (start, end), (_, own) in zip(spans, budget.marked, strict=True))
            return text, spans if is_exact else []
        finally:
            BUDGET.reset(token)
