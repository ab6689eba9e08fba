"""A fault as data: its arguments, their defaults and checks, and the findings that the canary must report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..record import Reason

if TYPE_CHECKING:
    from .scene import Outcome, Scene

__all__ = [
    "MIN_INT32",
    "REQUIRED",
    "Argument",
    "ArgumentError",
    "Fault",
    "choice",
    "number",
    "switch",
    "text",
    "tokens",
]

MIN_INT32, MAX_INT32 = -(1 << 31), (1 << 31) - 1  # the range of an entry of req_to_token
REQUIRED = object()  # as a default: the command must give the argument
# None: not now, try again in the next step
Act = Callable[["Scene", dict[str, Any]], "Outcome | None"]


class ArgumentError(ValueError):
    """A command has arguments that its fault does not accept."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A `default` other than None is filled in. Otherwise `otherwise` says what happens without the argument."""

    name: str
    expected: str
    accepts: Callable[[Any], bool]
    help: str
    default: Any = None
    otherwise: str = ""

    @property
    def default_text(self) -> str:
        if self.default is REQUIRED:
            return "required"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return self.otherwise if self.default is None else str(self.default)


def number(
    name: str, help_: str, default: Any = None, otherwise: str = "", minimum: int = 0
) -> Argument:
    """A 32-bit whole number, at least `minimum`."""
    expected = f"a whole number from {minimum} to {MAX_INT32}"

    def accepts(value: Any) -> bool:
        return type(value) is int and minimum <= value <= MAX_INT32

    return Argument(name, expected, accepts, help_, default, otherwise)


def text(name: str, help_: str, default: Any = None, otherwise: str = "") -> Argument:
    return Argument(
        name, "a text", lambda v: isinstance(v, str) and v != "", help_, default, otherwise
    )


def switch(name: str, help_: str) -> Argument:
    return Argument(name, "true or false", lambda v: isinstance(v, bool), help_, False)


def choice(
    name: str, choices: tuple[str, ...], help_: str, default: Any = None, otherwise: str = ""
) -> Argument:
    expected = f"one of {', '.join(choices)}"
    return Argument(
        name, expected, lambda v: isinstance(v, str) and v in choices, help_, default, otherwise
    )


def tokens(name: str, help_: str, default: Any = None, otherwise: str = "") -> Argument:
    return Argument(
        name,
        "a list of token ids",
        lambda v: isinstance(v, list) and bool(v) and all(type(token) is int for token in v),
        help_,
        default,
        otherwise,
    )


@dataclass(frozen=True, slots=True)
class Fault:
    """One command of the control folder. One of `reasons` must be reported; no reasons means that it is no fault."""

    name: str
    act: Act | None  # None: the observer executes it, without a scene
    summary: str
    arguments: tuple[Argument, ...] = ()
    reasons: tuple[Reason, ...] = ()
    where: str = ""  # launch tags that report it, and when
    breaks_accounting: bool = False  # SGLang's own leak check ends the server once it is idle
    eager_only: bool = False  # has no effect on a forward that a CUDA graph replays
    by_name: Mapping[str, Argument] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_name = {argument.name: argument for argument in self.arguments}
        object.__setattr__(self, "by_name", by_name)

    def complete(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """`args` with the defaults filled in. Raises `ArgumentError` for arguments that this fault does not accept."""
        for name, value in args.items():
            self._check(name, value)
        filled = {a.name: a.default for a in self.arguments if a.default is not None} | dict(args)
        missing = [name for name, value in filled.items() if value is REQUIRED]
        if missing:
            argument = self.by_name[missing[0]]
            raise ArgumentError(
                f"{self.name} needs the argument {argument.name!r}: {argument.expected}"
            )
        return filled

    def _check(self, name: str, value: Any) -> None:
        argument = self.by_name.get(name)
        if argument is None:
            known = ", ".join(self.by_name) or "none"
            raise ArgumentError(f"{self.name} has no argument {name[:40]!r}; it takes: {known}")
        if not argument.accepts(value):
            raise ArgumentError(
                f"{self.name}: expected {argument.expected} for {name!r}, got {_shortened(value)}"
            )


def _shortened(value: Any, limit: int = 60) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
