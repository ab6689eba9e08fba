"""The event file: who may read it, what may be one, what becomes of events that do not fit, and rotation."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.environ import SETTINGS
from sglang_kv_canary.errors import CanaryConfigError
from sglang_kv_canary.reports import event_file
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.rank_file import EventFolder
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

FULL_AT = 64 << 20  # bytes; above what any other file of this process grows to
(SETTING,) = (setting for setting in SETTINGS if setting.key == "EVENT_FILE")


def _kinds(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@pytest.fixture
def full_file(tmp_path: Path) -> Iterator[Path]:
    """A file that has reached the size limit of this process: every write to it fails."""
    path = tmp_path / "events.jsonl"
    path.touch()
    os.truncate(path, FULL_AT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, before[1]))
    yield path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_under_the_event_file_neither_stops_serving_nor_silences_reports(
    full_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ManagerRig(event_file=str(full_file), log_every_s=1e9)
    rig.extend(1, range(30))
    rig.rows.req_to_token[1, 2:28] = torch.arange(400, 426)  # more causes than are named at once
    rig.decode([1])
    assert rig.settle() != []
    assert "cannot write to its event file" in caplog.text
    assert "NEVER_WRITTEN at HEAD_K_FULL" in caplog.text
    assert "more causes wait" in caplog.text
    assert "all are in the event file" not in caplog.text


def test_an_event_after_a_torn_one_gets_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = EventSink(str(tmp_path / "events.jsonl"), 0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    sink.emit({"event": "torn"})
    assert not sink.is_complete
    monkeypatch.undo()
    sink.for_runner("draft").emit({"event": "whole"})
    sink.emit({"event": "another"})
    _, *lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["whole", "another"]


def test_a_torn_event_of_another_rank_costs_no_event_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both append to one file, as with SGLANG_KV_CANARY_EVENT_FILE."""
    path = tmp_path / "events.jsonl"
    other, sink = EventSink(str(path), 1), EventSink(str(path), 0)
    write = os.write
    other.emit({"event": "other"})
    sink.emit({"event": "first"})
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    other.emit({"event": "torn"})
    monkeypatch.undo()
    for name in ("whole", "another"):
        sink.emit({"event": name})
    first, second, _, *lines = path.read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in (first, second, *lines)]
    assert kinds == ["other", "first", "whole", "another"]


def test_a_line_that_another_rank_is_just_writing_is_not_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may show a part of what one call writes."""
    path = tmp_path / "events.jsonl"
    sink = EventSink(str(path), 0)
    sink.emit({"event": "first"})
    with path.open("ab", buffering=0) as other:
        other.write(b'{"event": ')
        monkeypatch.setattr(event_file.time, "sleep", lambda _: other.write(b'"other"}\n'))
        sink.emit({"event": "second"})
    assert _kinds(path) == ["first", "other", "second"]


def test_only_the_owner_may_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = os.umask(0)
    try:
        EventSink(str(path), 0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_event_has_the_schema_version(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventSink(str(path), 3).for_runner("draft").emit({"event": "one"})
    event = json.loads(path.read_text())
    assert (event["schema"], event["rank"], event["runner"]) == (2, 3, "draft")


# What may be an event file


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def _socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    return folder / "socket"


def _link_to_a_fifo(folder: Path) -> Path:
    (folder / "link").symlink_to(_fifo(folder))
    return folder / "link"


NOT_REGULAR = (_fifo, _socket, _link_to_a_fifo, lambda _: Path("/dev/null"), lambda folder: folder)
IDS = ("fifo", "socket", "link-to-a-fifo", "device", "folder")


@pytest.mark.parametrize("make", NOT_REGULAR, ids=IDS)
def test_settings_refuse_what_is_not_a_regular_file(make, tmp_path: Path) -> None:
    with pytest.raises(CanaryConfigError, match="SGLANG_KV_CANARY_EVENT_FILE"):
        SETTING.parse(str(make(tmp_path)))


@pytest.mark.parametrize("make", NOT_REGULAR, ids=IDS)
def test_the_sink_refuses_what_is_not_a_regular_file(make, tmp_path: Path) -> None:
    """It may have become one since the settings were read; opening a FIFO must not wait for a reader."""
    with pytest.raises(CanaryConfigError, match="regular file"):
        EventSink(str(make(tmp_path)), 0)


def test_a_fifo_that_somebody_reads_is_refused_too(tmp_path: Path) -> None:
    path = _fifo(tmp_path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(CanaryConfigError, match="regular file"):
            EventSink(str(path), 0)
    finally:
        os.close(reader)


def test_regular_files_new_ones_and_links_to_them_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "link").symlink_to(tmp_path / "old")
    for name in ("old", "new", "link"):
        path = str(tmp_path / name)
        assert SETTING.parse(path) == path
        EventSink(path, 0).emit({"event": name})
    assert _kinds(tmp_path / "old") == ["old", "link"]


# Rotation


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "LOOK_EVERY_S", 0.0)


@pytest.mark.usefixtures("looks_each_time")
def test_a_file_that_was_moved_away_is_opened_again(tmp_path: Path) -> None:
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    sink = EventSink(str(path), 0)
    sink.for_runner("target").emit({"event": "before"})
    path.rename(old)
    sink.for_runner("draft").emit({"event": "after"})
    sink.emit({"event": "later"})
    assert (_kinds(old), _kinds(path)) == (["before"], ["after", "later"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.usefixtures("looks_each_time")
def test_a_file_that_the_rotation_has_created_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(str(path), 0)
    path.unlink()
    path.write_text('{"event": "header"}\n')
    sink.emit({"event": "after"})
    assert _kinds(path) == ["header", "after"]


@pytest.mark.usefixtures("looks_each_time")
def test_a_fifo_in_the_place_of_the_file_does_not_stop_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    sink = EventSink(str(path), 0)
    path.rename(old)
    os.mkfifo(path)
    sink.emit({"event": "after"})
    assert _kinds(old) == ["after"]
    assert "was moved" in caplog.text


def test_where_the_file_is_is_looked_up_once_a_second(tmp_path: Path) -> None:
    path, old = tmp_path / "events.jsonl", tmp_path / "events.jsonl.1"
    sink = EventSink(str(path), 0)
    sink._file._next_look = float("inf")
    path.rename(old)
    sink.emit({"event": "soon"})
    assert _kinds(old) == ["soon"]


# Deletion


def test_a_deleted_file_is_noticed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = EventSink(str(path), 0)
    path.unlink()
    sink.emit({"event": "soon"})
    assert _kinds(path) == ["soon"]
    assert sink.is_complete


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_events_without_a_folder_are_lost_and_said(
    is_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    kept = EventFolder(str(folder), 4096, 4) if is_folder else None
    sink = EventSink("" if is_folder else str(folder / "events.jsonl"), 0, folder=kept)
    sink.emit({"event": "before"})
    shutil.rmtree(folder)
    for _ in range(50):  # more than one file of the folder has room for
        sink.emit({"event": "lost", "padding": "x" * 200})
    assert not sink.is_complete
    assert caplog.text.count("its event file was deleted") == 1
    assert "1 events lost so far" in caplog.text
    folder.mkdir()
    sink.emit({"event": "again"})
    (file,) = folder.iterdir()
    assert _kinds(file) == ["again"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
