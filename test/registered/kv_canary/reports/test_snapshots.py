"""Snapshots of the first causes: what is in them, who may read them, and how many there are."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.reports import snapshot_file
from sglang_kv_canary.reports.event_loader import (
    CauseTold,
    EventFormatError,
    SnapshotWritten,
    load_events,
    load_snapshot,
)
from sglang_kv_canary_rigs.event_schema import problems_of_snapshot
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


def found(folder: Path, wrong: int = 1, **settings: object) -> ManagerRig:
    """`wrong` entries of row 1 lead to slots of row 2."""
    rig = ManagerRig(events_dir=str(folder), **settings)
    rig.extend(1, range(20))
    rig.extend(2, range(100, 120))
    rig.rows.req_to_token[1, 5 : 5 + wrong] = rig.rows.req_to_token[2, 9 : 9 + wrong]
    rig.decode([1])
    rig.settle()
    return rig


def snapshots_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("snapshot.*"))


def test_a_snapshot_lies_beside_the_events_which_name_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        rig = found(tmp_path)
    finally:
        os.umask(before)
    events = load_events(tmp_path)
    written = {event.cause: event.file for event in events.of(SnapshotWritten)}
    assert sorted(written.values()) == [path.name for path in snapshots_in(tmp_path)]
    path = tmp_path / written[1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert problems_of_snapshot(json.loads(path.read_text())) == []
    told = next(cause for cause in events.of(CauseTold) if cause.cause == 1)
    snapshot = load_snapshot(path)
    assert snapshot.stamp.run == told.stamp.run
    assert snapshot.violation.slot == rig.slot(2, 9)
    assert snapshot.cause.story.sentence == told.story.sentence
    assert snapshot.scene.lines() == told.story.scene.lines()
    names = [name for name, _ in snapshot.scene.records]
    assert names == ["K_HEAD", "K_TAIL", "V_HEAD", "V_TAIL"]
    by_slot = {held.slot: held for held in snapshot.scene.records[0][1]}
    assert by_slot[rig.slot(1, 4)].token == 4
    assert by_slot[rig.slot(2, 9)].token == 109
    assert snapshot.scene.bytes == ()


def test_with_the_setting_it_holds_the_slots_bytes(tmp_path: Path) -> None:
    rig = found(tmp_path, snapshot_kv=True, content=ContentMode.ALL)
    slot = rig.slot(2, 9)
    held = dict(load_snapshot(snapshots_in(tmp_path)[0]).scene.bytes)
    assert held["K"] == tuple(_hex(buffer[slot]) for buffer in rig.pool.k_buffer)
    assert held["V"] == tuple(_hex(buffer[slot]) for buffer in rig.pool.v_buffer)


def _hex(row: torch.Tensor) -> str:
    return bytes(row.contiguous().view(torch.uint8).flatten().tolist()).hex()


def test_without_content_checks_there_are_no_bytes(tmp_path: Path) -> None:
    found(tmp_path, snapshot_kv=True, content=ContentMode.NONE)
    assert load_snapshot(snapshots_in(tmp_path)[0]).scene.bytes == ()


def test_each_cause_has_one_and_only_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = found(tmp_path, wrong=4)
    rig.decode([1])
    rig.settle()
    assert len(snapshots_in(tmp_path)) == 5
    monkeypatch.setattr(snapshot_file, "MAX_SNAPSHOTS", 3)
    found(tmp_path, wrong=4)
    assert len(snapshots_in(tmp_path)) == 3
    last = load_events(tmp_path).of(SnapshotWritten)[-1]
    assert (tmp_path / last.file).exists()


def test_what_another_server_deletes_at_the_same_time_costs_no_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link to nothing is listed, and is not there when it is looked at."""
    (tmp_path / "snapshot.tp0.gone.json").symlink_to("nowhere")
    found(tmp_path)
    assert "cannot write the snapshot" not in caplog.text
    assert load_events(tmp_path).of(SnapshotWritten) != ()


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rig = ManagerRig(event_file=str(tmp_path / "e.jsonl"))
    rig.extend(1, range(20))
    rig.rows.req_to_token[1, 5] = 300
    rig.decode([1])
    assert rig.settle() != []
    assert snapshots_in(tmp_path) == []


def test_a_snapshot_that_cannot_be_written_is_logged_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(snapshot_file.os, "replace", full)
    found(tmp_path)
    assert "cannot write the snapshot" in caplog.text
    assert snapshots_in(tmp_path) == []
    assert load_events(tmp_path).of(SnapshotWritten) == ()


def test_events_and_snapshots_do_not_mix(tmp_path: Path) -> None:
    found(tmp_path)
    assert load_events(tmp_path).problems == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"summary": {"event": "health"}}', "[" * 99999])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "snapshot.json"
    path.write_text(text)
    with pytest.raises(EventFormatError):
        load_snapshot(path)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
