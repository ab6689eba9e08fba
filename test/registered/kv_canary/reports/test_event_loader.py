"""The schema of events, and the loader that reads them back. `conftest.py` validates what other tests write."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import Reason
from sglang_kv_canary.reports.classify import BugClass, Confidence
from sglang_kv_canary.reports.event_loader import (
    WHOLE_FILE,
    CauseTold,
    Event,
    EventFormatError,
    Found,
    Health,
    LoadedEvents,
    Problem,
    SweepPass,
    event_files,
    load_events,
)
from sglang_kv_canary.reports.event_sink import SCHEMA, EventSink
from sglang_kv_canary.reports.event_types import event_of
from sglang_kv_canary_rigs.checkout import DOCS
from sglang_kv_canary_rigs.event_folder import active, write_folder
from sglang_kv_canary_rigs.event_schema import kinds, problems_of, schema
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rotating_server import RotatingServer

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


@pytest.fixture
def found(tmp_path: Path) -> Path:
    """The event file of a manager that has found a row entry that leads to another slot."""
    path = tmp_path / "events.jsonl"
    rig = ManagerRig(event_file=str(path))
    rig.extend(1, range(20))
    rig.rows.req_to_token[1, 5] = 300
    rig.decode([1])
    rig.settle()
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def a_line(**fields: Any) -> str:
    return json.dumps({"event": "test", "time": 1.0, "schema": 2, "rank": 0, **fields})


# The schema


def test_the_schema_is_a_json_schema_and_names_the_version_that_is_written() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["schema"]["const"] == SCHEMA


def test_the_schema_names_all_reasons_and_classes_of_bugs() -> None:
    defs = schema()["$defs"]
    assert defs["reasons"]["items"]["enum"] == [reason.name for reason in Reason]
    guess = defs["guess"]["properties"]
    assert guess["class"]["enum"] == [bug.value for bug in BugClass]
    assert guess["confidence"]["enum"] == [level.value for level in Confidence]


def test_the_document_names_all_kinds_and_fields_of_the_schema() -> None:
    document = (DOCS / "events.md").read_text()
    named = set(re.findall(r"`([\w]+)`", document))
    fields = {*schema()["properties"], *kinds()}
    for kind in ("cause", "violation"):
        fields |= schema()["$defs"][kind]["properties"].keys()
    assert sorted(fields - named) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"slot": "five"}, "$.slot"),
        ({"reasons": ["NO_SUCH_REASON"]}, "$.reasons[0]"),
        ({"stored_chain": "12"}, "$.stored_chain"),
        ({"schema": 1}, "$.schema"),
        ({"new_field": 1}, "new_field"),
        ({"reader": {"forward": 1}}, "$.reader"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_event_is_noticed(found: Path, change: dict[str, Any], problem: str) -> None:
    event = next(event for event in lines_of(found) if event["event"] == "violation")
    assert problems_of(event) == []
    assert any(problem in text for text in problems_of({**event, **change}))


def test_a_missing_field_is_noticed(found: Path) -> None:
    event = lines_of(found)[0]
    for name in ("time", "rank", "slot", "tag"):
        assert problems_of({k: v for k, v in event.items() if k != name}) != []


def test_readers_of_the_plain_schema_accept_later_fields_and_kinds(found: Path) -> None:
    event = lines_of(found)[0]
    validator = jsonschema.Draft202012Validator(schema())
    assert validator.is_valid({**event, "later": 1})
    assert validator.is_valid({**event, "event": "later"})
    assert not validator.is_valid({**event, "slot": "five"})


# Typed events


def test_events_come_back_as_what_they_were(found: Path) -> None:
    loaded = load_events(found)
    findings, causes = loaded.of(Found), loaded.of(CauseTold)
    assert loaded.problems == ()
    assert loaded.missing == {}
    assert len(findings) == 4
    written = [event for event in lines_of(found) if event["event"] == "violation"]
    assert [finding.violation.as_event() for finding in findings] == [
        {k: v for k, v in event.items() if k in finding.violation.as_event()}
        for event, finding in zip(written, findings, strict=True)
    ]
    last = causes[-1]
    assert last.cause == findings[0].cause == 1
    assert last.slot == 300
    assert last.reasons == ("NEVER_WRITTEN",)
    assert (
        last.story.sentence
        == 'request "req-1" at position 5 reads slot 300, which no forward has written since the start'
    )
    assert last.story.guess is not None
    assert last.story.guess.bug is BugClass.ROW_SUBSTITUTION
    assert last.extent is not None
    assert last.extent.findings == 4
    assert [reader.request_id for reader in last.readers] == ["req-1"]
    assert last.stamp.runner == "target"


def test_other_kinds_have_their_types(tmp_path: Path) -> None:
    sink = EventSink(str(tmp_path / "e.jsonl"), 3, pp_rank=1).for_runner("draft")
    health = {"healthy": False, "problems": ["p"], "tags": [], "step": None, "forwards": None}
    sink.emit({"event": "health", **health})
    since = {"passes": 1, "slots": {"FULL": 5}, "seconds": 0.5}
    done = {"pass": 7, "chunks": 1, "findings": 0, "since_last": since}
    sink.emit({"event": "sweep_pass", **done, **since})
    sink.emit({"event": "later", "what": 1})
    first, second, third = load_events(tmp_path).events
    assert isinstance(first, Health)
    assert (first.problems, first.stamp.rank, first.stamp.pp_rank) == (("p",), 3, 1)
    assert isinstance(second, SweepPass)
    assert (second.number, second.slots) == (7, {"FULL": 5})
    assert type(third) is Event
    assert (third.kind, third.fields["what"]) == ("later", 1)


def test_a_violation_of_schema_1(found: Path) -> None:
    event = next(event for event in lines_of(found) if event["event"] == "violation")
    new = ("schema", "run", "line", "cause", "content_written", "content_now")
    old = {k: v for k, v in event.items() if k not in new}
    loaded = event_of({**old, "stored_content": "0x0000000000000005"})
    assert isinstance(loaded, Found)
    assert (loaded.stamp.schema, loaded.cause, loaded.violation.content_written) == (1, None, 5)


def test_a_newer_schema_is_refused_with_what_to_do() -> None:
    with pytest.raises(EventFormatError, match=r"schema 3: .* up to 2. Use a newer"):
        event_of(json.loads(a_line(schema=3)))


# Files


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "viol',
        "[1, 2]",
        "5",
        '{"time": 1.0}',
        '{"event": "test", "time": "now", "rank": 0}',
        '{"event": "test", "time": 1.0}',
        '{"event": "violation", "time": 1.0, "rank": 0, "reasons": ["CHAIN"]}',
        '{"event": "cause", "time": 1.0, "rank": 0, "readers": 5}',
        '{"event": "cause", "time": 1.0, "rank": 0, "readers": [], "guess": {}}',
        '{"event": "test", "time": 1.0, "rank": 0, "run": 5}',
        '{"event": "test", "time": 1.0, "rank": 0, "run": []}',
        '{"event": "test", "time": 1.0, "rank": 0, "run": "a", "line": "1"}',
        '{"event": "test", "time": 1.0, "rank": 0, "run": "a", "line": true}',
        '{"event": "test", "time": 1.0, "rank": {}}',
        '{"event": "test", "time": 1.0, "rank": 0, "runner": {}}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:90],
)
def test_what_is_no_event_is_a_problem_and_not_the_end(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "e.jsonl", a_line(n=1), line, "", a_line(n=2))
    loaded = load_events(path)
    assert [event.fields["n"] for event in loaded.events] == [1, 2]
    assert [(problem.file, problem.line) for problem in loaded.problems] == [(path, 2)]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("violation", "reasons", []),
        ("violation", "reasons", [5]),
        ("violation", "tag", 5),
        ("cause", "reasons", "CHAIN"),
        ("cause", "pool", None),
    ],
)
def test_names_of_another_type_are_a_problem(
    found: Path, kind: str, field: str, value: object
) -> None:
    event = next(event for event in lines_of(found) if event["event"] == kind)
    event_of(event)
    with pytest.raises(EventFormatError, match=f"{kind}: expected .* under '{field}'"):
        event_of({**event, field: value})


WRONG_TYPES = [
    ("violation", "reader", None),
    ("violation", "reader", {"forward": 1, "row": 1, "mode": "X", "request_id": [], "step": 0}),
    ("violation", "slot", "5"),
    ("violation", "line", 2**70),
    ("cause", "findings", None),
    ("cause", "tags", None),
    ("cause", "readers", [None]),
    ("cause", "extent", {"slots": 1}),
    ("cause", "history", [{"what": "free"}]),
    ("containment", "aborted", None),
    ("containment", "withheld", [{"pool": "SWA"}]),
    ("findings_lost", "since", None),
    ("findings_lost", "since", float("nan")),
    ("statistics", "coverage", "x"),
    ("statistics", "checked", {"HEAD_K_FULL": None}),
    ("active", "pools", None),
    ("active", "halves", {"FULL": None}),
]


@pytest.fixture(scope="module")
def one_of_each(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """An event of each kind in WRONG_TYPES."""
    events = lines_of(write_folder(tmp_path_factory.mktemp("f"), 1) / "events.tp0.jsonl")
    done = {"aborted": [], "answered": [], "dropped": 0, "withheld": [{"pool": "SWA", "slot": 6}]}
    lost = {"why": "dropped", "findings": 1, "first_forward": 1, "last_forward": 1, "since": 1.0}
    events += [{**active(0), "event": "containment", **done}]
    events += [{**active(0), "event": "findings_lost", **lost}]
    return {event["event"]: event for event in events}


@pytest.mark.parametrize(("kind", "field", "value"), WRONG_TYPES, ids=str)
def test_a_field_of_another_type_is_a_problem(
    one_of_each: dict[str, dict[str, Any]], kind: str, field: str, value: object
) -> None:
    """It ended the report in a traceback."""
    event = one_of_each[kind]
    event_of(event)
    with pytest.raises(EventFormatError, match=f"{kind}: "):
        event_of({**event, field: value})


def test_a_cause_that_no_report_can_show_is_a_problem(
    one_of_each: dict[str, dict[str, Any]],
) -> None:
    """There is a SWA slot for some of the row's entries only."""
    event = one_of_each["cause"]
    scene = event["scene"]
    event_of({**event, "scene": {**scene, "mapped": scene["entries"]}})
    with pytest.raises(EventFormatError, match="cause: IndexError"):
        event_of({**event, "scene": {**scene, "mapped": scene["entries"][:1]}})


