"""Measures sentences: half of them have at most 13 words, nine of ten at most 22. Prints those that are longer.

    python tools/prose.py README.md docs                      # Markdown, files or folders
    python tools/prose.py --python python/sglang/srt/kv_canary  # docstrings and messages
    python tools/prose.py --quiet README.md docs              # figures only

Exits with 1 if a file misses a limit, or uses a term of `TERMS`. A code span, a link and a `{field}` of an f-string
count as their words, at least one. Headings, code blocks and sentences of one or two words do not count. Cells of
tables are fragments, which would lower the figures: they do not count either, but long ones are printed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MEDIAN_LIMIT, P90_LIMIT = 13, 22
SHORTEST = 3  # words; labels such as "**Means.**" are no sentences
SHORTEST_MESSAGE = 4  # plain words of a string in a program; patterns and commands have fewer
FEW = 10  # sentences; a file with fewer has no percentile to speak of

# What is not the field's term, and what to write instead.
TERMS = {
    r"\banew\b": "again",
    r"\bwhoever\b": "name the subject",
    r"\b(?:is|are|be) told\b": "is reported, is known",
    r"\bleast (?:seconds|steps|slots|bytes)\b": "minimum",
    r"\bmost (?:seconds|steps|slots|bytes)\b": "maximum",
    r"\bbehind (?:a|the|its|each|that|this) (?:step|forward|token|verify|one)\b": "after",
    r"\bdear\b": "expensive",
    r"\bmeanwhile\b": "at that time, in that time",
}

FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
BLOCK_START = re.compile(r"\s*(?:[-*+]|\d+[.)]) +|\s*> ?")
OPENS = "\u2039"  # stands where a code span or a link begins: a sentence may, in lower case
NOT_THE_END = re.compile(r"\b(?:e\.g|i\.e|vs|etc|cf|no|approx|fig)\.$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Sentence:
    line: int
    text: str
    in_table: bool = False

    @property
    def words(self) -> int:
        return len([word for word in self.text.split() if re.search(r"\w", word)])


@dataclass(slots=True)
class Measured:
    """The sentences of one file."""

    name: str
    sentences: list[Sentence] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return sorted(s.words for s in self.sentences if not s.in_table)

    @property
    def median(self) -> float:
        return statistics.median(self.lengths) if self.lengths else 0

    @property
    def p90(self) -> int:
        """The smallest length that nine of ten sentences do not exceed."""
        lengths = self.lengths
        return lengths[-(-len(lengths) * 9 // 10) - 1] if lengths else 0

    @property
    def too_long(self) -> bool:
        enough = len(self.lengths) >= FEW
        return enough and (self.median > MEDIAN_LIMIT or self.p90 > P90_LIMIT)

    def long_sentences(self) -> list[Sentence]:
        return [s for s in self.sentences if s.words > P90_LIMIT]

    def wrong_terms(self) -> list[tuple[Sentence, str, str]]:
        found = []
        for sentence in self.sentences:
            for pattern, better in TERMS.items():
                if match := re.search(pattern, sentence.text, re.IGNORECASE):
                    found.append((sentence, match[0], better))
        return found


def sentences_of(text: str, line: int, in_table: bool = False) -> Iterator[Sentence]:
    """The sentences of one paragraph."""
    start = 0
    for end in re.finditer(r"[.!?][\"')]*(?=\s+[\"'(]*[A-Z0-9<{\u2039-])|$", text):
        sentence = text[start : end.end()].replace(OPENS, "")
        if end.end() < len(text) and NOT_THE_END.search(sentence):
            continue
        found = Sentence(line, " ".join(sentence.split()), in_table)
        if found.words >= SHORTEST:
            yield found
        start = end.end()


# Markdown


def markdown_sentences(text: str) -> Iterator[Sentence]:
    """Sentences of paragraphs, list items, quotes and table cells."""
    for pattern in (GENERATED, FENCE, COMMENT):
        text = pattern.sub(lambda match: "\n" * match[0].count("\n"), text)
    paragraph: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_cells = line.lstrip().startswith("|")
        starts = BLOCK_START.match(line)
        if is_cells or starts or not line.strip() or line.lstrip().startswith(("#", "![")):
            yield from sentences_of(_plain(" ".join(paragraph)), first)
            paragraph = []
        if is_cells:
            for cell in re.split(r"(?<!\\)\|", line):
                yield from sentences_of(_plain(cell), number, in_table=True)
        elif line.strip() and not line.lstrip().startswith(("#", "![")):
            if not paragraph:
                first = number
            paragraph.append(line[starts.end() :] if starts else line)


def _plain(text: str) -> str:
    """Without markup. A code span keeps one word for each of its parts."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", OPENS + r"\1", text)
    text = re.sub(r"`+([^`]*)`+", lambda match: OPENS + re.sub(r"[.!?]", "·", match[1]), text)
    return re.sub(r"\*\*|__|(?<!\w)\*|\*(?!\w)", "", text)


