"""Hostile templates: no way out of the sandbox, and a bound on time and memory for each way to waste them."""

import pytest

from yeoul.errors import ModelFileError, RequestError
from yeoul.text.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
DOUBLING = "{% set ns = namespace(x=SEED) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
NESTED = DOUBLING.replace("SEED", "['lol']").replace("STEP", "[ns.x, ns.x]")


def render(source: str) -> str:
    return ChatTemplate(source, bos="", eos="").render(MESSAGES)


def doubling(seed: str, step: str) -> str:
    return DOUBLING.replace("SEED", seed).replace("STEP", step)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}",
        "{{ strftime_now.__code__.co_code }}",
        "{% set messages[0].role = 'x' %}",
    ],
)
def test_attributes_and_changes_are_out_of_reach(source) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises((RequestError, ModelFileError)):
        ChatTemplate(source, bos="", eos="").render(messages)
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | attr('__class__') }}",
        "{{ ''['__class__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{0.__class__.__mro__}' | format(1) }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages | map(attribute='__class__') | first }}",
    ],
)
def test_roundabout_ways_give_nothing(source) -> None:
    try:
        assert render(source) == ""
    except RequestError as error:
        assert "<class" not in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ range(10**9) | list }}",
        "{{ range(99999) | map('string') | map('center', 900) | join | length }}",
        "{{ 9 ** (9 ** 9) }}",
        doubling("9", "ns.x * ns.x"),
    ],
    ids=range(10),
)
def test_endless_work_ends(source) -> None:
    with pytest.raises(RequestError, match=r"steps|deeply|too large|Range too big"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        doubling("'aa'", "ns.x ~ ns.x"),
        doubling("'aa'", "ns.x + ns.x"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("'aa'", "ns.x.replace('a', 'aa')"),
        doubling("'aa'", "ns.x | replace('a', 'aa')"),
        doubling("'aa'", "(ns.x, ns.x) | join"),
        doubling("'aa'", "''.join([ns.x, ns.x])"),
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) | length }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) | length }}",
        "{{ ('a' * 1000000).join(['x'] * 1000000) | length }}",
        "{{ (['a' * 1000000] * 1000000) | select | join | length }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x'.center(10**10) }}{{ 'x'.zfill(10**10) }}",
        "{{ 'a\\t'.expandtabs(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{0:>999}'.format(1) }}{{ ('{0:>999}' * 100000).format(1) }}",
        "{{ ('%s' * 100000) % (('a' * 10000,) * 100000) }}",
        "{{ ('%(a)s' * 100000) % {'a': 'a' * 1000000} }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ ('\\n' * 100000) | indent(100000) | length }}",
        "{{ ('a ' * 100000) | wordwrap(1, wrapstring='x' * 4000000) | length }}",
        "{{ [1] | tojson(indent=10**8) }}",
        "{{ [1] | batch(10**9, 0) | list | length }}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
        "{% set b = 'a' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
        "{% set x %}{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
    ],
    ids=range(32),
)
def test_huge_values_are_not_built(source) -> None:
    with pytest.raises(RequestError, match=r"too large|steps|width"):
        render(source)


@pytest.mark.parametrize(
    "use",
    [
        "{{ ns.x }}",
        "{{ ns.x | tojson }}",
        "{{ ns.x | string | length }}",
        "{{ ns.x | upper }}",
        "{{ ns.x ~ '' }}",
        "{{ '%s' % (ns.x,) }}",
        "{{ '{}'.format(ns.x) }}",
        "{{ ns.x | join }}",
        "{{ {'a': ns.x}.items() }}",
        "{{ ns }}",
        NESTED.replace("ns", "other") + "{{ ns.x == other.x }}",
        NESTED.replace("ns", "other") + "{{ ns.x in [other.x] }}",
        NESTED.replace("ns", "other") + "{{ [ns.x] | select('equalto', other.x) | list | length }}",
        NESTED.replace("ns", "other") + "{{ [ns.x, other.x] | sort | length }}",
    ],
)
def test_few_lists_that_print_as_gigabytes(use) -> None:
    with pytest.raises(RequestError, match=r"too large|namespace|steps"):
        render(NESTED + use)


def test_a_call_costs_more_than_a_step() -> None:
    """125,000 calls are the most, or a macro that calls itself would take a minute."""
    calls = "{% for i in range(N) %}{{ m() }}{% endfor %}"
    macro = "{% macro m() %}{% endmacro %}"
    assert render(macro + calls.replace("N", "90000")) == ""
    with pytest.raises(RequestError, match="steps"):
        render(macro + calls.replace("N", "99999") * 2)


def test_each_rendering_has_its_own_allowance() -> None:
    """Two renderings that together take more than the limit."""
    template = ChatTemplate(
        "{% for i in range(40000) %}{% for j in range(6) %}{% endfor %}{% endfor %}ok", bos="", eos=""
    )
    assert [template.render(MESSAGES) for _ in range(3)] == ["ok"] * 3