def test_bytes_that_are_no_text_are_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"\xff\xfe\n" + a_line().encode())
    loaded = load_events(path)
    assert (len(loaded.events), len(loaded.problems)) == (1, 1)


def test_files_of_a_folder_in_the_order_of_writing(tmp_path: Path) -> None:
    names = ("b.jsonl", "a.jsonl", "a.jsonl.2", "a.jsonl.10", "a.jsonl.1.gz", "notes.txt", "a.json")
    for name in names:
        (tmp_path / name).touch()
    order = ["a.jsonl.1.gz", "a.jsonl.2", "a.jsonl.10", "a.jsonl", "b.jsonl"]
    assert [path.name for path in event_files(tmp_path)] == order


def test_packed_files_whole_and_cut(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"{a_line(n=n)}\n" for n in range(500)).encode())
    (tmp_path / "e.jsonl.1.gz").write_bytes(packed)
    assert len(load_events(tmp_path).events) == 500
    (tmp_path / "e.jsonl.1.gz").write_bytes(packed[:-20])
    (problem,) = load_events(tmp_path).problems
    assert "archive is damaged" in problem.what


@pytest.mark.parametrize(
    "name", ["e.jsonl-20261129", "e.jsonl-20261129.gz", "e.jsonl-20261129-1795915527", "e.jsonl.3"]
)
def test_names_that_logrotate_gives_are_read(tmp_path: Path, name: str) -> None:
    text = f"{a_line()}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert len(load_events(tmp_path).events) == 1