# Python


def python_sentences(source: str) -> Iterator[Sentence]:
    """Sentences of docstrings, and of all other texts of several words: logs, errors, help, tables of messages."""
    docstrings = set()
    for node in ast.walk(tree := ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstring(node)
            docstrings.update(id(n.value) for n in node.body[:1] if _is_text(n))
    yield from _messages(tree, docstrings)


def _messages(node: ast.AST, docstrings: set[int]) -> Iterator[Sentence]:
    if id(node) in docstrings:
        return
    text = _text(node) if isinstance(node, ast.expr) else ""
    if not text:
        for child in ast.iter_child_nodes(node):
            yield from _messages(child, docstrings)
    elif len(re.findall(r"(?<!\S)[A-Za-z'-]+(?=[\s.,:;)]|$)", text)) >= SHORTEST_MESSAGE:
        yield from sentences_of(_plain(text), node.lineno)


def _is_text(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant and isinstance(statement.value.value, str)


def _docstring(node: ast.AST) -> Iterator[Sentence]:
    first = node.body[0] if node.body else None
    if first is not None and _is_text(first):
        line = first.lineno
        for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(first.value.value)):
            if not paragraph.startswith("    "):  # commands and diagrams
                for block in re.split(r"\n(?=\s*[-*] )", paragraph):
                    yield from sentences_of(_plain(BLOCK_START.sub("", block, 1)), line)
            line += paragraph.count("\n") + 2


def _text(node: ast.expr) -> str:
    """A literal's text, with one word for each field; "" for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        return _text(node.left) + (_text(node.right) if isinstance(node.op, ast.Add) else "")
    return ""


# Command line


def measure(path: Path) -> Measured:
    read = python_sentences if path.suffix == ".py" else markdown_sentences
    return Measured(str(path), list(read(path.read_text())))


def files(paths: Iterable[Path], suffix: str) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]
    return found


def figures(name: str, measured: Measured) -> str:
    verdict = "  too long" if measured.too_long else ""
    count = len(measured.lengths)
    return f"{name:<50} {count:>5} sentences  median {measured.median:>4.1f}  p90 {measured.p90:>3}{verdict}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="\n".join(__doc__.splitlines()[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files, or folders to search")
    parser.add_argument("--python", action="store_true", help="read *.py instead of *.md")
    parser.add_argument("--quiet", action="store_true", help="print figures only")
    args = parser.parse_args(argv)

    measured = [measure(path) for path in files(args.paths, ".py" if args.python else ".md")]
    if not args.quiet:
        for file in measured:
            for sentence in file.long_sentences():
                print(f"{file.name}:{sentence.line}: {sentence.words} words: {sentence.text}")
    wrong = [(file, *found) for file in measured for found in file.wrong_terms()]
    for file, sentence, term, better in wrong:
        print(f'{file.name}:{sentence.line}: "{term}", better: {better}')
    for file in measured:
        if not args.python or file.too_long:
            print(figures(file.name, file))
    everything = Measured("all", [s for file in measured for s in file.sentences])
    print(figures("all", everything))
    return int(bool(wrong) or any(file.too_long for file in measured) or everything.too_long)


if __name__ == "__main__":
    sys.exit(main())
