"""The folder of event files: one per rank, bounded, rotated, locked, and at most one line lost to kill -9."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import stat
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryConfig
from sglang_kv_canary.environ import SETTINGS
from sglang_kv_canary.errors import CanaryConfigError
from sglang_kv_canary.reports import event_file, rank_file
from sglang_kv_canary.reports.event_loader import Active, load_events
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.rank_file import EventFolder, rank_name
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

(SETTING,) = (setting for setting in SETTINGS if setting.key == "EVENTS_DIR")
ACTIVE = {
    "event": "active",
    "mode": "log",
    "pools": ["FULL"],
    "halves": {"FULL": ["K", "V"]},
    "content": "none",
    "slots": {"FULL": 512},
    "record_bytes": 1,
    "state_bytes": 1,
    "share_of_pool": None,
    "role": "target",
    "fault_injection": "",
    "token_oracle": None,
    "host": "h",
    "pid": 1,
    "model": "m",
    "served_model": None,
    "sglang_version": "0",
    "canary_version": None,
}


def sink_in(folder: Path, file_bytes: int = 1 << 20, files: int = 8, **ranks: int) -> EventSink:
    ranks = {"rank": 0, **ranks}
    return EventSink("", folder=EventFolder(str(folder), file_bytes, files), **ranks)


def sent(sink: EventSink, *numbers: int, padding: int = 0) -> None:
    for number in numbers:
        sink.emit({"event": "test", "number": number, "padding": "x" * padding})


def numbers_in(folder: Path) -> list[int]:
    events = sorted(load_events(folder).events, key=lambda event: event.stamp.line)
    return [event.fields["number"] for event in events if event.kind == "test"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((3, None, None), "tp3"),
        ((3, 1, None), "pp1.tp3"),
        ((3, 1, 0), "dp0.pp1.tp3"),
        ((0, None, 2), "dp2.tp0"),
    ],
)
def test_each_rank_has_a_name(ranks: tuple[int, int | None, int | None], name: str) -> None:
    assert rank_name(*ranks) == name


def test_ranks_write_to_files_of_their_own_that_only_the_owner_may_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        sent(sink_in(tmp_path), 1)
        sent(sink_in(tmp_path, rank=1, dp_rank=1), 2)
    finally:
        os.umask(before)
    assert names_in(tmp_path) == ["events.dp1.tp1.jsonl", "events.tp0.jsonl"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    assert [event.stamp.rank for event in load_events(tmp_path).events] == [0, 1]


def test_the_single_file_goes_on_beside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    sink = EventSink(str(tmp_path / "one.jsonl"), 0, folder=EventFolder(str(folder), 1 << 20, 2))
    sent(sink, 1, 2)
    assert numbers_in(tmp_path / "one.jsonl") == numbers_in(folder) == [1, 2]


def test_a_manager_reports_into_the_folder(tmp_path: Path) -> None:
    rig = ManagerRig(events_dir=str(tmp_path))
    rig.extend(1, range(20))
    rig.rows.req_to_token[1, 5] = 300
    rig.decode([1])
    assert rig.settle() != []
    kinds = [event.kind for event in load_events(tmp_path).events]
    assert kinds.count("violation") == 4
    assert "cause" in kinds
    assert names_in(tmp_path)[0] == "events.tp0.jsonl"


def test_a_clean_manager_writes_no_finding(tmp_path: Path) -> None:
    rig = ManagerRig(events_dir=str(tmp_path))
    rig.extend(1, range(20))
    rig.decode([1])
    rig.settle()
    assert load_events(tmp_path).events == ()


# Bounds and rotation


def test_files_are_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, file_bytes=2000, files=3)
    sent(sink, *range(1, 101), padding=100)
    assert names_in(tmp_path) == [
        "events.tp0.jsonl",
        *sorted(f"events.tp0.jsonl.{number}" for number in sink._rank_file._numbers()),
    ]
    assert len(names_in(tmp_path)) == 3
    assert all(path.stat().st_size <= 2000 for path in tmp_path.iterdir())
    found = numbers_in(tmp_path)
    assert found == list(range(found[0], 101)), "the newest, without a gap"
    assert len(found) > 15
    assert not sink.is_complete
    (missing,) = load_events(tmp_path).missing.values()
    assert missing == found[0] - 1


def test_nothing_is_deleted_while_there_is_room(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, file_bytes=2000, files=8)
    sent(sink, *range(1, 31), padding=100)
    assert len(names_in(tmp_path)) > 2
    assert numbers_in(tmp_path) == list(range(1, 31))
    assert sink.is_complete
    assert load_events(tmp_path).missing == {}


def test_a_line_that_is_longer_than_a_file_has_a_file_of_its_own(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, file_bytes=2000, files=4)
    sent(sink, 1, padding=5000)
    sent(sink, 2, 3)
    assert numbers_in(tmp_path) == [1, 2, 3]
    assert len(names_in(tmp_path)) == 2


def test_each_further_file_begins_with_what_is_protected(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, file_bytes=2000, files=2)
    for runner in ("target", "draft"):
        sink.for_runner(runner).emit(ACTIVE)
    sent(sink, *range(1, 101), padding=100)
    first, second, third, *_ = (tmp_path / "events.tp0.jsonl").read_text().splitlines()
    repeated = [json.loads(line) for line in (first, second)]
    assert [(e["event"], e["runner"], e["repeated"], e["line"]) for e in repeated] == [
        ("active", "target", True, 1),
        ("active", "draft", True, 2),
    ]
    assert json.loads(third)["event"] == "test"
    assert [e.stamp.runner for e in load_events(tmp_path).of(Active)] == ["target", "draft"]


def test_a_restart_goes_on_with_the_file_and_keeps_the_bound(tmp_path: Path) -> None:
    for start in range(1, 101, 10):
        sink = sink_in(tmp_path, file_bytes=2000, files=2)
        sent(sink, *range(start, start + 10), padding=100)
    assert len(names_in(tmp_path)) == 2
    assert load_events(tmp_path).events[-1].fields["number"] == 100


def test_a_folder_that_cannot_be_rotated_loses_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = sink_in(tmp_path, file_bytes=2000)

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(rank_file.os, "rename", refuse)
    sent(sink, *range(1, 31), padding=100)
    assert numbers_in(tmp_path) == list(range(1, 31))
    assert caplog.text.count("cannot rotate") == 1


def test_a_file_that_is_moved_away_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "LOOK_EVERY_S", 0.0)
    sink = sink_in(tmp_path)
    sent(sink, 1)
    (tmp_path / "events.tp0.jsonl").rename(tmp_path / "saved")
    sent(sink, 2)
    assert numbers_in(tmp_path / "saved") == [1]
    assert numbers_in(tmp_path) == [2]


def test_a_folder_that_is_moved_away_is_said_in_whole_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_file, "LOOK_EVERY_S", 0.0)
    folder = tmp_path / "events"
    folder.mkdir()
    sink = sink_in(folder)
    sent(sink, 1)
    folder.rename(tmp_path / "saved")
    sent(sink, 2)
    assert numbers_in(tmp_path / "saved") == [1, 2]
    (message,) = caplog.messages
    assert message == (
        f"kv-canary cannot reopen its event file, which was moved: '{folder}/events.tp0.jsonl' of "
        f"SGLANG_KV_CANARY_EVENTS_DIR cannot be opened: there is no folder '{folder}'. It keeps writing to the old one"
    )


# Two servers, and kill -9


def _write_forever(folder: Path, file_bytes: int, started: Event) -> None:
    sink = sink_in(folder, file_bytes, files=1000)
    for number in itertools.count(1):
        sent(sink, number, padding=number * 100 % 20_000)
        started.set()


def writer(folder: Path, file_bytes: int) -> multiprocessing.Process:
    """Another process that writes as fast as it can."""
    fork = multiprocessing.get_context("fork")
    started = fork.Event()
    process = fork.Process(target=_write_forever, args=(folder, file_bytes, started), daemon=True)
    process.start()
    assert started.wait(30)
    return process


def kill(process: multiprocessing.Process) -> None:
    process.kill()
    process.join()


def test_a_second_server_has_a_file_of_its_own(tmp_path: Path) -> None:
    first = writer(tmp_path, 1 << 30)
    try:
        sent(sink_in(tmp_path), 1)
    finally:
        kill(first)
    assert names_in(tmp_path) == ["events.tp0-2.jsonl", "events.tp0.jsonl"]
    assert numbers_in(tmp_path / "events.tp0-2.jsonl") == [1]
    sent(sink_in(tmp_path), 2)
    assert numbers_in(tmp_path / "events.tp0-2.jsonl") == [1], "the first name is free again"


def test_kill_9_loses_at_most_one_line(tmp_path: Path) -> None:
    """Lines span several pages, between which a killed write may stop, and files rotate meanwhile."""
    process = writer(tmp_path, 1 << 18)
    deadline = time.monotonic() + 60
    while len(names_in(tmp_path)) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(process)
    before = load_events(tmp_path)
    numbers = [event.fields["number"] for event in before.events]
    assert len(names_in(tmp_path)) > 3
    assert numbers == list(range(1, len(numbers) + 1)), "no hole"
    assert len(before.problems) <= 1
    sent(sink_in(tmp_path, files=1000), 7)
    after = load_events(tmp_path)
    assert len(after.events) == len(before.events) + 1
    assert after.problems == before.problems


@pytest.mark.parametrize("single", [True, False], ids=["file", "folder"])
def test_a_part_of_a_line_does_not_swallow_the_next_servers_first_event(
    tmp_path: Path, single: bool
) -> None:
    path = tmp_path / "events.tp0.jsonl"

    def server() -> EventSink:
        return EventSink(str(path), 0) if single else sink_in(tmp_path)

    sent(server(), 1, 2)
    os.truncate(path, path.stat().st_size - 5)
    sent(server(), 3)
    loaded = load_events(path)
    assert [event.fields["number"] for event in loaded.events] == [1, 3]
    assert [(problem.line, problem.what[:8]) for problem in loaded.problems] == [(2, "not JSON")]


# Settings


def test_the_folder_must_exist_and_be_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SETTING.parse(str(tmp_path)) == str(tmp_path)
    assert SETTING.parse("") == ""
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(
            CanaryConfigError, match=r"SGLANG_KV_CANARY_EVENTS_DIR.*existing folder"
        ):
            SETTING.parse(str(path))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(CanaryConfigError, match="files can be created"):
        SETTING.parse(str(tmp_path))


def test_without_the_setting_there_is_no_folder() -> None:
    assert EventFolder.of(CanaryConfig()) is None
    assert EventFolder.of(CanaryConfig(events_dir="x", events_files=3)) == EventFolder(
        "x", CanaryConfig().events_file_bytes, 3
    )


def test_what_lies_in_the_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.tp0.jsonl").mkdir()
    with pytest.raises(CanaryConfigError, match=r"SGLANG_KV_CANARY_EVENTS_DIR.*regular file"):
        sink_in(tmp_path)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