def test_a_skipped_file_of_a_similar_name_is_a_problem(tmp_path: Path) -> None:
    for name in ("e.jsonl", "e.jsonl.zst", "e.jsonl.old", "e.jsonl.html", "notes.txt", "a.json"):
        write_lines(tmp_path / name, a_line())
    loaded = load_events(tmp_path)
    assert len(loaded.events) == 1
    assert [(each.file.name, each.line) for each in loaded.problems] == [
        ("e.jsonl.old", WHOLE_FILE),
        ("e.jsonl.zst", WHOLE_FILE),
    ]
    assert load_events(tmp_path / "e.jsonl.old").problems == ()  # asked for by its name


def _wrong_crc(packed: bytes) -> bytes:
    return packed[:-8] + bytes(4) + packed[-4:]


@pytest.mark.parametrize(
    "damage",
    [_wrong_crc, lambda packed: b"no gzip", lambda packed: packed[:10] + b"\xff" * 20],
    ids=["crc", "no-gzip", "stream"],
)
def test_a_bad_archive_hides_no_other_file(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    packed = gzip.compress(f"{a_line(n=1)}\n".encode())
    (tmp_path / "a.jsonl.gz").write_bytes(damage(packed))
    write_lines(tmp_path / "b.jsonl", a_line(n=2))
    loaded = load_events(tmp_path)
    assert 2 in [event.fields["n"] for event in loaded.events]
    (problem,) = loaded.problems
    assert (problem.file.name, "archive is damaged" in problem.what) == ("a.jsonl.gz", True)


@pytest.mark.parametrize("name", ["missing", "."], ids=["no-path", "empty-folder"])
def test_no_event_file_is_an_error_that_says_what_was_expected(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder with files named \*\.jsonl"):
        load_events(tmp_path / name)


def test_a_line_in_two_files_counts_once(found: Path) -> None:
    (found.parent / "copy.jsonl").write_bytes(found.read_bytes())
    assert load_events(found.parent) == load_events(found)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("during", [100, 0])
def test_files_that_are_moved_meantime_are_read(tmp_path: Path, during: int, at_end: bool) -> None:
    server = RotatingServer(tmp_path, files=99, before=50, during=during, at_end=at_end)
    before = len(event_files(tmp_path))
    loaded = load_events(tmp_path, server.watch)
    assert [event.stamp.line for event in loaded.events] == list(range(1, server.events + 1))
    assert (loaded.missing, loaded.problems) == ({}, ())
    assert (len(event_files(tmp_path)) > before + 2) == bool(during)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_file_that_is_deleted_meantime_is_a_problem(tmp_path: Path, is_deleted: bool) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_lines(tmp_path / name, a_line(name=name))

    def watch(lines: Iterable[Event | Problem], file: Path) -> Iterable[Event | Problem]:
        if is_deleted:
            (tmp_path / "b.jsonl").unlink(missing_ok=True)
        return lines

    loaded = load_events(tmp_path, watch)
    assert len(loaded.events) == 3 - is_deleted
    gone = Problem(tmp_path / "b.jsonl", WHOLE_FILE, "deleted before it was read")
    assert loaded.problems == (gone,) * is_deleted


@pytest.mark.parametrize("during", [100, 0])
def test_what_a_server_deletes_meantime_is_counted(tmp_path: Path, during: int) -> None:
    server = RotatingServer(tmp_path, files=5, before=50, during=during, at_end=False)
    loaded = load_events(tmp_path, server.watch)
    assert loaded.events[-1].stamp.line == server.events == 50 + during
    assert sum(loaded.missing.values()) == server.events - len(loaded.events)


def test_lines_without_a_number_are_all_kept(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "e.jsonl", a_line(), a_line(), a_line(run="a"), a_line(run="a"))
    assert len(load_events(path).events) == 4


def test_ranks_are_merged_by_time_and_holes_are_counted(tmp_path: Path) -> None:
    one = [a_line(time=t, rank=0, run="a", line=n) for n, t in ((1, 1.0), (2, 3.0), (5, 5.0))]
    two = [a_line(time=t, rank=1, run="b", line=n) for n, t in ((1, 2.0), (2, 4.0))]
    write_lines(tmp_path / "0.jsonl", *one)
    write_lines(tmp_path / "1.jsonl", *two)
    loaded = load_events(tmp_path)
    assert [event.stamp.rank for event in loaded.events] == [0, 1, 0, 1, 0]
    assert loaded.missing == {"a": 2}
    assert isinstance(loaded, LoadedEvents)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
