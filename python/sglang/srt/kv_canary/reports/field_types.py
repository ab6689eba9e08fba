"""Whether the fields of a dataclass have the types that it declares: what comes from a file may have any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_LIMIT = 2**63  # of numbers; NaN and infinity are beyond it, too
_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "text",
    tuple: "a list",
    NoneType: "null",
}

# What is wrong with a value, "" if nothing is
Check = Callable[[Any], str]


def wrong_field(value: Any) -> str:
    """What is wrong with a field of the dataclass object `value`, or of one in it. "" if nothing is."""
    for name, check in _checks(type(value)):
        if problem := check(getattr(value, name)):
            is_within = " under " in problem  # it names a field of this field
            return problem if is_within else f"{problem} under {name!r}"
    return ""


@cache
def _checks(of: type) -> tuple[tuple[str, Check], ...]:
    """By field."""
    hints = get_type_hints(of)
    return tuple((field.name, _check_of(hints[field.name])) for field in fields(of))


@cache
def _check_of(hint: Any) -> Check:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: ""
    if origin in (Union, UnionType):
        return _optional(args)
    if origin is tuple:
        return _tuple_of(args)
    if origin is not None and issubclass(origin, Mapping):
        return _each(dict, _check_of(args[1]), dict.values)
    if origin is list:
        return _each(list, _check_of(args[0]), iter)
    return _plain(hint)


def _plain(of: type) -> Check:
    if is_dataclass(of):
        wrong = f"expected {_NAMES[dict]}"
        return lambda value: wrong_field(value) if isinstance(value, of) else wrong
    wrong = f"expected {_NAMES.get(of, of.__name__)}"
    if of in (int, float):
        types = {int, of}
        return lambda value: "" if type(value) in types and -_LIMIT <= value < _LIMIT else wrong
    return lambda value: "" if isinstance(value, of) else wrong


def _optional(hints: tuple[Any, ...]) -> Check:
    """Null, or what the other one is. Events have no other unions."""
    (other,) = (_check_of(hint) for hint in hints if hint is not NoneType)
    return lambda value: "" if value is None else other(value)


def _tuple_of(hints: tuple[Any, ...]) -> Check:
    if hints[-1] is Ellipsis:
        return _each(tuple, _check_of(hints[0]), iter)
    checks = [_check_of(hint) for hint in hints]

    def check(value: Any) -> str:
        if not isinstance(value, tuple) or len(value) != len(checks):
            return f"expected {len(checks)} values"
        problems = (each(part) for each, part in zip(checks, value, strict=True))
        return next(filter(None, problems), "")

    return check


def _each(of: type, check: Check, parts: Callable[[Any], Any]) -> Check:
    """`check` of all parts of an `of`."""
    wrong = f"expected {_NAMES[of]}"

    def check_all(value: Any) -> str:
        if not isinstance(value, of):
            return wrong
        for part in parts(value):
            if problem := check(part):
                return problem
        return ""

    return check_all
