"""What can be changed in a function: one small edit of its source each.

Those of mutmut and cosmic-ray turn most tensors into None or floats, which fails at once and tests nothing. These stay
within the type: boundaries, masks, dropped conditions, dropped statements, another member of the same enumeration.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from mutation_testing.mutant import Mutant

COMPARES: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
# On CPU, or with the values that are there, these change nothing.
KEYWORDS_KEPT = frozenset({"device", "dtype", "non_blocking", "output_size", "strict"})
# Where 0 and -1 are mostly the same: dimensions, and the first of one.
DIMENSION_CALLS = frozenset({"cumsum", "sum", "unbind", "chunk", "stack", "roll"})


@dataclass(frozen=True, slots=True)
class Edit:
    start: int
    stop: int
    text: str
    label: str | None = None  # None: the lines as they become


def mutants_of(source: str, file: str) -> list[Mutant]:
    """All mutants of all functions of a module."""
    tree, text = ast.parse(source), _Text(source)
    constants = _constants(tree)
    found = []
    for name, function in _functions(tree.body):
        first_line = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        for statement in _statements(function):
            known = _known_before(function, statement)
            for edit in _edits(statement, text, constants, known):
                found.append(
                    Mutant(
                        file=file,
                        function=name,
                        first_line=first_line,
                        lines=_header(statement),
                        span=(edit.start, edit.stop),
                        text=edit.text,
                        label=edit.label or text.becomes(edit),
                    )
                )
    return found


class _Text:
    """Source by positions of nodes, in bytes."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.AST) -> str:
        start, stop = self.span(node)
        return self.between(start, stop)

    def between(self, start: int, stop: int) -> str:
        return self._data[start:stop].decode()

    def becomes(self, edit: Edit) -> str:
        """The lines of the edit after it, on one line."""
        first = self._data.rfind(b"\n", 0, edit.start) + 1
        last = self._data.find(b"\n", edit.stop)
        lines = self.between(first, edit.start) + edit.text + self.between(edit.stop, last)
        return " ".join(lines.split())


def _functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of the module and methods of its classes; what is nested in them belongs to them."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    nodes = (node for statement in function.body for node in ast.walk(statement))
    return (node for node in nodes if isinstance(node, ast.stmt))


def _header(statement: ast.stmt) -> tuple[int, int]:
    """Lines of a statement without those of the statements in it."""
    inner = [
        s.lineno for s in ast.walk(statement) if isinstance(s, ast.stmt) and s is not statement
    ]
    last = min(inner, default=statement.end_lineno + 1) - 1
    return statement.lineno, max(statement.lineno, last)


def _constants(tree: ast.Module) -> dict[str, list[str]]:
    """Upper-case attributes by what they are taken from, as the module uses them: `Reason` -> CHAIN, TOKEN, ..."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.isupper():
            found[ast.unparse(node.value)].add(node.attr)
    return {base: sorted(names) for base, names in found.items()}


def _known_before(function: ast.FunctionDef, statement: ast.stmt) -> set[str]:
    """Names that are bound before `statement`, so that leaving out another binding is no NameError."""
    known = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    for node in ast.walk(function):
        is_store = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if is_store and node.lineno < statement.lineno:
            known.add(node.id)
    return known


def _edits(
    statement: ast.stmt, text: _Text, constants: dict[str, list[str]], known: set[str]
) -> Iterator[Edit]:
    if _is_log(statement):
        return
    if _can_be_left_out(statement, known):
        yield Edit(*text.span(statement), "pass", f"without: {_line(text.of(statement))}")
    if isinstance(statement, ast.AugAssign):
        yield from _augmented(statement, text)
    if isinstance(statement, ast.Raise):
        return  # the text for people
    for node, parent in _expressions(statement):
        yield from _conditions(node, text)
        yield from _operations(node, text)
        yield from _calls(node, text)
        yield from _names(node, text, constants)
        yield from _numbers(node, parent, text)


def _line(code: str) -> str:
    return " ".join(code.split())


def _is_log(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("logger.")


def _can_be_left_out(statement: ast.stmt, known: set[str]) -> bool:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            return True
        case ast.Return(value=None) | ast.AugAssign():
            return True
        case ast.Assign(targets=targets):
            stored = [n for target in targets for n in ast.walk(target)]
            names = {
                n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            return names <= known
    return False


def _expressions(statement: ast.stmt) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Expressions of a statement with their parents; no annotations, no text, no statements in it."""
    waiting: list[tuple[ast.AST, ast.AST | None]] = [(statement, None)]
    while waiting:
        node, parent = waiting.pop(0)
        yield node, parent
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "decorator_list", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            waiting += [
                (child, node)
                for child in children
                if isinstance(child, ast.AST) and not _is_left_alone(child)
            ]


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in KEYWORDS_KEPT
    return isinstance(node, ast.stmt | ast.JoinedStr)


