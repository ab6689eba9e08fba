"""A folder of event files as two ranks leave it: real events of a manager, and what a server adds to them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .event_schema import problems_of
from .manager_rig import ManagerRig

SLOT, POSITION = 300, 5  # the wrong entry of the row, and where it is


def write_folder(folder: Path, ranks: int = 2) -> Path:
    """Each rank has two causes: a slot that was never written, and changed bytes. Rank 0 has statistics."""
    folder.mkdir(exist_ok=True)
    found = _found_by_a_manager(folder / "found")
    for rank in range(ranks):
        events = [active(rank), *({**e, **_stamp(rank)} for e in found)]
        if rank == 0:
            events += [statistics(step) for step in (0, 50, 100)]
        write_events(folder / f"events.tp{rank}.jsonl", events)
    return folder


def write_events(path: Path, events: Iterable[dict[str, Any]]) -> Path:
    lines = []
    for number, event in enumerate(events, 1):
        event = {**event, "line": number}
        assert (problems := list(problems_of(event))) == [], problems
        lines.append(json.dumps(event) + "\n")
    path.write_text("".join(lines))
    return path


def active(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        **_stamp(rank),
        "event": "active",
        "host": "gpu7",
        "pid": 100 + rank,
        "model": "m",
        "served_model": "m",
        "sglang_version": "0.5.12.post1",
        "canary_version": "0.1.0",
        "role": "target",
        "mode": "log",
        "pools": ["FULL"],
        "halves": {"FULL": ["K", "V"]},
        "content": "all",
        "slots": {"FULL": 513},
        "record_bytes": 65664,
        "state_bytes": 1,
        "share_of_pool": 0.01,
        "fault_injection": "",
        "token_oracle": None,
        **changes,
    }


def statistics(step: int) -> dict[str, Any]:
    counts = {"HEAD_K_FULL": 1000 + step}
    return {
        **_stamp(0),
        "event": "statistics",
        "from_step": step,
        "to_step": step + 50,
        "forwards": 50,
        "checked": counts,
        "content_checked": counts,
        "written": counts,
        "coverage": 0.987,
        "sweep_passes": 3,
        "violations": 0,
        "moot": 0,
        "overwritten": 0,
        "internal_errors": 0,
        "host_us_per_step": 41.5,
    }


def _stamp(rank: int) -> dict[str, Any]:
    ranks = {"rank": rank, "pp_rank": None, "dp_rank": None}
    return {"time": 1.79e9, "schema": 2, **ranks, "run": f"run{rank}", "runner": "target"}


def _found_by_a_manager(path: Path) -> list[dict[str, Any]]:
    rig = ManagerRig(event_file=str(path))
    rig.extend(1, range(20))
    rig.decode([1])
    rig.rows.req_to_token[1, POSITION] = SLOT
    rig.decode([1])
    slot = int(rig.rows.req_to_token[1, 9])
    rig.pool.k_buffer[0][slot] += 1
    rig.decode([1])
    rig.settle()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return [event for event in events if event["event"] in ("violation", "cause")]
