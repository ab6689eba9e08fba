"""`kv-canary report`: what event files tell, for a terminal and as a page, whatever is in the files."""

from __future__ import annotations

import html
import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.analysis.families import FAMILIES, UNKNOWN, family_of
from sglang_kv_canary.analysis.overview import Overview
from sglang_kv_canary.analysis.text import as_text
from sglang_kv_canary.cli.report import main
from sglang_kv_canary.record import Reason
from sglang_kv_canary.reports import event_sink
from sglang_kv_canary.reports.event_loader import CauseTold, load_events
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary_rigs.event_folder import (
    POSITION,
    SLOT,
    active,
    statistics,
    write_events,
    write_folder,
)
from sglang_kv_canary_rigs.largest_file import largest_file
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=40, suite="stage-a-test-cpu")

HOSTILE = '<script>alert("1")</script>\x1b[31m\u202e$x$'
VOID = {"meta", "link", "br", "use", "path", "image", "img", "hr"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "events")


def _text(path: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(["--text", str(path), *argv]) == 0
    return capsys.readouterr().out


def _page(path: Path, out: Path, draws: bool = False) -> str:
    """The page. Without `draws` its plots are empty: they take most of its time."""
    from sglang_kv_canary.analysis import plots  # imports matplotlib

    def empty(name: str, title: str, about: str, *_: Any) -> plots.Plot:
        return plots.Plot(name, title, about.strip(), dict.fromkeys(plots.WIDTHS, "<svg></svg>"))

    with patch.object(plots, "_plot", plots._plot if draws else empty):
        assert main([str(path), "-o", str(out)]) == 0
    page = out.read_text()
    checked = _Checked()
    checked.feed(page)
    checked.close()
    assert checked.open == []
    assert checked.links <= checked.ids
    return page


class _Checked(HTMLParser):
    """Tags are closed in order, ids are unique, and nothing runs or comes from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "object", "embed", "form")
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                assert value not in self.ids
                self.ids.add(value or "")
            elif name in ("href", "xlink:href", "src"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,"))
                if value.startswith("#"):
                    self.links.add(value[1:])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


# What it says


def test_the_text_tells_what_happened(folder: Path, capsys) -> None:
    shown = _text(folder, capsys)
    assert "2 causes" in shown.splitlines()[0]
    assert "in 2 of 2 processes" in shown.splitlines()[0]
    assert re.search(r"^tp1 +gpu7 pid 101 +FULL\[K\+V\], content all +log ", shown, re.MULTILINE)
    assert "NEVER_WRITTEN on tp0 #1, tp1 #1" in shown
    assert f"at position {POSITION} reads slot {SLOT}" in shown
    assert "guess: wrong entries in the request's row (likely)" in shown
    assert "docs/alarms.md#never_written" in shown
    assert re.search(r"^tp0 +0 to 150 +98\.7 % +3150 +41\.5 +3$", shown, re.MULTILINE)
    assert "What is wrong" not in shown


def test_the_page_tells_the_same(folder: Path, tmp_path: Path) -> None:
    page = _page(folder, tmp_path / "page.html", draws=True)
    assert "2 causes" in page
    assert "NEVER_WRITTEN on tp0 #1, tp1 #1" in page
    assert f"at position {POSITION} reads slot {SLOT}" in page
    assert "kv-canary violation #1: NEVER_WRITTEN at HEAD_K_FULL" in page  # a finding in detail
    assert f'<td class="n">{SLOT}</td><td>tp0, tp1</td>' in page  # the map's table
    assert page.count("<svg") == 6  # timeline, pool and cost, wide and narrow
    assert "98.7 %" in page
    assert "one by one. All fields of these are in the files" in page
    assert "default-src 'none'" in page
    assert "may be incomplete" not in page


def test_marks_of_the_plots_lead_to_their_causes(folder: Path, tmp_path: Path) -> None:
    page = _page(folder, tmp_path / "page.html", draws=True)
    for number in (1, 2):
        assert page.count(f'href="#cause-{number}"') >= 4  # in two plots, wide and narrow


def test_without_violations_it_says_so(tmp_path: Path, capsys) -> None:
    file = write_events(tmp_path / "events.jsonl", [active(0)])
    assert _text(file, capsys).startswith("no violation in 1 process\n")
    page = _page(file, tmp_path / "page.html", draws=True)
    assert "no violation in 1 process" in page
    assert "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS" in page


def test_a_cause_that_no_event_tells_is_shown_from_its_findings(folder: Path, capsys) -> None:
    """The server was killed first."""
    for file in folder.iterdir():
        lines = [x for x in file.read_text().splitlines() if json.loads(x)["event"] != "cause"]
        file.write_text("\n".join(lines) + "\n")
    shown = _text(folder, capsys)
    assert "NEVER_WRITTEN on tp0 #1, tp1 #1" in shown
    assert re.search(r"forwards \d+ to \d+; \d+ findings", shown)


def test_processes_of_the_same_rank_have_names_of_their_own(tmp_path: Path) -> None:
    """A restarted server, another host, and a copy that no event tells apart."""
    events = [
        active(0, run="a"),
        active(0, run="b", pid=7),
        active(0, run="c", host="gpu8", pid=7),
    ]
    write_events(tmp_path / "events.jsonl", [*events, active(0, run="d", host="gpu8", pid=7)])
    labels = [process.label for process in Overview.of({"": load_events(tmp_path)}).processes]
    assert len(set(labels)) == 4
    assert "tp0 gpu7 pid 100" in labels
    assert "tp0 gpu7 pid 7" in labels
    assert "tp0 gpu8 pid 7" in labels


def _health(*problems: str) -> dict[str, Any]:
    fields = {"tags": [], "step": None, "forwards": None}
    return {"event": "health", "healthy": not problems, "problems": list(problems), **fields}


def _checking(checking: bool) -> dict[str, Any]:
    return {"event": "checking", "checking": checking, "reason": "flush"}


@pytest.mark.parametrize("back", [0.0, 3600.0])
def test_the_last_event_is_the_last_that_was_written(
    back: float, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Also if the clock has been set back before it."""
    sink = EventSink(str(tmp_path / "events.jsonl"), 0).for_runner("target")
    stops = [_health("did not run: TAIL_K_FULL"), _checking(False)]
    for times, events in ((100.0, [_health(), _checking(True)]), (200.0 - back, stops)):
        monkeypatch.setattr(event_sink.time, "time", itertools.count(1.79e9 + times).__next__)
        for event in events:
            sink.emit(event)
    shown = _text(tmp_path, capsys)
    assert re.search(r"^tp0 .* stopped checking$", shown, re.MULTILINE)
    assert "tp0 is unhealthy: did not run: TAIL_K_FULL" in shown


@pytest.mark.parametrize("servers", [1, 2])
def test_equal_faults_of_two_servers_are_two_causes(servers: int, tmp_path: Path, capsys) -> None:
    """Replicas, or a server before and after a restart, that write to one folder."""
    for server in range(servers):
        rig = ManagerRig(events_dir=str(tmp_path))
        rig.extend(1, range(20))
        rig.pool.k_buffer[1][rig.slot(1, 5)] += 1 + server
        rig.decode([1])
        rig.settle()
        rig.manager.finish(1.0)
    shown = _text(tmp_path, capsys)
    assert shown.startswith("2 causes, " if servers == 2 else "1 cause, ")
    assert len(re.findall(r"^  CONTENT on tp0[^,]*$", shown, re.MULTILINE)) == servers


def test_the_cost_of_each_runner_is_told(tmp_path: Path, capsys) -> None:
    runners = {"target": 100.0, "draft": 80.0}
    events = [active(0, runner=runner) for runner in runners]
    for step in (0, 50, 100):
        for runner, us in runners.items():
            events += [{**statistics(step), "runner": runner, "host_us_per_step": us}]
    path = write_events(tmp_path / "events.jsonl", events)
    shown = _text(path, capsys)
    for place, us in (("tp0 {6}", "100.0"), ("tp0 draft", "80.0")):
        row = rf"^{place} +0 to 150 +98\.7 % +3150 +{us} +3$"
        assert re.search(row, shown, re.MULTILINE)
    page = _page(path, tmp_path / "page.html", draws=True)
    assert re.search(r"<text[^>]*>tp0 draft", page)


@pytest.mark.parametrize("sick", ["target", "draft", None])
@pytest.mark.parametrize("kind", ["health", "checking"])
def test_one_runner_does_not_hide_the_state_of_the_other(
    kind: str, sick: str | None, tmp_path: Path, capsys
) -> None:
    sink = EventSink(str(tmp_path / "events.jsonl"), 0)
    for runner in ("target", "draft"):
        is_well = runner != sick
        sink.for_runner(runner).emit(_health(*[] if is_well else ["did not run: TAIL_K_FULL"]))
        if kind == "checking":
            sink.for_runner(runner).emit(_health())
            sink.for_runner(runner).emit(_checking(is_well))
    shown = _text(tmp_path, capsys)
    place = "tp0 draft" if sick == "draft" else "tp0"
    state, why = {
        "health": ("unhealthy", f"{place} is unhealthy: did not run: TAIL_K_FULL"),
        "checking": ("stopped checking", f"{place} stopped checking after an internal error"),
    }[kind]
    state = "healthy" if sick is None else state
    assert re.search(rf"^tp0 .* {state}$", shown, re.MULTILINE)
    assert (f"  {why}\n" in shown) == (sick is not None)


def test_a_server_into_which_faults_are_injected_is_called_one(tmp_path: Path, capsys) -> None:
    file = write_events(tmp_path / "events.jsonl", [active(0, fault_injection="/tmp/faults")])
    assert "log, fault injection is ON" in _text(file, capsys)
    write_events(file, [active(0)])
    assert "fault injection" not in _text(file, capsys)


def test_the_history_of_the_slot_is_told(folder: Path, tmp_path: Path, capsys) -> None:
    moment = {
        "what": "free",
        "step": 3,
        "slots": 2,
        "purpose": "eviction",
        "functions": ["evict", "alloc_for_extend"],
        "request_id": "ada",
    }
    for file in folder.iterdir():
        events = [json.loads(line) for line in file.read_text().splitlines()]
        for event in events:
            if event["event"] == "cause":
                event["history"] = [moment, {**moment, "step": 4}]
        write_events(file, events)
    shown = " ".join(_text(folder, capsys).split())
    assert "history: after step 3: " in shown
    assert 'eviction of request "ada" (evict < alloc_for_extend)' in shown
    page = _page(folder, tmp_path / "page.html")
    assert "<dt>history</dt><dd>after step 3: " in page
    assert "<dt></dt><dd>after step 4: " in page


def test_the_surroundings_of_the_slot_are_told(folder: Path, tmp_path: Path, capsys) -> None:
    """As in the report of the log."""
    lines = [
        line
        for cause in load_events(folder).of(CauseTold)
        for line in (cause.story.scene.lines() if cause.story.scene else ())
    ]
    assert {name for name, _ in lines} >= {"row", "elsewhere"}
    shown = " ".join(_text(folder, capsys).split())
    page = html.unescape(_page(folder, tmp_path / "page.html"))
    for name, text in lines:
        assert f"{name}: {text}" in shown
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page


def test_what_was_done_is_told(folder: Path, tmp_path: Path, capsys) -> None:
    assert "What was done" not in _text(folder, capsys)
    (file, *_) = sorted(folder.iterdir())
    events = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("time", "rank", "pp_rank", "dp_rank", "run", "schema", "runner")
    stamp = {name: events[0][name] for name in names}
    done = {
        "event": "containment",
        "aborted": ["gus", HOSTILE],
        "answered": ["ada"],
        "dropped": 412,
        "withheld": [{"pool": "SWA", "slot": 61}],
    }
    write_events(file, [*events, {**stamp, **done}])
    shown = _text(folder, capsys)
    (row,) = [line for line in shown.splitlines() if '"gus"' in line and "412" in line]
    assert '"ada"' in row
    assert row.endswith("SWA slot 61")
    assert '<h2 id="contained">' in _page(folder, tmp_path / "page.html")


# The requests that read damage

TITLE = "Requests that read damage"
NAMES_NOT_ALL = "do not name all readers"


def _templates(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A `violation` event and a `cause` event of rank 0, as a server writes them."""
    events = [json.loads(x) for x in (folder / "events.tp0.jsonl").read_text().splitlines()]
    return tuple(  # type: ignore[return-value]
        next(e for e in events if e["event"] == kind) for kind in ("violation", "cause")
    )


def _finding(violation: dict[str, Any], cause: int, **reader: Any) -> dict[str, Any]:
    """One of a cause of its own, by a reader with these fields."""
    slot = 1 + cause % 500
    read = {**violation["reader"], **reader}
    return {**violation, "cause": cause, "slot": slot, "reader": read}


def _listed(shown: str) -> list[list[str]]:
    """The cells of the rows of the text's section, oldest first, without header and notes."""
    (section,) = re.findall(rf"^{TITLE}\n(.*?)(?:\n\n|\Z)", shown, re.DOTALL | re.MULTILINE)
    cells = [re.split(r" {2,}", line) for line in section.splitlines()]
    return [line for line in cells if len(line) == 7][2:]


def _section(page: str) -> str:
    """The page's section, as a reader sees it."""
    _, _, rest = page.partition('<h2 id="readers">')
    return html.unescape(rest.partition("<h2 ")[0])


def test_each_request_that_read_damage_is_listed_once(folder: Path, tmp_path: Path, capsys) -> None:
    """More than the text shows causes, and more than one table of the page has rows."""
    violation, _ = _templates(folder)
    names = [f"victim-{i:04}" for i in range(2500)]
    found = [_finding(violation, 1 + i % 30, request_id=name) for i, name in enumerate(names)]
    path = write_events(tmp_path / "many.jsonl", [active(0), *found])
    shown = _text(path, capsys)
    assert "30 causes" in shown
    assert f"{len(names)} requests read damage" in shown.splitlines()[0]
    assert [row[-1] for row in _listed(shown)] == [f'"{name}"' for name in names]
    section = _section(_page(path, tmp_path / "page.html"))
    assert [section.count(f'"{name}"') for name in names] == [1] * len(names)
    assert section.count("<details>") == 3  # none is open
    assert NAMES_NOT_ALL not in shown


def test_a_request_is_listed_with_what_finds_it(folder: Path, tmp_path: Path, capsys) -> None:
    violation, _ = _templates(folder)
    late = _finding(violation, 2, request_id="ada", step=40)
    early = _finding(violation, 1, request_id="ada", step=12)
    other = {**_finding(violation, 1, request_id="ada", step=12), "rank": 1, "run": "run1"}
    events = [{**late, "time": 100.0}, {**early, "time": 50.0}, {**other, "time": 51.0}]
    events += [{**_finding(violation, 3, request_id="bob", step=None), "time": 60.0}]
    events += [{**_finding(violation, 4, request_id="cleo"), "time": 60.0, "runner": "draft"}]
    path = write_events(tmp_path / "few.jsonl", events)
    ada, bob, cleo = _listed(_text(path, capsys))
    first, last = "1970-01-01 00:00:50", "1970-01-01 00:01:40"
    assert ada == [first, last, "12 to 40", "2", "-", "tp0, tp1", '"ada"']
    assert bob[2:] == ["-", "1", "-", "tp0", '"bob"']
    assert cleo[2] == str(violation["reader"]["step"])
    assert cleo[-2:] == ["tp0 draft", '"cleo"']
    page = _section(_page(path, tmp_path / "page.html"))
    assert re.search(r'<td>tp0, tp1</td><td class="text">"ada"</td>', page)
    assert "<details open>" in page


def test_a_reader_without_a_finding_of_its_own_is_listed(
    folder: Path, tmp_path: Path, capsys
) -> None:
    """At most 64 findings of a cause are written. Events about the cause name further readers."""
    _, cause = _templates(folder)
    readers = [{**cause["readers"][0], "row": 1 + i, "request_id": f"r{i:02}"} for i in range(60)]
    told = [{**cause, "readers": readers[:n], "time": 10.0 * n} for n in (1, 2, 60)]
    path = write_events(tmp_path / "told.jsonl", told)
    shown = _text(path, capsys)
    assert [row[-1] for row in _listed(shown)] == [f'"r{i:02}"' for i in range(60)]
    times = [row[:2] for row in _listed(shown)]
    assert times[0] == ["1970-01-01 00:00:10"] * 2  # of the first event that names it
    assert times[1] == ["1970-01-01 00:00:20"] * 2
    joined = " ".join(shown.split())
    assert f'"r06", "r07" and 52 more; see "{TITLE}"' in joined
    assert f'"r07" and 52 more; see "{TITLE}"' in html.unescape(_page(path, tmp_path / "page.html"))


def test_a_request_without_a_row_is_listed(folder: Path, tmp_path: Path, capsys) -> None:
    """It takes a damaged state from the prefix cache, before it has a row. The sweep has neither row nor id."""
    violation, _ = _templates(folder)
    hit = {"row": 0, "mode": "prefix hit", "request_id": "ada"}
    state = {"tag": "STATE_K_FULL", "tier": "state", "cause": 1}
    path = write_events(tmp_path / "state.jsonl", [{**_finding(violation, 1, **hit), **state}])
    shown = _text(path, capsys)
    assert [row[-1] for row in _listed(shown)] == ['"ada"']
    assert 'read by "ada"' in shown
    page = html.unescape(_page(path, tmp_path / "page.html"))
    assert "no request (row 0)" not in page

    swept = _finding(violation, 1, row=0, mode="DECODE", request_id=None)
    write_events(path, [{**swept, "tag": "SWEEP_K_FULL"}])
    shown = _text(path, capsys)
    assert _listed(shown) == []
    assert "; 0 requests read damage" in shown.splitlines()[0]
    assert f"{TITLE}\nNone on record" in shown


@pytest.mark.parametrize("why", ["listed", "state", "id", "clean"])
def test_readers_that_no_event_names_are_not_passed_over(
    why: str, folder: Path, tmp_path: Path, capsys
) -> None:
    violation, cause = _templates(folder)
    finding, told = _finding(violation, 1, request_id="ada"), {**cause, "cause": 1}
    if why == "listed":  # 64 of them are remembered
        told = {**told, "more_readers": True}
    elif why == "state":  # such causes remember none
        finding |= {"tag": "STATE_K_FULL", "tier": "state"}
        told = {**told, "tags": ["STATE_K_FULL"], "tier": "state", "readers": [], "findings": 65}
    elif why == "id":
        told = {**told, "readers": [{**told["readers"][0], "row": 3, "request_id": None}]}
    path = write_events(tmp_path / "some.jsonl", [active(0), finding, told])
    shown = _text(path, capsys)
    page = _section(_page(path, tmp_path / "page.html"))
    for text in (shown, page):
        assert ("tp0: the files do not name all readers of 1 cause." in text) == (why != "clean")
    assert ("; at least " in shown.splitlines()[0]) == (why != "clean")
    others = "and others that the files do not name" in " ".join(shown.split())
    assert others == (why != "clean")


def _lost(violation: dict[str, Any], **fields: Any) -> dict[str, Any]:
    stamp = {k: violation[k] for k in ("time", "schema", "rank", "pp_rank", "dp_rank", "run")}
    forward = violation["reader"]["forward"]
    lost = {"why": "overwritten", "findings": 3, "since": stamp["time"] - 5.0}
    forwards = {"first_forward": forward, "last_forward": forward + 1}
    return {**stamp, "runner": "target", "event": "findings_lost", **lost, **forwards, **fields}


@pytest.mark.parametrize("why", ["overwritten", "dropped", "clean"])
def test_readers_of_lost_findings_are_not_passed_over(
    why: str, folder: Path, tmp_path: Path, capsys
) -> None:
    violation, cause = _templates(folder)
    finding, told = _finding(violation, 1, request_id="ada"), {**cause, "cause": 1}
    lost = [] if why == "clean" else [_lost(violation, why=why)]
    path = write_events(tmp_path / "lost.jsonl", [active(0), finding, told, *lost])
    first = violation["reader"]["forward"]
    shown = _text(path, capsys)
    page = _section(_page(path, tmp_path / "page.html"))
    for text in (shown, page):
        assert (f"tp0: 3 findings of forwards {first} to {first + 1} (" in text) == bool(lost)
    assert ("; at least " in shown.splitlines()[0]) == bool(lost)
    others = "and possibly others: findings were lost" in " ".join(shown.split())
    assert others == bool(lost)


def test_losses_that_follow_each_other_are_one_line(folder: Path, tmp_path: Path, capsys) -> None:
    violation, _ = _templates(folder)
    at = {n: {"time": 1000.0 + n, "since": 1000.0 + n} for n in (0, 10, 20, 3600)}
    lost = [_lost(violation, first_forward=n, last_forward=n, **at[n]) for n in at]
    draft = _lost(violation, first_forward=7, last_forward=7, runner="draft")
    path = write_events(tmp_path / "lost.jsonl", [*lost, draft])
    shown = _text(path, capsys)
    assert shown.splitlines()[0] == "no violation in 1 process; findings were lost"
    lines = [line.partition(" (")[0] for line in shown.splitlines() if "did not come into" in line]
    forwards = ["9 findings of forwards 0 to 20", "3 findings of forward 3600"]
    assert lines == [f"tp0: {each}" for each in forwards] + ["tp0 draft: 3 findings of forward 7"]
    assert "None on record" not in shown


def test_what_was_lost_before_a_cause_was_there_is_not_about_it(
    folder: Path, tmp_path: Path, capsys
) -> None:
    violation, _ = _templates(folder)
    finding = _finding(violation, 1, request_id="ada")
    early = _lost(violation, first_forward=0, last_forward=violation["reader"]["forward"] - 1)
    path = write_events(tmp_path / "lost.jsonl", [finding, early])
    shown = _text(path, capsys)
    assert "and possibly others" not in " ".join(shown.split())
    assert "; at least 1 request read damage" in shown.splitlines()[0]


def test_requests_without_ids_are_not_counted_as_none(folder: Path, tmp_path: Path, capsys) -> None:
    violation, _ = _templates(folder)
    path = write_events(tmp_path / "no_id.jsonl", [_finding(violation, 1, request_id=None)])
    shown = _text(path, capsys)
    assert shown.splitlines()[0].endswith("; requests without a known id read damage")
    assert NAMES_NOT_ALL in shown
    assert "None on record" not in shown


def test_lost_events_make_the_list_doubtful(folder: Path, capsys) -> None:
    warning = "Events are missing or could not be read"
    assert warning not in _text(folder, capsys)
    first, _ = sorted(folder.iterdir())
    first.write_text(first.read_text() + "{half a line")
    assert warning in _text(folder, capsys)


def test_requests_that_were_ended_are_listed_with_what_was_done(
    folder: Path, tmp_path: Path, capsys
) -> None:
    violation, _ = _templates(folder)
    finding = _finding(violation, 1, request_id="late")
    stamp = {k: v for k, v in active(0).items() if k in ("schema", "rank", "pp_rank", "dp_rank")}
    done = {
        **stamp,
        "run": "run0",
        "runner": "target",
        "time": violation["time"],
        "event": "containment",
        "aborted": [f"ended-{i:02}" for i in range(20)],
        "answered": ["late"],
        "dropped": 412,
        "withheld": [],
    }
    path = write_events(tmp_path / "done.jsonl", [finding, done])
    shown = _text(path, capsys)
    rows = {row[-1]: row[3:5] for row in _listed(shown)}
    assert rows.pop('"late"') == ["1", "already answered"]
    assert rows == {f'"ended-{i:02}"': ["-", "ended"] for i in range(20)}
    assert '"ended-07" and 12 more' in shown


def test_an_id_is_listed_whole_and_never_raw(folder: Path, tmp_path: Path, capsys) -> None:
    violation, _ = _templates(folder)
    names = [HOSTILE + "x" * 900 + str(i) for i in range(2)]
    found = [_finding(violation, 1, request_id=name) for name in names]
    path = write_events(tmp_path / "hostile.jsonl", found)
    shown = _text(path, capsys)
    page = _page(path, tmp_path / "page.html")
    for text in (shown, _section(page)):
        assert [f'{"x" * 900}{i}"' in text for i in range(2)] == [True, True]
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "<script" not in page


def test_servers_are_shown_beside_each_other(folder: Path, tmp_path: Path, capsys) -> None:
    """The two sides of a disaggregated server. Equal slots of the two are not the same slots."""
    peer = folder.rename(tmp_path / "prefill")
    (decode,) = write_folder(tmp_path / "decode", ranks=1).iterdir()
    events = [json.loads(line) for line in decode.read_text().splitlines()]
    write_events(decode, [{**event, "run": "another process"} for event in events])
    assert main(["--text", str(peer), str(tmp_path / "decode")]) == 0
    shown = capsys.readouterr().out
    assert "4 causes" in shown.splitlines()[0]
    assert "NEVER_WRITTEN on prefill tp0 #1, prefill tp1 #1" in shown
    assert "NEVER_WRITTEN on decode tp0 #1" in shown
    assert re.search(r"^reasons +decode tp0 +prefill tp0 +prefill tp1$", shown, re.MULTILINE)


def test_replicas_have_causes_of_their_own(folder: Path, capsys) -> None:
    for rank, file in enumerate(sorted(folder.iterdir())):
        events = [{**json.loads(x), "dp_rank": rank} for x in file.read_text().splitlines()]
        write_events(file, [{**event, "rank": 0} for event in events])
    shown = _text(folder, capsys)
    assert "NEVER_WRITTEN on dp0.tp0 #1\n" in shown
    assert "NEVER_WRITTEN on dp1.tp0 #1\n" in shown


def test_every_reason_has_a_family() -> None:
    assert [sum(r in f.reasons for f in FAMILIES) for r in Reason] == [1] * len(Reason)
    assert family_of(["A_REASON_OF_LATER"]) is UNKNOWN


# What may be in the files


def _hostile(folder: Path) -> None:
    """Text from strangers wherever the schema has any, and in the names of processes."""

    def soil(value: Any) -> Any:
        if isinstance(value, dict):
            if "rank" in value:
                value = {**value, "rank": 0}
            host = {"host": f"{HOSTILE}{value['pid']}"} if "pid" in value else {}
            return {
                k: HOSTILE
                if k in ("request_id", "model", "sentence", "reason", "mode", "state")
                and not (k == "mode" and value.get("event") == "active")
                else soil(v)
                for k, v in {**value, **host}.items()
            }
        return [soil(v) for v in value] if isinstance(value, list) else value

    for file in folder.iterdir():
        lines = [json.dumps(soil(json.loads(line))) for line in file.read_text().splitlines()]
        file.write_text("\n".join(lines) + "\n")


def test_text_from_strangers_is_neither_run_nor_printed_raw(
    folder: Path, tmp_path: Path, capsys
) -> None:
    _hostile(folder)
    page = _page(folder, tmp_path / "page.html", draws=True)
    shown = _text(folder, capsys)
    assert "&lt;script&gt;alert(" in page
    assert re.search(r"<text[^>]*>tp0 &lt;", page)  # a label of a plot
    for text in (page, shown):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b" in text
    assert "<script" not in page


def test_damaged_and_truncated_files_are_read_as_far_as_they_go(
    folder: Path, tmp_path: Path, capsys
) -> None:
    first, second = sorted(folder.iterdir())
    first.write_bytes(first.read_bytes()[:-20])  # killed in the middle of a line
    second.write_text("\x00\x1b{garbage\n" + second.read_text() + '["no object"]\n')
    shown = _text(folder, capsys)
    assert "2 causes" in shown
    assert "3 lines could not be read" in shown
    assert "events.tp1.jsonl:1: not JSON" in shown
    page = _page(folder, tmp_path / "page.html", draws=True)
    assert "This report may be incomplete" in page
    assert "3 lines could not be read" in page


def test_events_that_are_in_no_file_are_counted(folder: Path, capsys) -> None:
    first, _ = sorted(folder.iterdir())
    lines = first.read_text().splitlines(keepends=True)
    first.write_text("".join(lines[:2] + lines[3:]))
    shown = _text(folder, capsys)
    assert "1 event of tp0 are in no file: lost, deleted with an old one, or moved while" in shown


WARNING = "This report may be incomplete"


@pytest.mark.parametrize("hole", ["missing", "unreadable", "skipped", "none"])
def test_files_with_holes_give_no_exact_number_of_victims(hole: str, folder: Path, capsys) -> None:
    assert re.search(r"; [1-9]\d* requests? read damage", _text(folder, capsys).splitlines()[0])
    first, _ = sorted(folder.iterdir())
    lines = first.read_text().splitlines(keepends=True)
    if hole == "missing":
        first.write_text("".join(lines[:2] + lines[3:]))
    elif hole == "unreadable":
        first.write_text("".join(lines) + "{half a line")
    elif hole == "skipped":
        (folder / "events.tp1.jsonl.zst").touch()
    head, second, *_ = _text(folder, capsys).splitlines()
    assert ("; at least " in head) == (hole != "none")
    assert second.startswith(WARNING) == (hole != "none")


def test_without_violations_holes_are_told_in_the_first_line(tmp_path: Path, capsys) -> None:
    file = write_events(tmp_path / "events.jsonl", [active(0)])
    file.write_text(file.read_text() + "{half a line")
    head, second, *_ = _text(file, capsys).splitlines()
    assert head == "no violation in 1 process; not all events were read"
    assert second.startswith(WARNING)


@pytest.mark.parametrize("what", ["log", "empty", "binary", "newer schema"])
def test_without_events_there_is_no_all_clear(what: str, tmp_path: Path, capsys) -> None:
    content = {
        "log": b"[2026-11-29 01:25:27] INFO: server is ready\n",
        "empty": b"",
        "binary": bytes(range(256)) * 9,
        "newer schema": json.dumps({**active(0), "schema": 3}).encode() + b"\n",
    }
    (path := tmp_path / "server.log").write_bytes(content[what])
    assert main(["--text", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "no events read"
    assert captured.out.splitlines()[1].startswith(WARNING)
    assert "no events read" in captured.err
    assert main([str(path), "-o", str(tmp_path / "page.html")]) == 1
    page = (tmp_path / "page.html").read_text()
    assert '<p class="verdict bad">no events read</p>' in page
    assert "no violation" not in page


def test_a_server_without_events_is_named(folder: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "decode.jsonl").touch()
    assert main(["--text", str(folder), str(tmp_path / "decode.jsonl")]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].startswith(WARNING)
    assert "no event of decode.jsonl was read" in captured.out
    assert "no events read of decode.jsonl" in captured.err


@pytest.mark.parametrize("part_first", [False, True])
def test_lines_that_are_in_two_of_the_paths_count_once(
    part_first: bool, folder: Path, tmp_path: Path, capsys
) -> None:
    """A part of a folder's files beside the folder, in both orders. No event of the part's run is missing."""
    file = folder / "events.tp0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    (folder / "events.tp0.jsonl.1").write_text("".join(lines[:4]))
    file.write_text("".join(lines[4:]))
    alone = _text(folder, capsys)
    paths = [str(folder), str(folder / "events.tp0.jsonl")]
    assert main(["--text", *(reversed(paths) if part_first else paths)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[:2] == alone.splitlines()[:2]
    assert "in no file" not in shown


@pytest.mark.parametrize("field", ["reasons", "tag", "pool"])
def test_names_of_later_versions_break_nothing_and_are_not_printed_raw(
    field: str, folder: Path, tmp_path: Path, capsys
) -> None:
    later = f"LATER_{HOSTILE}"
    for file in folder.iterdir():
        events = [json.loads(line) for line in file.read_text().splitlines()]
        for event in events:
            if field in event:
                event[field] = [later] if field == "reasons" else later
        lines = [json.dumps(e) for e in events if field != "tag" or e["event"] != "cause"]
        file.write_text("\n".join(lines) + "\n")
    shown = _text(folder, capsys)
    page = _page(folder, tmp_path / "page.html", draws=True)
    for text in (shown, page):
        assert "\x1b" not in text
        assert "\u202e" not in text
    assert "LATER_" in page
    assert "<script" not in page
    assert ("a launch tag that this version does not know" in page) == (field == "tag")


def test_a_pool_of_a_later_version_is_shown(folder: Path, tmp_path: Path, capsys) -> None:
    violation, cause = _templates(folder)
    found = [{**violation, "tag": "HEAD_K_C9"}, {**cause, "pool": "C9", "tags": ["HEAD_K_C9"]}]
    path = write_events(tmp_path / "later.jsonl", [active(0), *found])
    shown = _text(path, capsys)
    assert "HEAD, K of C9" in shown
    assert "could not be read" not in shown
    assert "Pool C9" in _page(path, tmp_path / "page.html")


def test_a_hundred_thousand_findings(tmp_path: Path, capsys) -> None:
    """10,000 causes on each of two ranks, or fewer, five findings each; then what is left out is said."""
    causes = volume(2_000, 10_000)
    folder = write_folder(tmp_path / "events", ranks=1)
    found = [json.loads(x) for x in (folder / "events.tp0.jsonl").read_text().splitlines()]
    violation = next(event for event in found if event["event"] == "violation")
    for rank in range(2):
        with (folder / f"events.tp{rank}.jsonl").open("w") as file:
            for cause in range(1, causes + 1):
                for i in range(5):
                    event = {
                        **violation,
                        "rank": rank,
                        "run": str(rank),
                        "line": 5 * cause + i - 4,
                        "cause": cause,
                        "slot": 37 * cause % 9973,
                    }
                    file.write(json.dumps(event) + "\n")
    page = _page(folder, tmp_path / "page.html", draws=True)
    assert (tmp_path / "page.html").stat().st_size < 3 << 20
    assert f"{10 * causes} findings" in page
    assert f"1000 of {causes - 200} further causes" in page
    assert f"the first 1000 of {min(causes, 9973)}" in page


def test_a_long_id_gives_no_long_rule(folder: Path, tmp_path: Path, capsys) -> None:
    violation, _ = _templates(folder)
    found = [_finding(violation, 1, request_id="x" * 1024)]
    shown = _text(write_events(tmp_path / "long.jsonl", found), capsys)
    assert f'"{"x" * 1024}"' in shown
    rules = [line for line in shown.splitlines() if line.strip("- ") == "" and line]
    assert max(len(rule) for rule in rules) < 200


# The command


def test_text_goes_to_the_output(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.txt"
    shown = _text(folder, capsys, "-o", str(out))
    assert shown.startswith(f"{out} (")
    assert out.read_text().startswith("2 causes")
    assert "docs/alarms.md#never_written" in out.read_text()


@pytest.mark.parametrize("text", [["--text"], []], ids=["text", "page"])
@pytest.mark.parametrize("what", ["itself", "link", "hard link", "other", "snapshot"])
def test_evidence_is_not_overwritten(
    what: str, text: list[str], folder: Path, tmp_path: Path, capsys
) -> None:
    file, other = sorted(folder.iterdir())
    (snapshot := folder / "snapshot.tp0.run0.1.json").write_text("{}")
    (link := tmp_path / "link.html").symlink_to(file)
    (hard := tmp_path / "hard.html").hardlink_to(file)
    out = {"itself": file, "link": link, "hard link": hard, "other": other, "snapshot": snapshot}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in (file, folder):
        with pytest.raises(SystemExit) as ended:
            main([str(path), "-o", str(out[what]), *text])
        assert ended.value.code == 2
        assert "is not overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("text", [["--text"], []], ids=["text", "page"])
def test_a_report_is_written_whole_or_not_at_all(
    text: list[str], folder: Path, tmp_path: Path, capsys
) -> None:
    """Writing fails after 100 bytes, as on a full disk."""
    (out := tmp_path / "out").write_text("the former report")
    with pytest.raises(SystemExit) as ended, largest_file(100):
        main([str(folder), "-o", str(out), *text])
    assert ended.value.code == 2
    assert "cannot write" in capsys.readouterr().err
    assert out.read_text() == "the former report"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "out"]


def test_the_output_keeps_its_permissions_and_a_link_stays_one(
    folder: Path, tmp_path: Path
) -> None:
    (former := tmp_path / "former.jsonl.html").touch(0o640)
    former.chmod(0o640)
    (link := tmp_path / "link.html").symlink_to(former)
    _page(folder, link)
    assert link.is_symlink()
    assert former.stat().st_mode & 0o777 == 0o640
    assert "2 causes" in former.read_text()


def test_what_is_not_shown_is_counted_with_the_option_that_shows_it(
    folder: Path, tmp_path: Path, capsys
) -> None:
    violation, _ = _templates(folder)
    found = [_finding(violation, 1 + i) for i in range(23)]
    path = write_events(tmp_path / "many.jsonl", [active(0), *found])
    out = tmp_path / "page.html"
    hint = "kv-canary report --causes 23 shows all"
    assert f"... and 3 more: {hint}" in _text(path, capsys)
    assert hint not in _text(path, capsys, "--causes", "23")
    for shown in (0, 20):
        assert main([str(path), "-o", str(out), "--causes", str(shown)]) == 0
        page = out.read_text()
        assert f"Not in detail here: {23 - shown} more. {hint}." in page
        assert page.count('<section class="cause"') == shown
        assert '<p class="verdict bad">' in page
    assert hint not in _page(path, out)


def test_causes_limits_what_is_shown(folder: Path, capsys) -> None:
    shown = _text(folder, capsys, "--causes", "1")
    assert "NEVER_WRITTEN on" in shown
    assert "... and 1 more: kv-canary report --causes 2 shows all" in shown
    assert "shows all" not in _text(folder, capsys, "--causes", "2")


def test_colours_only_where_they_are_wanted(folder: Path) -> None:
    overview = Overview.of({"": load_events(folder)})
    plain, painted = (
        "\n".join(as_text(overview, most_causes=9, width=120, colour=colour))
        for colour in (False, True)
    )
    assert "\x1b" not in plain
    assert "\x1b[31mNEVER_WRITTEN\x1b[0m" in painted
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["{empty}"], "no event file at"),
        (["{empty}/missing"], "no event file at"),
        (["{events}", "--causes", "-1"], "expected a number >= 0"),
        (["{events}", "-o", "{empty}/no/page.html"], "cannot write"),
    ],
)
def test_bad_input_is_named(
    argv: list[str], why: str, folder: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "empty").mkdir()
    argv = [a.format(empty=tmp_path / "empty", events=folder) for a in argv]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_missing_library_is_named_with_what_installs_it(
    folder: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as ended:
        main([str(folder)])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert 'the page needs matplotlib: pip install "sglang-kv-canary[report]"' in shown
    assert "2 causes" in _text(folder, capsys)  # text needs neither


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
