"""Chat templates of unknown origin: each attack ends in one line, soon, in any thread; good ones render as before."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from firth.core.errors import UserError
from firth.tasks import chat_sandbox
from firth.tasks.chat import ChatTemplate, compile_chat_template

DOUBLE = "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(60) %}"
ATTACKS = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "large range": "{% for a in range(99999999999) %}{% endfor %}",
    "output": "{% for a in range(9999) %}{{ 'x' * 10000 }}{% endfor %}",
    "static text": "{% set s %}{% for a in range(9999) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
    "repetition": "{{ 'x' * 10**10 }}",
    "list repetition": "{{ ([1] * 10000) * 10000 }}",
    "doubling": DOUBLE + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": DOUBLE + "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "nested lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}",
    "doubling by join": DOUBLE + "{% set n.s = [n.s, n.s] | join %}{% endfor %}",
    "doubling by replace": DOUBLE + "{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
    "doubling by format": DOUBLE + "{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
    "doubling by %": DOUBLE + "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
    "doubling by a macro": "{% macro m(s, i) %}{{ m(s, i - 1) ~ m(s, i - 1) if i else s }}{% endmacro %}"
    "{{ m('x', 40) }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of powers": "{% set n = namespace(s=3) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
    "width": "{{ '{:>9999999999}'.format(1) }}",
    "width as argument": "{{ '{:>{}}'.format(1, 999) }}",
    "width by %": "{{ '%09999999999d' % 1 }}",
    "width by filter": "{{ '%09999999999d' | format(1) }}",
    "center": "{{ 'x' | center(9999999999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(10000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(9999) }}",
    "tojson": "{{ messages | tojson(indent=999999999) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "wordwrap": "{{ ('a ' * 500_000) | wordwrap(1) }}",
    "urlize": "{{ ('http://a.b ' * 90_000) | urlize }}",
    "batch of characters": "{{ ('ab ' * 330_000) | batch(1) | list }}",
    "split": "{{ ('a ' * 500_000).split() }}",
    "split by a text": "{{ ('a-' * 500_000).split('-') }}",
    "splitlines": "{{ ('a\n' * 500_000).splitlines() }}",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "division": "{{ 1 / 0 }}",
    "missing key": "{{ {}['a'].b.c }}",
    "attribute": "{{ ''.__class__.__mro__[1] }}",
    "none": "{{ none + 1 }}",
    "digits": "{{ ('9' * 5000) | int(default='x') + 1 }}",
    "sum": "{{ [1] | sum('x') }}{{ [1] | sum(start='x') }}",
    "source": "x" * 200_000,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "syntax": "{% for %}",
    "unknown filter": "{{ 'x' | system }}",
    "refusal": "{{ raise_exception('no such role') }}",
}


def render(source: str) -> str:
    template = ChatTemplate.__new__(ChatTemplate)
    template.source, template.special_tokens, template.template = source, {}, compile_chat_template(source)
    return template.render([("user", "hello")])


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests stay fast; the limits themselves are 15 times as high."""
    monkeypatch.setattr(chat_sandbox, "MAX_OPERATIONS", 20_000)
    monkeypatch.setattr(chat_sandbox, "MAX_TEXT_CHARS", 2**20)
    monkeypatch.setattr(chat_sandbox, "MAX_SLOW_TEXT_CHARS", 2**16)


def test_a_long_text_is_copied_and_split_where_it_has_few_parts() -> None:
    source = (
        "{% set x = ('a ' * 400_000 + '</think> b') %}{{ x | trim | length }} {{ x.split('</think>')[-1] | upper }}"
    )
    assert render(source) == "800010  B"


@pytest.mark.parametrize("name", ["wordwrap", "urlize", "batch of characters", "split", "splitlines"])
def test_slow_operations_are_refused_before_they_begin(name: str) -> None:
    with pytest.raises(UserError, match=r"a slow operation gets a text of \d+,\d+,?\d* characters"):
        render(ATTACKS[name])


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_one_line(name: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match="chat template") as error:
        render(ATTACKS[name])
    assert time.process_time() - start < 8
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_time_is_limited_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(chat_sandbox, "MAX_OPERATIONS", 10**12)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(render, ATTACKS["nested loops"]) for _ in range(2)]
        for run in runs:
            with pytest.raises(UserError, match=r"takes more than 0.05 seconds"):
                run.result(20)
        monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 10.0)
        assert pool.submit(render, "{{ messages[0].content }}").result(20) == "hello"


GOOD = (
    "{{ bos_token }}{% set ns = namespace(n=0, text='') %}{% macro show(m) %}<{{ m.role }}>{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% if loop.first %}first{% endif %}{% call show(m) %}{{ m['content'] | trim }}{% endcall %}"
    "{% set ns.n = ns.n + loop.index * 2 %}{% set ns.text = ns.text ~ m.role ~ '-' ~ loop.length %}"
    "{{ loop.revindex }}{{ loop.last }}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content.split('e') | join('|') | upper }}{% endgeneration %}{% endfor %}"
    "{{ ns.n }} {{ ns.text }} {{ messages | tojson }} {{ '%s and %03d' % ('a', 7) }} {{ '{:>4}'.format(3) }}"
    "{{ messages | map(attribute='role') | list }} {{ (messages | selectattr('role', 'eq', 'user') | first).content }}"
    "{{ messages[::-1][0].role }} {{ 'ab' * 3 }} {{ [1, 2] + [3] }} {{ 7 // 2 }} {{ 2 ** 10 }} {{ messages | length }}"
    "{% for a in [[1, [2]], 3] recursive %}{{ loop(a) if a is iterable else a }}{% else %}none{% endfor %}"
    "{% for k, v in messages[0].items() if v %}{{ k }}={{ v }};{% endfor %}{{ none }}{{ missing }}"
    "{{ 'x' | indent(3, true) }}{% set b %} block {{ 1 }} {% endset %}{{ b }}{{ '<' | e ~ '>' }}"
)


def test_a_template_renders_as_in_transformers() -> None:
    messages = [{"role": "user", "content": " hello there "}, {"role": "assistant", "content": "yes <b>"}]
    expected = _compile_jinja_template(GOOD).render(messages=messages, bos_token="<s>", add_generation_prompt=True)
    ours = compile_chat_template(GOOD).render(messages=messages, bos_token="<s>", add_generation_prompt=True)
    assert ours == expected
