"""The sandbox in which chat templates run: jinja2's immutable one, with a bound on the work a template may do.

Templates come from model files and are hostile until proven otherwise. Owns what a template may not do; must not know
what templates are for.

Every loop iteration, call, filter and every 64 characters or 8 items that an expression builds cost steps, of which a
rendering has MAX_STEPS; no value may grow beyond MAX_SIZE. Together with Python's recursion limit this bounds memory
(about 100 MB) and time (seconds). What remains: jinja2 and Python run those steps at their own speed, and a thread
cannot be interrupted inside one of them; a hard limit in seconds needs a process that can be killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from yeoul.text.extent import CHARS_PER_STEP, check_binop, check_filter, check_method, extent, result_steps

MAX_STEPS: Final = 1_000_000
CALL_STEPS: Final = 8
"""A call costs about as much time as eight loop iterations."""

_STEP: Final = "yeoul_step"
_CONCAT: Final = "yeoul_concat"
_PLAIN: Final = "yeoul_plain"
# fmt: off
_COMPARING: Final = frozenset((
    "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in", "==", "!=", "<", "<=", ">", ">=",
))
_STRUCTURAL: Final = frozenset((
    "length", "count", "list", "first", "last", "default", "d", "items", "reverse", "selectattr", "rejectattr", "map",
    "select", "reject", "batch", "slice", "attr", "random",
))
# fmt: on
"""Filters that pass values on and neither print nor compare them."""


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks a reply for training; to serve, it is its own content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Meter(NodeTransformer):
    """Puts the counting of steps into whatever can run again, and the bounds into `~` and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._count(node)
        if node.test is not None:
            node.test = nodes.And(_step(1), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self._count(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self._count(node)
        return node

    def visit_Block(self, node: nodes.Block) -> nodes.Block:
        self._count(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), _CONCAT, [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _plain(node.expr)
        for operand in node.ops:
            operand.expr = _plain(operand.expr)
        return node

    def _count(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> None:
        self.generic_visit(node)
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_step(1 + written // CHARS_PER_STEP)))


def _step(steps: int) -> nodes.Filter:
    return nodes.Filter(nodes.Const(steps), _STEP, [], [], None, None)


def _plain(node: nodes.Expr) -> nodes.Expr:
    """Comparing lists that hold each other takes exponential time: weigh them first."""
    return node if isinstance(node, nodes.Const) else nodes.Filter(node, _PLAIN, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that counts. `start` gives the current thread a fresh allowance of steps, before each rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self._allowance = threading.local()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=self._printed,
        )
        self.filters = {name: self._bounded(name, function) for name, function in FILTERS.items()}
        self.filters |= {_STEP: self._step, _CONCAT: self._concat, _PLAIN: self._plain}
        self.tests |= {name: self._weighed(TESTS[name]) for name in _COMPARING}
        del self.globals["lipsum"]

    def replace_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Use another function as a filter, within the same bounds."""
        self.filters[name] = self._bounded(name, function)

    def start(self) -> None:
        """Begin a rendering: MAX_STEPS steps from here."""
        self._allowance.steps = MAX_STEPS

    def meter(self, template: nodes.Template) -> nodes.Template:
        """The same template, counting its steps. Raises nothing of its own."""
        metered: nodes.Template = _Meter().visit(template)
        return metered.set_environment(self)  # type: ignore[return-value]  # it returns itself

    def take(self, steps: int) -> None:
        """Spend steps of the current rendering. Raises SecurityError when none are left."""
        left = getattr(self._allowance, "steps", MAX_STEPS) - steps
        self._allowance.steps = left
        if left < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS} steps")

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes: counted, and a string's methods held to the bounds on sizes."""
        self.take(CALL_STEPS)
        target = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        subject = getattr(target, "__self__", None)
        if isinstance(subject, (str, bytes)):
            args = tuple(map(_settle, args))
            check_method(getattr(target, "__name__", ""), subject, (*args, *kwargs.values()))
        return self._paid(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every operator that can build something large, held to the bounds. Raises SecurityError."""
        check_binop(operator, left, right)
        return self._paid(super().call_binop(context, operator, left, right))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts, and refuses what would print, compare or build something huge."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.take(1)
            if name not in _STRUCTURAL:
                args = (*args[:skip], *map(_settle, args[skip:]))
                self.take(sum(extent(value) // CHARS_PER_STEP for value in args[skip:]))
            check_filter(name, args[skip:], kwargs)
            return self._paid(function(*args, **kwargs))

        return call

    def _weighed(self, test: Any) -> Callable[..., Any]:
        @wraps(test)
        def call(*args: Any) -> Any:
            self.take(1 + sum(extent(value) // CHARS_PER_STEP for value in args))
            return test(*args)

        return call

    def _paid(self, value: Any) -> Any:
        self.take(result_steps(value))
        return value

    @pass_context  # which also keeps jinja2 from evaluating it once, when compiling
    def _step(self, context: Context, steps: int) -> bool:
        self.take(steps)
        return True

    @pass_context
    def _plain(self, context: Context, value: object) -> object:
        return self._printed(value)

    @pass_context
    def _concat(self, context: Context, parts: list[object]) -> str:
        for part in parts:
            self._printed(part)
        return str_join(parts)

    def _printed(self, value: object) -> object:
        """Pay for a value's text before there is one."""
        self.take(extent(value) // CHARS_PER_STEP)
        return value


def _settle(value: Any) -> Any:
    """An iterator as a list, so that it can be weighed and still be used."""
    return list(value) if isinstance(value, Iterator) else value
