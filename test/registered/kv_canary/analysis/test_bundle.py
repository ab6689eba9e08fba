"""`kv-canary bundle`: everything an issue needs is in it, and token ids are not."""

from __future__ import annotations

import gzip
import hashlib
import json
import runpy
import secrets
import stat
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.analysis.bundle import FOLDER, write_bundle
from sglang_kv_canary.analysis.redaction import REMOVED, Redaction
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens, KnownTokens
from sglang_kv_canary.reports.event_sink import EventSink
from sglang_kv_canary.reports.event_types import event_of
from sglang_kv_canary.reports.internal_errors import InternalErrors
from sglang_kv_canary.reports.scene_facts import ChangedWord
from sglang_kv_canary_rigs.event_folder import write_folder
from sglang_kv_canary_rigs.event_schema import problems_of
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.largest_file import largest_file
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rotating_server import RotatingServer

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

FED, LISTED = 70001, 80002  # token ids
TEXTS = {"doctor.txt": "ok\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, and a third that was fed another token than the request's."""
    path = write_folder(tmp_path / "events")
    rig = ManagerRig(event_file=str(path / "events.tp2.jsonl"))
    rig.expected = lambda batch: ExpectedTokens.from_lists([KnownTokens(0, [LISTED], 0)], "cpu")
    rig.extend(1, [FED])
    rig.settle()
    return path


def _pack(path: Path, out: Path, redaction: Redaction | None = None) -> dict[str, bytes]:
    """Contents of the archive, by name."""
    write_bundle(path, out, redaction or Redaction(), TEXTS)
    with tarfile.open(out) as archive:
        members = archive.getmembers()
        assert all(m.isfile() and m.name.startswith(f"{FOLDER}/") for m in members)
        return {
            m.name.removeprefix(f"{FOLDER}/"): archive.extractfile(m).read()  # type: ignore[union-attr]
            for m in members
        }


def _events(packed: dict[str, bytes]) -> list[dict[str, Any]]:
    files = [data for name, data in sorted(packed.items()) if name.startswith("events/")]
    return [json.loads(line) for data in files for line in data.splitlines()]


def test_it_holds_what_the_manifest_says(folder: Path, tmp_path: Path) -> None:
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    manifest = json.loads(packed.pop("manifest.json"))
    assert sorted(packed) == [
        "doctor.txt",
        *(f"events/events.tp{rank}.jsonl" for rank in range(3)),
        "report.txt",
    ]
    for file in manifest["files"]:
        data = packed.pop(file["name"])
        assert (file["bytes"], file["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert packed == {}
    assert (manifest["token_ids"], manifest["names"]) == (False, True)
    assert manifest["lines_left_out"] == 0


def test_the_report_is_about_these_events(folder: Path, tmp_path: Path) -> None:
    report = _pack(folder, tmp_path / "bundle.tar.gz")["report.txt"].decode()
    assert "NEVER_WRITTEN on tp0 gpu7 #1, tp1 #1" in report
    assert "WRITE_TOKEN on" in report


def test_token_ids_are_nowhere_in_it(folder: Path, tmp_path: Path) -> None:
    assert f"is fed token {FED} at position 0 instead of {LISTED}" in "".join(
        file.read_text() for file in folder.iterdir()
    )
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    whole = b"".join(packed.values())
    assert str(FED).encode() not in whole
    assert str(LISTED).encode() not in whole
    assert f"is fed token {REMOVED} at position 0 instead of {REMOVED}".encode() in whole
    violations = [event for event in _events(packed) if event["event"] == "violation"]
    assert {event["stored_token"] for event in violations} == {None}


def test_chains_cannot_be_computed_back_and_equal_ones_stay_equal(
    folder: Path, tmp_path: Path
) -> None:
    """The first link of a chain is the mixed token id, and mixing can be undone."""
    before = [json.loads(x) for f in sorted(folder.iterdir()) for x in f.read_text().splitlines()]
    after = _events(_pack(folder, tmp_path / "bundle.tar.gz"))
    pairs = {
        (old[name], new[name])
        for old, new in zip(before, after, strict=True)
        for name in ("expected_chain", "stored_chain")
        if old.get(name) is not None
    }
    assert len(pairs) >= 2
    olds, news = map(set, zip(*pairs, strict=True))
    assert len(olds) == len(news) == len(pairs)
    assert not olds & news
    other = _events(_pack(folder, tmp_path / "another.tar.gz"))
    assert not news & {event.get("expected_chain") for event in other}  # another key


def test_no_token_id_stays_in_the_words_of_a_scene() -> None:
    diverges = (
        "position 5 leads to slot 7, which holds token 99 instead of -17, of row 1 (forward 2)"
    )
    redacted = Redaction().apply({"scene": {"diverges": diverges}})
    assert redacted["scene"]["diverges"] == (
        "position 5 leads to slot 7, which holds token [removed] instead of [removed], of row 1 (forward 2)"
    )


def test_redacted_events_are_events_still(folder: Path, tmp_path: Path) -> None:
    events = _events(_pack(folder, tmp_path / "bundle.tar.gz", Redaction(names=True)))
    assert [problem for event in events for problem in problems_of(event)] == []
    assert [event_of(event).kind for event in events] == [event["event"] for event in events]


def test_with_tokens_events_are_as_they_were(folder: Path, tmp_path: Path) -> None:
    packed = _pack(folder, tmp_path / "bundle.tar.gz", Redaction(token_ids=False))
    for file in folder.iterdir():
        assert packed[f"events/{file.name}"] == file.read_bytes()
    assert json.loads(packed["manifest.json"])["token_ids"] is True


def test_hidden_names_are_nowhere_in_it_and_equal_ones_stay_equal(
    folder: Path, tmp_path: Path
) -> None:
    packed = _pack(folder, tmp_path / "bundle.tar.gz", Redaction(names=True))
    whole = b"".join(packed.values())
    assert b"req-1" not in whole
    assert b"gpu7" not in whole
    causes = [event for event in _events(packed) if event["event"] == "cause"]
    for cause in causes:
        (name,) = {reader["request_id"] for reader in cause["readers"]}
        assert f'request "{name}"' in cause["sentence"]


def test_where_kv_came_from_is_a_name() -> None:
    origin = "prefill server 10.1.2.3:8998, room 7, request ada@example.com, chunk 1 of 2"
    redacted = Redaction(names=True).apply({"reader": {"origin": origin}})
    assert not [part for part in ("10.1.2.3", "ada") if part in redacted["reader"]["origin"]]


@pytest.mark.parametrize("is_hidden", [True, False])
def test_errors_hold_no_names(is_hidden: bool, tmp_path: Path) -> None:
    (home := tmp_path / "home-of-ada").mkdir()
    (home / "acme_model.py").write_text("def load(path):\n    open(path)\n")
    module = runpy.run_path(str(home / "acme_model.py"))
    errors = InternalErrors(CanaryMode.LOG, EventSink(str(home / "events.jsonl"), 0))
    errors.serving = True

    def load() -> None:
        module["load"](str(tmp_path / "secret" / "weights"))

    def find() -> None:
        {}["customer-42"]  # type: ignore[misc]

    def refuse() -> None:
        raise ValueError("request \"zoe\" of o'hara, 'gus', in /srv/acme/x.bin: no")

    for call in (load, find, refuse):
        with pytest.raises((OSError, LookupError, ValueError)) as raised:
            call()
        errors.contain(raised.value, call)
    packed = _pack(home / "events.jsonl", tmp_path / "b.tar.gz", Redaction(names=is_hidden))
    texts = [packed["events/events.jsonl"].decode(), packed["report.txt"].decode()]
    names = ("home-of-ada", "secret", "customer-42", "zoe", "gus", "acme/x")
    shown = [name for name in names if name in texts[0]]
    assert shown == ([] if is_hidden else list(names))
    assert ("secret" in texts[1]) != is_hidden
    assert "acme_model.py:2 in load" in texts[0]
    assert "of o'hara, " in texts[0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("the request's row and the row's K/V bytes", "the request's row and the row's K/V bytes"),
        ("two requests' rows, both 'ada'", "two requests' rows, both name-"),
        ("KeyError: 'ada@exam...", "KeyError: name-"),
        ("OSError: '/home/ada/it\\'s': full", "OSError: name-"),
    ],
)
def test_what_is_quoted_in_an_error_is_a_name(text: str, kept: str) -> None:
    redacted = Redaction(names=True).apply({"error": text})["error"]
    assert redacted.startswith(kept)
    assert "ada" not in redacted


def test_only_its_owner_may_read_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    out.touch(0o644)
    _pack(folder, out)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_lines_that_are_no_events_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    file = folder / "events.tp0.jsonl"
    file.write_text(f'{file.read_text()}{{"event": "violation", "stored_token": {FED}')
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    assert json.loads(packed["manifest.json"])["lines_left_out"] == 1
    assert str(FED).encode() not in b"".join(packed.values())


def test_packed_event_files_are_unpacked(folder: Path, tmp_path: Path) -> None:
    file = folder / "events.tp0.jsonl"
    events = len(file.read_text().splitlines())
    (folder / "events.tp0.jsonl.1.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    assert len(packed["events/events.tp0.jsonl.1"].splitlines()) == events


@pytest.mark.parametrize("name", ["server.log", "events.log", "events.json", "e.jsonl.zst.gz"])
def test_an_event_file_may_have_any_name(name: str, folder: Path, tmp_path: Path) -> None:
    data = (folder / "events.tp0.jsonl").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    packed = _pack(tmp_path / name, tmp_path / "bundle.tar.gz")
    assert len(_events(packed)) == len(data.splitlines())
    assert b"NEVER_WRITTEN on tp0 #1" in packed["report.txt"]


def test_a_file_and_its_archive_are_both_packed(folder: Path, tmp_path: Path) -> None:
    """As when a rotated file was packed, and its name is in use again."""
    file = folder / "events.tp0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    (folder / "events.tp0.jsonl.gz").write_bytes(gzip.compress("".join(lines[:3]).encode()))
    file.write_text("".join(lines[3:]))
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    lines_of_run = [event["line"] for event in _events(packed) if event["run"] == "run0"]
    assert sorted(lines_of_run) == list(range(1, len(lines) + 1))
    assert b"in no file" not in packed["report.txt"]


def test_what_is_left_out_is_told(folder: Path, tmp_path: Path) -> None:
    """The copies have no unreadable lines, but their report does not pass for complete."""
    file = folder / "events.tp0.jsonl"
    file.write_text(f"{file.read_text()}{{half a line")
    (folder / "events.tp0.jsonl.zst").touch()
    packed = _pack(folder, tmp_path / "bundle.tar.gz")
    report = packed["report.txt"].decode()
    assert "; at least " in report.splitlines()[0]
    assert "1 line and 1 file could not be read" in report
    manifest = json.loads(packed["manifest.json"])
    assert (manifest["lines_left_out"], manifest["files_left_out"]) == (1, ["events.tp0.jsonl.zst"])


@pytest.mark.parametrize("files", [99, 5], ids=["moved", "deleted"])
def test_files_that_a_server_rotates_meantime_are_packed(tmp_path: Path, files: int) -> None:
    """Each event once. The names that the files had and have are both in use."""
    (folder := tmp_path / "events").mkdir()
    server = RotatingServer(folder, files=files, before=50, during=100, at_end=files == 99)
    out = tmp_path / "bundle.tar.gz"
    manifest = write_bundle(folder, out, Redaction(), TEXTS, server.watch)
    with tarfile.open(out) as archive:
        packed = {m.name: archive.extractfile(m).read() for m in archive.getmembers()}  # type: ignore[union-attr]
    copies = [data for name, data in packed.items() if name.startswith(f"{FOLDER}/events/")]
    lines = [json.loads(line)["line"] for data in copies for line in data.splitlines()]
    assert manifest.events == len(lines) == len(set(lines))
    assert (len(lines) == server.events) == (files == 99)
    assert (b"in no file" in packed[f"{FOLDER}/report.txt"]) == (files == 5)


KEY = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@pytest.mark.parametrize("key", [KEY, f"{KEY}_model_0", "<a page>"])
def test_keys_of_pages_cannot_be_guessed_from_tokens_and_equal_ones_stay_equal(key: str) -> None:
    """A key is a hash chain over token ids."""
    redaction = Redaction()
    finding = redaction.apply({"event": "violation", "tier": "file", "key": key})
    sentence = f"the canary finds page {key} of the file backend, of which slot 3 has changed"
    cause = redaction.apply(
        {
            "event": "cause",
            "key": key,
            "sentence": sentence,
            "guess": {"reason": f"exchanged with {KEY}"},
            "traceback": [f"/pages/{KEY}_model_0.bin"],
        }
    )
    assert key not in json.dumps([finding, cause])
    assert KEY not in json.dumps([finding, cause])
    assert finding["key"] == cause["key"]
    assert f"page {finding['key']} of the file backend" in cause["sentence"]
    assert Redaction(token_ids=False).apply({"key": key})["key"] == key
    assert redaction.apply({"key": None})["key"] is None


@pytest.mark.parametrize(
    ("was", "now", "kept"),
    [
        ("0x3f8012ab", "0x3f8012a9", "0x00000002"),
        ("0x3f8012ab", "0x00000000", "0x00003fff"),
        ("0x7f", "0x3f", "0x40"),
    ],
)
def test_words_of_k_and_v_are_left_out_but_for_their_flipped_bits(
    was: str, now: str, kept: str
) -> None:
    word = {"half": "K", "buffer": 0, "byte": 8, "size": len(was) // 2 - 1, "was": was, "now": now}
    (redacted,) = Redaction().apply({"scene": {"changed": [word]}})["scene"]["changed"]
    assert redacted == {**word, "was": "0x" + "0" * (len(was) - 2), "now": kept}
    bits = (int(was, 16) ^ int(now, 16)).bit_count()
    assert f"({bits} bit" in ChangedWord.from_event(redacted).text()


@pytest.mark.parametrize("field", ["was", "size"])
def test_words_that_are_not_as_expected_are_left_out_whole(field: str) -> None:
    word = {"size": 2, "was": "0x3f80", "now": "0x3f81", field: "zz"}
    (redacted,) = Redaction().apply({"scene": {"changed": [word]}})["scene"]["changed"]
    assert (redacted["was"], redacted["now"]) == (REMOVED, REMOVED)


@pytest.mark.parametrize("what", ["itself", "link", "other"])
def test_evidence_is_not_overwritten(what: str, folder: Path, tmp_path: Path) -> None:
    file, other, *_ = sorted(folder.iterdir())
    (link := tmp_path / "link.tar.gz").symlink_to(file)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path in (file, folder):
        with pytest.raises(OSError, match="is not overwritten"):
            _pack(path, {"itself": file, "link": link, "other": other}[what])
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_archive_is_written_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    """Writing fails before its end, as on a full disk. The scratch copies have room."""
    (out := tmp_path / "bundle.tar.gz").write_text("the former archive")
    size = max(path.stat().st_size for path in folder.iterdir())
    texts = {"doctor.txt": secrets.token_hex(8 * size)}
    with pytest.raises(OSError, match="File too large"), largest_file(2 * size):
        write_bundle(folder, out, Redaction(), texts)
    assert out.read_text() == "the former archive"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.tar.gz", "events"]


COMMAND = """
import sys
from sglang_kv_canary.cli import sglang_problem
from sglang_kv_canary.cli.bundle import main
assert not sglang_problem()
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_adds_doctor_and_settings(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    outcome = FreshProcesses().run(
        COMMAND, str(folder), "-o", str(out), env={"SGLANG_KV_CANARY_RING_CAPACITY": "99"}
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "It holds request ids, host names, paths." in outcome.stdout
    with tarfile.open(out) as archive:
        doctor = archive.extractfile(f"{FOLDER}/doctor.txt").read().decode()  # type: ignore[union-attr]
        settings = archive.extractfile(f"{FOLDER}/settings.txt").read().decode()  # type: ignore[union-attr]
    assert "ok      release" in doctor
    assert "SGLANG_KV_CANARY_RING_CAPACITY=99" in settings


def test_the_command_says_that_it_read_no_event(tmp_path: Path) -> None:
    (log := tmp_path / "server.log").write_text("INFO: server is ready\n")
    out = tmp_path / "bundle.tar.gz"
    outcome = FreshProcesses().run(COMMAND, str(log), "-o", str(out))
    assert outcome.returncode == 1, outcome.stderr
    assert "no events read" in outcome.stderr
    with tarfile.open(out) as archive:
        report = archive.extractfile(f"{FOLDER}/report.txt").read().decode()  # type: ignore[union-attr]
    assert report.startswith("no events read\n")


def test_a_folder_without_event_files_is_named(tmp_path: Path) -> None:
    out = tmp_path / "bundle.tar.gz"
    outcome = FreshProcesses().run(COMMAND, str(tmp_path), "-o", str(out))
    assert outcome.returncode == 2
    assert "no event file at" in outcome.stderr
    assert not out.exists()


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
