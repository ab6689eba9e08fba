"""Fault injection: the table of commands, and a control folder in which nothing can end the server."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_canary_cli import main
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.perturb.control_folder import Command, ControlFolder
from sglang_kv_canary.perturb.fault import REQUIRED, ArgumentError, Fault
from sglang_kv_canary.perturb.faults import FAULTS, READER
from sglang_kv_canary.perturb.observer import _checked

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

STRICT = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"
# Values of every JSON type; each argument accepts some and refuses the others.
VALUES = (
    None,
    True,
    1 << 31,
    -1,
    0,
    1,
    1.5,
    "",
    "K",
    "DECODE",
    "no such choice",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
)


@pytest.fixture
def controls(tmp_path: Path) -> ControlFolder:
    return ControlFolder(tmp_path, "target0")


# Files


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


MALFORMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (text(""), "not JSON"),
    "truncated": (text('{"fault": "flip_by'), "rename"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not JSON"),
    "deep": (text("[" * 100_000), "not JSON"),
    "huge": (text(" " * (2 << 20)), "at most"),
    "list": (text("[1]"), "got a list"),
    "null": (text("null"), "got a NoneType"),
    "no fault": (text('{"args": {}}'), "'fault' is missing"),
    "no args": (text('{"fault": "flip_bytes"}'), "'args' is missing"),
    "another key": (text('{"fault": "flip_bytes", "args": {}, "arg": 1}'), "unknown key 'arg'"),
    "fault is no name": (text('{"fault": 3, "args": {}}'), "'fault', got a int"),
    "args is a list": (text('{"fault": "flip_bytes", "args": []}'), "'args', got a list"),
    "folder": (lambda path: path.mkdir(), "regular file"),
    "pipe": (os.mkfifo, "regular file"),
    "link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_answered_once_and_the_next_command_is_taken(
    case: str, controls: ControlFolder, tmp_path: Path
) -> None:
    make, problem = MALFORMED[case]
    make(tmp_path / "target0-a.json")
    controls.send(Command("b", "counters"))
    assert controls.take() == [Command("b", "counters")]
    assert problem in controls.answer("a")["error"]
    (tmp_path / "target0-a.done.json").unlink()
    assert controls.take() == []
    assert controls.answer("a") is None


def test_command_that_cannot_be_removed_is_not_executed(
    controls: ControlFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that only takes new files; a superuser may remove from any."""

    def refuse(self: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    controls.send(Command("a", "counters"))
    monkeypatch.setattr(Path, "unlink", refuse)
    assert controls.take() == []
    assert "cannot be removed" in controls.answer("a")["error"]
    assert controls.take() == []


def test_command_that_another_replica_has_taken_is_not_executed(
    controls: ControlFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two schedulers may have read it before one of them removes it."""
    controls.send(Command("a", "counters"))
    remove = Path.unlink

    def remove_after_another(self: Path) -> None:
        remove(self)
        remove(self)

    monkeypatch.setattr(Path, "unlink", remove_after_another)
    assert controls.take() == []
    assert controls.answer("a") is None


def test_folder_that_is_gone_is_an_empty_one(tmp_path: Path) -> None:
    controls = ControlFolder(tmp_path / "gone", "target0")
    assert controls.take() == []
    controls.reply("a", {"detail": "done"})
    (tmp_path / "gone").mkdir()
    controls.send(Command("a", "counters"))
    assert controls.take() == [Command("a", "counters")]


def test_other_addresses_and_answers_are_left_alone(
    tmp_path: Path, controls: ControlFolder
) -> None:
    ControlFolder(tmp_path, "target1").send(Command("a", "counters"))
    controls.reply("b", {"detail": "done"})
    assert controls.take() == []
    assert controls.answer("b") == {"detail": "done"}


# Arguments


def smallest_args(fault: Fault) -> dict:
    """The required arguments only, each with a value that it accepts."""
    required = [a for a in fault.arguments if a.default is REQUIRED]
    return {a.name: next(v for v in (*VALUES, "zero") if a.accepts(v)) for a in required}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_defaults_are_filled_in_and_accepted(fault: Fault) -> None:
    args = fault.complete(smallest_args(fault))
    expected = {a.name for a in fault.arguments if a.default is not None}
    assert args.keys() == expected
    assert fault.complete(args) == args


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_what_a_fault_does_not_take_is_refused_with_what_it_takes(fault: Fault) -> None:
    good = smallest_args(fault)
    with pytest.raises(ArgumentError, match=f"{fault.name} has no argument 'colour'; it takes: "):
        fault.complete({**good, "colour": 1})
    for argument in fault.arguments:
        refused = [value for value in VALUES if not argument.accepts(value)]
        assert refused
        for value in refused:
            with pytest.raises(ArgumentError, match=re.escape(argument.expected)):
                fault.complete({**good, argument.name: value})
    for name in good:
        with pytest.raises(ArgumentError, match=f"needs the argument '{name}'"):
            fault.complete({k: v for k, v in good.items() if k != name})


def test_modes_are_sglangs() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    (mode,) = (argument for argument in READER if argument.name == "mode")
    modes = mode.expected.removeprefix("one of ").split(", ")
    assert {*modes} <= ForwardMode.__members__.keys()


def test_fault_that_sglangs_leak_check_answers_by_ending_the_server_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = Command("a", "free_live_slot")
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(ArgumentError, match=f"{STRICT}=0"):
        _checked(command)
    assert _checked(Command("a", "double_free")).args == {}
    monkeypatch.setenv(STRICT, "0")
    assert _checked(command).args == {"min_prefix": 8, "hand_out_next": False}


def test_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="no fault 'melt'; known: flip_bytes, "):
        _checked(Command("a", "melt"))


# The command line


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--json"]], ids=str)
def test_every_fault_argument_and_reason_is_listed(
    form: list[str], capsys: pytest.CaptureFixture
) -> None:
    assert main(["faults", *form]) == 0
    shown = capsys.readouterr().out
    for fault in FAULTS.values():
        assert fault.name in shown
        assert all(reason.name in shown for reason in fault.reasons)
        assert all(argument.name in shown for argument in fault.arguments)
    assert STRICT in shown


def test_json_of_one_fault(capsys: pytest.CaptureFixture) -> None:
    assert main(["faults", "free_live_slot", "--json"]) == 0
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["must_be_seen"] == ["USE_AFTER_FREE", "CHAIN"]
    assert f"{STRICT}=0" in fault["notes"][0]
    assert {"name": "hand_out_next", "default": "false", "allowed": "true or false"}.items() <= (
        next(a for a in fault["args"] if a["name"] == "hand_out_next").items()
    )


def test_unknown_name_is_named(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["faults", "melt"])
    assert "no fault 'melt'" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
