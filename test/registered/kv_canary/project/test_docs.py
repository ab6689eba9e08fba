"""The documents: links, short sentences (also in the modules), a runbook section for every reason, report and alert."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import Reason
from sglang_kv_canary.reports.violation import RUNBOOK, Actor, Violation, render
from sglang_kv_canary_rigs import runbook
from sglang_kv_canary_rigs.checkout import REPO
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

DOCS = REPO / "docs"
AT_THE_TOP = [REPO / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
DOCUMENTS = sorted([*AT_THE_TOP, *DOCS.rglob("*.md")])
README_WORDS = 900
PACKAGE = REPO / "python" / "sglang" / "srt" / "kv_canary"
MODULES = sorted(PACKAGE.rglob("*.py"))
PARTS = ("Means.", "Likely causes.", "Do now.", "Look at next.")
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
# Of a path in the repository with an anchor, as reports and alerts print it
SECTION = re.compile(r"(docs/[\w.-]+\.md)#([\w-]+)")

pytestmark = pytest.mark.skipif(
    not DOCS.is_dir(), reason="no source tree: the documents are not here"
)


def prose_tool() -> dict[str, Any]:
    return runpy.run_path(str(REPO / "tools" / "prose.py"), run_name="prose")


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def anchor_of(heading: str) -> str:
    """As GitHub makes it: lower case, without punctuation, hyphens for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(document: Path) -> list[str]:
    return [anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", prose(document), re.M)]


def dead_link(document: Path, target: str) -> str:
    """What is wrong with a link of `document`, or ""."""
    path, _, anchor = target.partition("#")
    file = document.parent / path if path else document
    if not file.exists():
        return f"{target}: {path} does not exist"
    if anchor and anchor not in anchors(file):
        return f"{target}: {file.name} has no such heading"
    return ""


def runbook_sections() -> dict[str, str]:
    """Text of the sections of third level, by heading."""
    parts = re.split(r"^##+ (.+)$", prose(REPO / RUNBOOK), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def event_file_commands() -> list[str]:
    """The runbook's commands that read events.jsonl."""
    return runbook.commands("jq ", "events.jsonl")


def one_command(sign: str) -> str:
    (command,) = (command for command in event_file_commands() if sign in command)
    return command


def violation(*reasons: str) -> Violation:
    unknown = dict.fromkeys(Violation.__slots__)
    reader = Actor(forward=3, row=1, mode="DECODE", request_id="ada", step=3)
    return Violation(
        **{**unknown, "sequence": 0, "tag": "HEAD_K_FULL", "reasons": reasons, "reader": reader}
    )


# Links


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(document))
    relative = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert [wrong for target in relative if (wrong := dead_link(document, target))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_headings_are_unique_so_that_their_anchors_are(document: Path) -> None:
    found = anchors(document)
    assert sorted({anchor for anchor in found if found.count(anchor) > 1}) == []


def test_dead_links_are_noticed() -> None:
    assert "does not exist" in dead_link(DOCS / "alarms.md", "nowhere.md")
    assert "no such heading" in dead_link(DOCS / "alarms.md", "metrics.md#nowhere")
    assert "no such heading" in dead_link(DOCS / "alarms.md", "#nowhere")
    assert dead_link(DOCS / "alarms.md", "../README.md#install") == ""
    assert dead_link(REPO / "README.md", "docs/alarms.md#content") == ""


def test_the_index_names_every_document() -> None:
    index = (DOCS / "README.md").read_text()
    files = [path for path in DOCS.rglob("*") if path.suffix in (".md", ".yml", ".json")]
    names = [str(path.relative_to(DOCS)) for path in files if path.name != "README.md"]
    assert len(names) > 15
    assert [name for name in names if f"]({name}" not in index] == []


# Words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_sentences_are_short(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prose_tool()["main"]([str(document)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_and_messages_are_short(
    module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose_tool()["main"](["--python", str(module)]) == 0, capsys.readouterr().out


def test_long_sentences_and_wrong_terms_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.md"
    long.write_text("Too " + "long " * 30 + "it is.\n" + "\n\nThis one is fine.\n" * 10)
    assert prose_tool()["main"]([str(long)]) == 0, "one of eleven may be long"
    assert "33 words: Too long" in capsys.readouterr().out
    long.write_text(long.read_text() * 2 + "\nToo " + "long " * 30 + "it is.\n")
    assert prose_tool()["main"]([str(long)]) == 1
    assert "too long" in capsys.readouterr().out
    wrong = tmp_path / "wrong.md"
    wrong.write_text("The graph is captured anew.\n")
    assert prose_tool()["main"]([str(wrong)]) == 1
    assert '"anew", better: again' in capsys.readouterr().out


def test_docstrings_logs_errors_and_help_texts_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "word " * 30
    sources = (
        f'"""{words}end."""',
        f'logger.info("{words}end")',
        f'raise ValueError(f"{{x}} {words}end")',
        f'parser.add_argument("-x", help="{words}end")',
    )
    for number, source in enumerate(sources):
        (tmp_path / f"{number}.py").write_text(source)
    prose_tool()["main"](["--python", str(tmp_path)])
    out = capsys.readouterr().out
    assert re.findall(r"(\d)\.py:1: 3[12] words", out) == ["0", "1", "2", "3"]


def test_readme_is_a_few_screens() -> None:
    assert len((REPO / "README.md").read_text().split()) <= README_WORDS


# The runbook


@pytest.mark.parametrize("reason", [reason.name for reason in Reason])
def test_every_reason_has_a_section_with_all_parts(reason: str) -> None:
    text = runbook_sections()[reason]
    assert re.findall(r"^\*\*(.+?)\*\*", text, re.M) == [*PARTS]
    for part in text.split("\n**")[1:]:
        assert len(part.split()) > 3, part


def test_every_reason_is_in_the_overview() -> None:
    overview = runbook_sections()["Reasons"]
    linked = re.findall(r"\[([A-Z_]+)\]\(#([a-z_]+)\)", overview)
    assert {reason.name for reason in Reason} <= {name for name, _ in linked}
    assert all(name.lower() == anchor for name, anchor in linked)


@pytest.mark.parametrize("reason", [reason.name for reason in Reason])
def test_a_report_leads_to_the_section_of_its_first_reason(reason: str) -> None:
    last = render(violation(reason, "CONTENT")).splitlines()[-1]
    assert last.startswith("  help       ")
    ((file, anchor),) = SECTION.findall(last)
    assert anchor == reason.lower()
    assert anchor in anchors(REPO / file)


def test_a_row_without_a_known_reason_is_still_shown() -> None:
    assert "help" not in render(violation())


def test_every_alert_names_a_section_of_the_runbook() -> None:
    rules = (DOCS / "alerts" / "kv-canary.yml").read_text().split("- alert: ")[1:]
    assert rules
    for rule in rules:
        name = rule.split()[0]
        assert name in runbook_sections(), "a section of its own"
        ((file, anchor),) = SECTION.findall(rule)
        assert f'runbook: "{file}#{anchor} ' in rule
        assert anchor in anchors(REPO / file), name


needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
LOST_BY = {"rank": 0, "runner": "target", "why": "dropped", "findings": 9}
LOST = {**LOST_BY, "first_forward": 3, "last_forward": 5, "since": 1.5, "time": 2.5}
SLOT = 6


@pytest.fixture
def event_file(tmp_path: Path) -> Path:
    """Of a server on which request 2 reads `SLOT` of request 1, and which has lost findings."""
    file = tmp_path / "events.jsonl"
    rig = ManagerRig(event_file=str(file))
    rig.extend(1, range(20))
    rig.extend(2, range(30))
    assert rig.slot(1, 5) == SLOT
    rig.rows.req_to_token[2, 6] = SLOT
    for _ in range(4):
        rig.decode([1, 2])
    rig.settle()
    rig.manager.violations.finish()
    with file.open("a") as end:
        print(json.dumps({"event": "findings_lost", **LOST}), file=end)
    return file


def findings(folder: Path) -> dict[str, str]:
    """What each command says of the event file in `folder`, but for the one that tells the time."""
    commands = [command for command in event_file_commands() if "now" not in command]
    return {command: runbook.run(command, folder) for command in commands}


@needs_jq
def test_the_commands_that_read_the_event_file_work_as_they_stand(event_file: Path) -> None:
    folder = event_file.parent
    assert len(event_file_commands()) == 7
    found = findings(folder)
    by_runner = found[one_command(".tag")]
    assert re.search(r"1 target rank 0 pp null dp null HEAD_K_FULL POSITION\+CHAIN", by_runner)
    by_slot = [[*map(int, line.split())] for line in found[one_command(".slot")].splitlines()]
    assert [4, SLOT] in by_slot
    assert found[one_command(".reader.request_id")] == '"req-2"\n'
    assert found[one_command(".readers[]")] == '"req-2"\n'
    assert '"cause":1,' in found[one_command(".cause <= 3")]
    assert json.loads(found[one_command("findings_lost")]) == LOST
    assert 0 <= float(runbook.run(one_command("now - max"), folder)) < 600


@needs_jq
@pytest.mark.parametrize("cut", [1, 40, -1], ids=["its start", "a part", "all but its end"])
def test_a_torn_line_hides_no_other(event_file: Path, cut: int) -> None:
    """A server that is killed leaves one, and the next server goes on in a new line."""
    whole = findings(event_file.parent)
    lines = event_file.read_text().splitlines()
    torn = lines[-2][:cut]
    middle = len(lines) // 2
    event_file.write_text("\n".join([torn, *lines[:middle], torn, *lines[middle:], torn]))
    assert findings(event_file.parent) == whole
    assert 0 <= float(runbook.run(one_command("now - max"), event_file.parent)) < 600


@needs_jq
def test_files_of_a_folder_are_joined_to_one(event_file: Path) -> None:
    whole = findings(event_file.parent)
    lines = event_file.read_text().splitlines(keepends=True)
    event_file.unlink()
    parts = ("events.tp0.jsonl", "events.tp0.jsonl.1", "events.dp1.pp0.tp3-2.jsonl")
    for number, name in enumerate(parts):
        (event_file.parent / name).write_text("".join(lines[number :: len(parts)]))
    (event_file.parent / "snapshot.tp0.1.1.json").write_text(lines[-1])
    (join,) = re.findall(r"`(cat [^`]+)`", (REPO / RUNBOOK).read_text())
    runbook.run(join.replace(runbook.FOLDER, "."), event_file.parent)
    assert sorted(event_file.read_text().splitlines(keepends=True)) == sorted(lines)
    joined = findings(event_file.parent)
    ordered = {command for command in joined if "sort" in command}
    assert {c: joined[c] for c in ordered} == {c: whole[c] for c in ordered}


@needs_jq
def test_without_findings_the_time_since_the_last_one_is_none(tmp_path: Path) -> None:
    for text in ("", '{"event": "active", "time": 3}\n', '{"event": "viol'):
        (tmp_path / "events.jsonl").write_text(text)
        assert runbook.run(one_command("now - max"), tmp_path) == "none\n"


def test_the_log_that_is_attached_holds_no_key(tmp_path: Path) -> None:
    """SGLang logs its flags when it starts."""
    flags = "server_args=ServerArgs(port=30000, api_key='KEY', admin_api_key=None)"
    asked = "python -m sglang.launch_server --admin-api-key KEY"
    rest = "kv-canary violation #1: CONTENT at HEAD_K_FULL\n"
    (tmp_path / "server.log").write_text(f"{flags}\n{asked}\n{rest}")
    (command,) = runbook.commands("grep ", "server.log >")
    runbook.run(command, tmp_path)
    assert (tmp_path / "server_without_keys.log").read_text() == rest


def test_benchmarks_have_the_options_that_documents_call_them_with():
    """Documents of the present; the log keeps what was run."""
    text = "\n".join(document.read_text() for document in DOCS.glob("*.md"))
    calls = re.findall(r"(benchmark/kv_canary/\w+\.py)((?:[^\n`#]|(?<=\\)\n)*)", text)
    asked = {
        (script, option) for script, rest in calls for option in re.findall(r"(?<= )--[\w-]+", rest)
    }
    assert ("benchmark/kv_canary/bench_churn.py", "--pairs") in asked
    missing = {
        (script, option)
        for script, option in asked
        if not re.search(rf'{option}\b|f"--{{', _with_imports(REPO / script))  # or all in a loop
    }
    assert missing == set()


def _with_imports(script: Path) -> str:
    """Its text, and that of the scripts beside it which it imports: they may add options to its own."""
    text = script.read_text()
    imported = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
    beside = [script.with_name(f"{name}.py") for name in imported]
    return text + "".join(file.read_text() for file in beside if file.exists())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