def _conditions(node: ast.AST, text: _Text) -> Iterator[Edit]:
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            for value in ("True", "False"):
                yield Edit(*text.span(test), value, f"{value} for: {_line(text.of(test))}")
        case ast.comprehension(ifs=[_, *_]):
            for test in node.ifs:
                yield Edit(*text.span(test), "True", f"True for: {_line(text.of(test))}")
        case ast.BoolOp(values=values):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for i, value in enumerate(values):
                others = [f"({text.of(other)})" for other in values if other is not value]
                label = f"without: {_line(text.of(value))} in: {_line(text.of(node))}"
                yield Edit(*text.span(node), f"({f' {old} '.join(others)})", label)
                if i:
                    yield _between(text, values[i - 1], value, old, new)


def _between(text: _Text, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit:
    """`old` between two nodes becomes `new`."""
    start, stop = text.span(left)[1], text.span(right)[0]
    at = start + len(text.between(start, stop).split(old, 1)[0].encode())
    return Edit(at, at + len(old), new)


def _operations(node: ast.AST, text: _Text) -> Iterator[Edit]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            start, stop = text.span(left)[1], text.span(right)[0]
            between = text.between(start, stop)
            closed = between[: len(between) - len(between.lstrip(") \n"))]
            opened = between[len(between.rstrip("( \n")) :]
            for new in COMPARES[type(op)]:
                yield Edit(start, stop, f"{closed.rstrip()} {new} {opened.lstrip()}")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            old, new = OPERATORS[type(op)]
            start, stop = text.span(node)
            edit = _between(text, left, right, old, new)
            rest = text.between(edit.stop, stop)
            yield Edit(start, stop, f"({text.between(start, edit.start)}{new}{rest})")
            if isinstance(op, ast.BitAnd | ast.BitOr):
                for kept in (left, right):
                    yield Edit(start, stop, f"({text.of(kept)})")
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub(), operand=operand):
            yield Edit(*text.span(node), f"({text.of(operand)})")


def _augmented(statement: ast.AugAssign, text: _Text) -> Iterator[Edit]:
    if type(statement.op) in OPERATORS:
        old, new = OPERATORS[type(statement.op)]
        yield _between(text, statement.target, statement.value, f"{old}=", f"{new}=")
        yield _between(text, statement.target, statement.value, f"{old}=", "=")


def _calls(node: ast.AST, text: _Text) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = ast.unparse(node.func)
    if name in ("torch.where", "np.where") and len(node.args) == 3:
        for arm in node.args[1:]:
            label = f"{_line(text.of(arm))} for: {_line(text.of(node))}"
            yield Edit(*text.span(node), f"({text.of(arm)})", label)
        return
    if name in CALLS and len(node.args) + len(node.keywords) > 0:
        yield Edit(*text.span(node.func), CALLS[name])
    if name in ("np.maximum", "np.minimum") and len(node.args) == 2:
        yield Edit(*text.span(node), f"({text.of(node.args[0])})")
    if isinstance(node.func, ast.Attribute) and node.func.attr == "clamp":
        yield Edit(*text.span(node), f"({text.of(node.func.value)})")
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in KEYWORDS_KEPT:
            continue
        start, stop = text.span(keyword)
        if text.between(stop, stop + 1) == ",":
            stop += 1
        label = f"without: {_line(text.of(keyword))} of: {name}"
        yield Edit(start, stop, "", label)


def _names(node: ast.AST, text: _Text, constants: dict[str, list[str]]) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=True | False as value):
            yield Edit(*text.span(node), str(not value))
        case ast.Attribute(attr=attr) if attr.isupper():
            names = constants[ast.unparse(node.value)]
            other = names[(names.index(attr) + 1) % len(names)]
            if other != attr:
                yield Edit(*text.span(node), f"{text.of(node.value)}.{other}")


def _numbers(node: ast.AST, parent: ast.AST | None, text: _Text) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return
    yield Edit(*text.span(node), str(node.value + 1))
    if node.value:
        yield Edit(*text.span(node), str(node.value - 1))
    elif not _is_index(parent):
        yield Edit(*text.span(node), "(-1)")


def _is_index(parent: ast.AST | None) -> bool:
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute):
        return parent.func.attr in DIMENSION_CALLS
    return isinstance(parent, ast.Subscript)
