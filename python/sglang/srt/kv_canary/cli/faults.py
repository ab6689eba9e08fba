"""`kv-canary faults`: the fault-injection commands, their arguments and the findings they must cause."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from ..perturb.control_folder import EXAMPLE
from ..perturb.fault import Fault
from ..perturb.faults import FAULTS

_WIDTH = 120
HOW_TO = (
    "Fault injection is for tests: it deliberately damages the KV cache of a running server. Start the server with "
    "SGLANG_KV_CANARY_PERTURB_DIR=FOLDER. Faults that are marked so also need "
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0: without it, SGLang's own leak check ends the server.",
    f"Write {EXAMPLE} to FOLDER under any other name and rename it to ADDRESS-NAME.json. ADDRESS is the model runner. "
    "For example, target0 is the target model on tensor parallel rank 0, draft0 its draft model, target0.pp1 stage 1 "
    "of a pipeline. NAME is yours. The runner removes the file when it takes the command. A file with an address that "
    "no runner has stays. A fault waits until a request or prefix fits its arguments. The answer, or the error, "
    "appears as ADDRESS-NAME.done.json.",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kv-canary faults",
        description="Faults that can be injected into a running server, to see them reported.",
    )
    parser.add_argument("name", nargs="?", metavar="FAULT", help="show this one only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.name is not None and args.name not in FAULTS:
        parser.error(f"no fault {args.name!r}; choose from {', '.join(FAULTS)}")
    faults = [FAULTS[args.name]] if args.name else list(FAULTS.values())
    if args.json:
        print(json.dumps({"faults": [_as_json(fault) for fault in faults]}, indent=2))
    elif args.markdown:
        print("\n\n".join((*HOW_TO, *(_as_markdown(fault) for fault in faults))))
    else:
        how_to = () if args.name else (textwrap.fill(text, _WIDTH) for text in HOW_TO)
        print("\n\n".join((*how_to, *(_as_text(fault) for fault in faults))))
    return 0


def must_be_seen(fault: Fault) -> str:
    if not fault.reasons:
        return "nothing"
    return f"{' or '.join(str(reason.name) for reason in fault.reasons)} at {fault.where}"


def _notes(fault: Fault) -> list[str]:
    notes = []
    if fault.breaks_accounting:
        notes.append("needs SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0")
    if fault.eager_only:
        notes.append("has no effect on a forward that a CUDA graph replays: --disable-cuda-graph")
    return notes


def _as_text(fault: Fault) -> str:
    lines = [f"    {fault.summary}", f"    must be seen: {must_be_seen(fault)}"]
    lines += [f"    note: {note}" for note in _notes(fault)]
    for a in fault.arguments:
        lines.append(f"      {a.name:13} {a.help}; {a.expected} (default: {a.default_text})")
    return "\n".join((fault.name, *map(_wrapped, lines)))


def _wrapped(line: str) -> str:
    """Continued below the text of an argument, or 2 further to the right; flags stay in one piece."""
    indent = " " * (20 if line.startswith("      ") else 6)
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _as_markdown(fault: Fault) -> str:
    lines = [f"### `{fault.name}`", "", fault.summary, "", f"Must be seen: {must_be_seen(fault)}."]
    lines += [f"Note: {note}." for note in _notes(fault)]
    if fault.arguments:
        lines += ["", "| argument | default | allowed | meaning |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{a.name}` | {a.default_text} | {a.expected} | {a.help} |" for a in fault.arguments
        ]
    return "\n".join(lines)


def _as_json(fault: Fault) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "summary": fault.summary,
        "must_be_seen": [str(reason.name) for reason in fault.reasons],
        "where": fault.where,
        "notes": _notes(fault),
        "args": [
            {"name": a.name, "default": a.default_text, "allowed": a.expected, "help": a.help}
            for a in fault.arguments
        ],
    }
