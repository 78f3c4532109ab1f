"""Runs a Jinja template that came with a model: no way into Python, and bounded work, memory and output.

Jinja's sandbox alone stops access to Python objects, but not a template that loops for hours or doubles a text until
the memory is full. Here every loop, call, comparison and piece of text is charged to a budget of one rendering, and the
time is bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import partial, wraps
from string import Formatter
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

# All text a rendering makes; a message is counted about four times on its way. A million tokens is ~4 M characters.
MAX_CHARS = 20_000_000
MAX_SECONDS = 2.0  # of the thread's processor time, whatever else is within bounds
MAX_STEPS = 300_000  # loop rounds and calls, about a second; a long chat takes a few thousand
MAX_INTEGER_BITS = 4096
# fmt: off
_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round",
    "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper",
)
_WALKING = frozenset(["items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"])
_READING = frozenset([
    "capitalize", "dictsort", "e", "escape", "groupby", "lower", "max", "min", "sort", "title", "trim", "unique",
    "upper",
])
_COMPARING = frozenset(["==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le",
                        "lessthan", "lt", "ne"])
# fmt: on
_GROWING_METHODS = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs", "translate"])


class TemplateRefusedError(Exception):
    """The template does what no chat template needs: it reaches into Python, or passes its budget."""


class TemplateRaisedError(Exception):
    """The template itself rejects its input (`raise_exception`)."""


class _Budget:
    def __init__(self) -> None:
        self.chars, self.steps = MAX_CHARS, MAX_STEPS
        self._end = time.thread_time() + MAX_SECONDS

    def spend(self, chars: int = 0, steps: int = 0) -> None:
        self.chars -= chars
        self.steps -= steps
        if self.chars < 0:
            raise TemplateRefusedError(f"it makes more than {MAX_CHARS} characters")
        if self.steps < 0:
            raise TemplateRefusedError(f"it takes more than {MAX_STEPS} steps")
        if time.thread_time() > self._end:
            raise TemplateRefusedError(f"it takes more than {MAX_SECONDS:.0f} s")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def compile_template(text: str) -> jinja2.Template:
    """Compile a template.

    Raises:
        jinja2.TemplateSyntaxError: it is not a template.
    """
    return _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]).from_string(text)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a template of `compile_template`.

    Raises:
        TemplateRefusedError, TemplateRaisedError: see there.
        jinja2.TemplateError, TypeError, ValueError …: the template fails on these variables.
    """
    token = _budget.set(_Budget())
    try:
        return template.render(variables)
    except jinja2.exceptions.SecurityError as error:
        raise TemplateRefusedError(str(error)) from error
    except (RecursionError, MemoryError) as error:
        raise TemplateRefusedError(f"it fails with {type(error).__name__}") from error
    finally:
        _budget.reset(token)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.filters = {name: _charged(name, self.filters[name]) for name in _FILTERS}
        self.filters |= {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent, "string": _string}
        self.filters |= {"_looped": _looped, "_joined": _joined, "_text": _text, "_compared": _compared, "sum": _sum}
        self.tests |= {name: _comparing(self.tests[name]) for name in _COMPARING}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's: at most 100000 long
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_looped")
        for compare in tree.find_all(nodes.Compare):
            compare.expr = _filtered(compare.expr, "_compared")
            for operand in compare.ops:
                operand.expr = _filtered(operand.expr, "_compared")
        for output in tree.find_all(nodes.Output):
            output.nodes = [
                _filtered(nodes.Const(node.data), "_text") if isinstance(node, nodes.TemplateData) else node
                for node in output.nodes
            ]
        _replace_concatenations(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _charge_product(left, right)
            _charge_product(right, left)
        if operator == "**" and _bits(left) * max(_bits(right) and int(right), 1) > MAX_INTEGER_BITS:
            raise TemplateRefusedError("a power is too large")
        if operator == "+" and not isinstance(left, int | float):
            _charge(left)
            _charge(right)
        if operator == "%" and isinstance(left, str | bytes):
            raise TemplateRefusedError("formatting with % is not allowed")  # '%1000000000d' fills the memory
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """What stands in place of a text's method `format`, which Jinja asks for wherever it reads an attribute."""
        name, owner = getattr(value, "__name__", ""), getattr(value, "__self__", None)
        if name not in ("format", "format_map") or not isinstance(owner, str | bytes):
            return None
        if name == "format_map" or isinstance(owner, bytes):
            raise TemplateRefusedError(f"the method {name} is not allowed")
        return partial(_format, owner)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as Jinja)
        _budget.get().spend(steps=1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str | bytes):
            if name in _GROWING_METHODS:
                raise TemplateRefusedError(f"the method {name} is not allowed")
            if name == "join":
                return _join(args[0], str(owner))
            if name == "replace":
                return _replace(owner, *args)
            _budget.get().spend(chars=len(owner))
        if isinstance(__obj, LoopContext) and args:
            args = (_looped(__context, args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, list):
            _budget.get().spend(chars=8 * len(result))
        return result


class _Generation(Extension):
    """`{% generation %}` marks the answer for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a set)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _replace_concatenations(node: nodes.Node) -> None:
    """`a ~ b` is not an operator that a sandbox sees; turn it into a filter that is."""
    for field, value in node.iter_fields():
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concatenations(child)
            if isinstance(child, nodes.Concat):
                items = nodes.List(child.nodes, lineno=child.lineno)
                children[index] = _filtered(items, "_joined")
        setattr(node, field, children if isinstance(value, list) else children[0])


def _size(value: Any, limit: int) -> int:
    """Characters of `value` as text, roughly; stops counting above `limit` (nested lists can be exponential)."""
    if isinstance(value, str | bytes):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        total += len(item) if isinstance(item, str | bytes) else 64  # so that counting stays short
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
    return total


def _charge(value: Any) -> None:
    budget = _budget.get()
    budget.spend(chars=_size(value, budget.chars))


def _charge_product(value: Any, times: Any) -> None:
    if isinstance(value, str | bytes | list | tuple) and isinstance(times, int):
        _budget.get().spend(chars=len(value) * max(times, 0) * (1 if isinstance(value, str | bytes) else 8))
    elif _bits(value) + _bits(times) > MAX_INTEGER_BITS:
        raise TemplateRefusedError("a number is too large")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    if not isinstance(value, Undefined):
        _charge(value)
    return value


@pass_context  # with a context, the compiler cannot compute it beforehand
def _text(_: Context, value: str) -> str:
    return value  # _finalize charges it


@pass_context
def _looped(_: Context, values: Any) -> Any:
    if isinstance(values, Undefined) or not isinstance(values, Iterable):
        return values  # Jinja reports it
    sized = values if isinstance(values, Sized) else list(values)
    _budget.get().spend(steps=len(sized))
    return _Rounds(cast(Any, sized))


class _Rounds:
    """The values of a loop; looks at the clock before each round, whose comparisons and slices may be long."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for value in self._values:
            budget.spend()
            yield value


@pass_context
def _compared(_: Context, value: Any) -> Any:
    """One side of a comparison, which may read all of it."""
    if isinstance(value, str | bytes):
        _budget.get().spend(chars=len(value) // 16)  # a search reads that many times faster than others write
    elif isinstance(value, list | tuple | dict):
        _charge(value)
    return value


def _comparing(test: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(test)
    def charged(*values: Any) -> Any:
        for value in values:
            _compared(cast(Any, None), value)
        return test(*values)

    return charged


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that pays for what it walks over or reads."""
    if name not in _WALKING | _READING:
        return function
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value = args[position]
        if name in _READING:
            _charge(value)
        elif isinstance(value, Sized):
            _budget.get().spend(chars=len(value))
        return function(*args, **kwargs)

    return charged


def _sum(values: Iterable[Any], attribute: str | None = None, start: Any = 0) -> Any:
    total = start
    for item in values:
        term: Any = item.get(attribute) if isinstance(item, dict) and attribute else item
        if isinstance(total, int | float) and isinstance(term, int | float):
            _budget.get().spend(steps=1)
        else:  # each sum of lists copies both
            _charge(total)
            _charge(term)
        total = total + term
    return total


@pass_context
def _joined(_: Context, values: list[Any]) -> str:
    _charge(values)
    return "".join(map(str, values))


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    items = [item.get(attribute) if isinstance(item, dict) and attribute else item for item in values]
    _charge(items)
    _budget.get().spend(chars=len(separator) * len(items))
    return separator.join(map(str, items))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = _string(text)
    found = text.count(old) if count < 0 else min(text.count(old), count)
    _budget.get().spend(chars=len(text) + found * len(new))
    return text.replace(old, new, count)


def _format(text: str, /, *values: Any, **named: Any) -> str:
    """`text.format(…)` of plain fields, such as {}, {1} and {name}: what reaches into values, and a
    width, which may fill the memory, no template needs."""
    _budget.get().spend(chars=len(text))
    parts: list[Any] = []
    following = iter(range(len(values)))
    for literal, name, form, conversion in Formatter().parse(text):
        parts.append(literal)
        if name is None:
            continue
        if form or conversion or not (name == "" or name.isdecimal() or name.isidentifier()):
            raise TemplateRefusedError(f"the method format is allowed with plain fields alone, not {name[:40]!r}")
        place: Any = next(following, len(values)) if name == "" else int(name[:9]) if name.isdecimal() else name
        parts.append(values[place] if isinstance(place, int) else named[place])
    return _join(parts)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    prefix = width if isinstance(width, str) else " " * min(width, 1000)
    lines = _string(text).split("\n")
    _budget.get().spend(chars=len(prefix) * len(lines))
    parts = [prefix + line if (index or first) and (line or blank) else line for index, line in enumerate(lines)]
    return "\n".join(parts)


def _string(value: Any) -> str:
    _charge(value)
    return str(value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    _charge(value)
    width = None if indent is None else min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRaisedError(str(message)[:1000])


def _strftime_now(form: str) -> str:
    _budget.get().spend(chars=100 * len(form))
    return datetime.now().strftime(form)
