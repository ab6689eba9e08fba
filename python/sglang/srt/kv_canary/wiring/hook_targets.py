"""Signatures of the hooks' targets, read from SGLang's source without importing it.

Each family of releases has `hook_targets.json`: its newest release, and the signature of each target there. Against
it, another release shows what has moved. Equal signatures do not prove equal behaviour.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..import_alias import OLD_NAME

__all__ = [
    "MovedTarget",
    "RecordedTargets",
    "describe_moved",
    "moved_targets",
    "read_signature",
    "record_of",
    "recorded_targets",
]

_FILE = "hook_targets.json"
_MAX_HOPS = 16  # re-exports and base classes on the way to a definition
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class RecordedTargets:
    """The targets of one family's hooks, as they are in `release`."""

    release: str
    signatures: dict[str, str]  # dotted target -> signature


@dataclass(frozen=True, slots=True)
class MovedTarget:
    target: str
    recorded: str  # its signature in the family's release
    found: str | None  # None: it is gone


def recorded_targets(family: str) -> RecordedTargets:
    """What `hook_targets.json` of `family`, a folder of `wiring`, holds."""
    text = (Path(__file__).parent / family / _FILE).read_text()
    return RecordedTargets(**json.loads(text))


def record_of(release: str, root: Path, targets: Iterable[str]) -> str:
    """The text of `hook_targets.json` for the SGLang below `root`. Raises LookupError for a target that it lacks."""
    signatures = {}
    for target in sorted(set(targets)):
        # The files of SGLang's own canary stay closed.
        if target.startswith(f"{OLD_NAME}."):
            continue
        found = read_signature(root, target)
        if found is None:
            raise LookupError(f"{target} is not defined below {root}/sglang")
        signatures[target] = found
    return json.dumps({"release": release, "signatures": signatures}, indent=2) + "\n"


def moved_targets(root: Path, recorded: RecordedTargets) -> tuple[MovedTarget, ...]:
    """The targets whose signature differs in the SGLang whose folder `sglang` lies in `root`, or that are gone."""
    found = {target: read_signature(root, target) for target in recorded.signatures}
    return tuple(
        MovedTarget(target, signature, found[target])
        for target, signature in recorded.signatures.items()
        if found[target] != signature
    )


def describe_moved(root: Path, recorded: RecordedTargets) -> str:
    """One sentence for an error message: what has moved against the recorded release."""
    try:
        moved = moved_targets(root, recorded)
    except (OSError, SyntaxError, ValueError) as error:
        return f"Its source cannot be compared with {recorded.release}: {type(error).__name__}."
    gone = [m.target for m in moved if m.found is None]
    changed = [m.target for m in moved if m.found is not None]
    parts = [_named("gone", gone)] * bool(gone) + [_named("changed", changed)] * bool(changed)
    what = "; ".join(parts) or "none is gone or has another signature"
    return f"Of the {len(recorded.signatures)} functions that the canary hooks in {recorded.release}: {what}."


def _named(what: str, targets: list[str]) -> str:
    more = "" if len(targets) <= _MAX_NAMED else f" and {len(targets) - _MAX_NAMED} more"
    return f"{what} {len(targets)} ({', '.join(targets[:_MAX_NAMED])}{more})"


def read_signature(root: Path, target: str) -> str | None:
    """The parameters of the function `target`, or the kind of another definition. None if it is not defined."""
    node = _find(root, tuple(target.split(".")), _MAX_HOPS)
    if node is None:
        return None
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        return f"{prefix}({ast.unparse(node.args)})"
    return "class" if isinstance(node, ast.ClassDef) else "value"


@dataclass(frozen=True, slots=True)
class _Module:
    """A parsed file, and the package that its relative imports start from."""

    package: tuple[str, ...]
    body: list[ast.stmt]


@cache
def _parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_bytes()).body


def _module(root: Path, parts: tuple[str, ...]) -> _Module | None:
    base = root.joinpath(*parts)
    for file, package in ((base.with_suffix(".py"), parts[:-1]), (base / "__init__.py", parts)):
        if file.is_file():
            return _Module(package, _parsed(file))
    return None


def _find(root: Path, parts: tuple[str, ...], hops: int) -> ast.stmt | None:
    for cut in range(len(parts) - 1, 0, -1):
        module = _module(root, parts[:cut])
        if module is not None:
            return _in_module(root, module, parts[cut:], hops)
    return None


def _in_module(root: Path, module: _Module, names: tuple[str, ...], hops: int) -> ast.stmt | None:
    if hops == 0:
        return None
    for node in _definitions(module.body):
        if isinstance(node, ast.ImportFrom):
            source = _imported_from(module, node, names[0])
            if source is not None:
                return _find(root, (*source, *names[1:]), hops - 1)
        elif _name_of(node) == names[0]:
            if len(names) == 1:
                return node
            if isinstance(node, ast.ClassDef):
                return _in_class(root, module, node, names[1:], hops)
    return None


def _in_class(
    root: Path, module: _Module, found: ast.ClassDef, names: tuple[str, ...], hops: int
) -> ast.stmt | None:
    """A member of a class or of its bases, in the order of their names."""
    for node in _definitions(found.body):
        if _name_of(node) == names[0] and len(names) == 1:
            return node
    for base in found.bases:
        path = ast.unparse(base).split("[")[0].split(".")
        inherited = _in_module(root, module, (*path, *names), hops - 1)
        if inherited is not None:
            return inherited
    return None


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, also those below its `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body)
            yield from _definitions(node.orelse)
        else:
            yield node


def _name_of(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _imported_from(module: _Module, node: ast.ImportFrom, name: str) -> tuple[str, ...] | None:
    """Dotted path of what the statement imports as `name`."""
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            above = module.package[: len(module.package) - node.level + 1] if node.level else ()
            return (*above, *(node.module.split(".") if node.module else ()), alias.name)
    return None
