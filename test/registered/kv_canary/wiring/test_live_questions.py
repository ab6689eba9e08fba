"""The way of a live question: HTTP with SGLang's own middleware, sockets, and the scheduler's desk."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from sglang.srt.utils.auth import add_api_key_middleware
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.reports.async_copy import FutureTensors
from sglang_kv_canary.runner.live_answers import Answer, Unanswerable
from sglang_kv_canary.wiring import farewell, live_questions, question_desk, scheduler
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.live_questions import QuestionWindow, add_routes
from sglang_kv_canary.wiring.question_desk import QuestionDesk, install_question_desk, serve
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")

KEY = "the-admin-key"
ADMIN = {"Authorization": f"Bearer {KEY}"}
ARRIVED = FutureTensors((), None)


def echo(question: Mapping[str, Any]) -> Answer:
    yield ARRIVED
    return {"asked": dict(question)}


@contextmanager
def answering(
    folder: Path, begin: Callable[[Mapping[str, Any]], Answer] = echo, name: str = "1"
) -> Iterator[QuestionDesk]:
    """A scheduler process: its socket's thread, and a thread that attends as the scheduler does."""
    listener, ended = socket.socket(socket.AF_UNIX), threading.Event()
    listener.bind(str(folder / f"{name}.sock"))
    listener.listen()
    desk = QuestionDesk(begin)

    def attend() -> None:
        while not ended.wait(0.001):
            desk.attend()

    threads = [
        threading.Thread(target=serve, args=(listener, desk)),
        threading.Thread(target=attend),
    ]
    for thread in threads:
        thread.start()
    try:
        yield desk
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def client(folder: Path, api_key: str | None = None, wait_s: float = 30.0, **kw: Any) -> TestClient:
    app = FastAPI()
    add_routes(app, KEY, QuestionWindow(folder, wait_s))
    add_api_key_middleware(app, api_key=api_key, admin_api_key=kw.get("admin_api_key", KEY))
    return TestClient(app)


# Who may ask


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer the-api-key", 401),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY}", 200),
    ],
)
@pytest.mark.parametrize("path", ["slot/5", "request/ada"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_only_the_admin_key_opens_the_routes(
    tmp_path: Path, path: str, header: str | None, status: int, method: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    with answering(tmp_path):
        http = client(tmp_path, api_key="the-api-key")
        found = http.request(method, f"/kv_canary/{path}", headers=headers)
    assert found.status_code == status
    assert ("asked" in found.text) == (status == 200 and method == "GET")


def test_a_server_that_lost_its_key_forbids_all(tmp_path: Path) -> None:
    http = client(tmp_path, admin_api_key=None)
    assert http.get("/kv_canary/slot/5", headers=ADMIN).status_code == 403


def test_an_application_without_the_middleware_is_closed_too(tmp_path: Path) -> None:
    app = FastAPI()
    add_routes(app, KEY, QuestionWindow(tmp_path))
    assert TestClient(app).get("/kv_canary/slot/5").status_code == 401
    with answering(tmp_path):
        assert TestClient(app).get("/kv_canary/slot/5", headers=ADMIN).status_code == 200


def test_the_host_header_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of Starlette make the URL's path of it, and SGLang lets /health pass."""
    app = FastAPI()
    add_routes(app, KEY, QuestionWindow(tmp_path))
    monkeypatch.setattr(Request, "url", SimpleNamespace(path="/health"))
    assert TestClient(app).get("/kv_canary/slot/5").status_code == 401
    with answering(tmp_path):
        assert TestClient(app).get("/kv_canary/slot/5", headers=ADMIN).status_code == 200


def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, **server_args: Any) -> TestClient:
    """What a launch leaves in SGLang's application."""
    module = SimpleNamespace(app=FastAPI())
    monkeypatch.setitem(sys.modules, live_questions._HTTP_SERVER, module)
    monkeypatch.setitem(context.farewell_folders, os.getpid(), [folder])
    live_questions._after_launch(None, None, SimpleNamespace(**server_args))
    return TestClient(module.app)


@pytest.mark.parametrize(
    ("canary", "key", "status"), [("log", None, 404), ("none", KEY, 404), ("log", KEY, 401)]
)
def test_routes_exist_with_a_canary_and_an_admin_key_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, canary: str, key: str | None, status: int
) -> None:
    http = launched(monkeypatch, tmp_path, kv_canary=canary, admin_api_key=key, api_key="x")
    assert http.get("/kv_canary/slot/5").status_code == status
    assert http.get("/kv_canary/request/ada").status_code == status


def test_a_second_launch_takes_the_place_of_the_first(tmp_path: Path) -> None:
    app, second = FastAPI(), tmp_path / "second"
    second.mkdir()
    add_routes(app, "old", QuestionWindow(tmp_path))
    add_routes(app, KEY, QuestionWindow(second))
    with answering(second):
        assert TestClient(app).get("/kv_canary/slot/5", headers=ADMIN).status_code == 200
    assert sum("kv_canary" in route.path for route in app.router.routes) == 2


# What may be asked


def test_a_slot_is_asked_by_number_and_pool(tmp_path: Path) -> None:
    with answering(tmp_path):
        http = client(tmp_path)
        found = http.get("/kv_canary/slot/17", headers=ADMIN).json()
        swa = http.get("/kv_canary/slot/17?pool=SWA", headers=ADMIN).json()
    assert found == {"ranks": [{"asked": {"slot": 17, "pool": "FULL"}}]}
    assert swa == {"ranks": [{"asked": {"slot": 17, "pool": "SWA"}}]}


@pytest.mark.parametrize(
    "path", ["slot/x", "slot/-1", "slot/1.5", "slot/%C2%B2", f"slot/{'9' * 19}", "slot/1?pool=C4"]
)
def test_what_is_no_slot_is_refused_before_a_scheduler_hears_of_it(
    tmp_path: Path, path: str
) -> None:
    found = client(tmp_path).get(f"/kv_canary/{path}", headers=ADMIN)
    assert found.status_code == 400
    assert found.json()["error"].startswith("expected ")


@pytest.mark.parametrize(
    ("path", "request_id"),
    [
        ("ada", "ada"),
        ("a%2Fb%3Fc", "a/b?c"),
        ("chat%20%1B%5B2J", "chat \x1b[2J"),
        ("%C3%A9%0A%0Db%0A", "é\n\rb\n"),
        ("x" * 1024, "x" * 1024),
        ("%F0%9F%90%A6" * 1024, "🐦" * 1024),
    ],
    ids=("plain", "path", "escape", "text", "long", "wide"),
)
def test_a_request_id_may_be_any_text(tmp_path: Path, path: str, request_id: str) -> None:
    with answering(tmp_path):
        found = client(tmp_path).get(f"/kv_canary/request/{path}", headers=ADMIN)
    assert found.json() == {"ranks": [{"asked": {"request_id": request_id}}]}
    assert found.text.isascii()
    assert "\x1b" not in found.text


@pytest.mark.parametrize("path", ["", "x" * 1025])
def test_a_request_id_has_a_length(tmp_path: Path, path: str) -> None:
    found = client(tmp_path).get(f"/kv_canary/request/{path}", headers=ADMIN)
    assert found.status_code == 400


# Several processes, and those that do not answer


def test_all_processes_of_the_node_are_asked(tmp_path: Path) -> None:
    with answering(tmp_path), answering(tmp_path, name="2"):
        found = client(tmp_path).get("/kv_canary/slot/5", headers=ADMIN)
    assert len(found.json()["ranks"]) == 2


def unknown(question: Mapping[str, Any]) -> Answer:
    raise Unanswerable(404, "no such request")
    yield


def test_a_request_is_unknown_only_if_no_rank_knows_it(tmp_path: Path) -> None:
    with answering(tmp_path, unknown):
        missing = client(tmp_path).get("/kv_canary/request/ada", headers=ADMIN)
        with answering(tmp_path, name="2"):
            found = client(tmp_path).get("/kv_canary/request/ada", headers=ADMIN)
    assert (missing.status_code, missing.json()) == (404, {"error": "no such request"})
    assert (found.status_code, len(found.json()["ranks"])) == (200, 1)


def test_without_a_process_nobody_answers(tmp_path: Path) -> None:
    found = client(tmp_path).get("/kv_canary/slot/5", headers=ADMIN)
    assert (found.status_code, "see the server's log" in found.text) == (503, True)


def test_a_process_that_hangs_is_not_waited_for_ever(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "77.sock"))
    listener.listen()
    desk = QuestionDesk(echo)  # nobody attends
    thread = threading.Thread(target=serve, args=(listener, desk))
    thread.start()
    try:
        late = client(tmp_path, wait_s=0.2).get("/kv_canary/slot/5", headers=ADMIN)
        with answering(tmp_path):
            rest = client(tmp_path, wait_s=2.0).get("/kv_canary/slot/5", headers=ADMIN)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(30)
    assert (late.status_code, "process 77 is in a long step" in late.text) == (504, True)
    assert [set(rank) for rank in rest.json()["ranks"]] == [{"asked"}, {"error"}]


def test_a_process_that_has_died_gives_no_answer(tmp_path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "78.sock"))
    dead.close()
    found = client(tmp_path).get("/kv_canary/slot/5", headers=ADMIN)
    assert (found.status_code, "has ended" in found.text) == (504, True)


def test_few_questions_are_answered_at_a_time(tmp_path: Path) -> None:
    goes_on = threading.Event()

    def slow(question: Mapping[str, Any]) -> Answer:
        goes_on.wait(30)
        return (yield from echo(question))

    statuses: list[int] = []
    app = FastAPI()
    add_routes(app, KEY, QuestionWindow(tmp_path, 30.0))
    with answering(tmp_path, slow), TestClient(app) as http:  # one event loop for all

        def ask() -> None:
            statuses.append(http.get("/kv_canary/slot/5", headers=ADMIN).status_code)

        threads = [threading.Thread(target=ask) for _ in range(live_questions.MAX_AT_A_TIME + 1)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while not statuses and time.monotonic() < deadline:
            time.sleep(0.01)
        assert statuses == [429]
        goes_on.set()
        for thread in threads:
            thread.join(30)
        assert sorted(statuses) == [200] * live_questions.MAX_AT_A_TIME + [429]
        assert http.get("/kv_canary/slot/5", headers=ADMIN).status_code == 200


# The scheduler process


def question(desk: QuestionDesk, wait_s: float = 30.0, **fields: Any) -> list[Any]:
    """Asked from another thread; the answer once there is one."""
    answers: list[Any] = []
    ask = desk.ask
    thread = threading.Thread(
        target=lambda: answers.append(ask(fields, time.monotonic() + wait_s)), daemon=True
    )
    thread.start()
    while not desk._waiting and thread.is_alive():
        time.sleep(0.001)
    return answers


def awaited(answers: list[Any]) -> Any:
    deadline = time.monotonic() + 30
    while not answers and time.monotonic() < deadline:
        time.sleep(0.001)
    return answers[0]


class _Copy:
    """A device copy under way."""

    def __init__(self) -> None:
        self.arrived, self.waited = False, False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited = True


def test_the_scheduler_goes_on_while_a_copy_is_under_way() -> None:
    copy, went_on = _Copy(), []

    def begin(asked: Mapping[str, Any]) -> Answer:
        yield FutureTensors((), copy)
        went_on.append(True)
        return {}

    desk = QuestionDesk(begin)
    answers = question(desk)
    desk.attend()
    desk.attend()
    assert (answers, went_on, copy.waited) == ([], [], False)
    copy.arrived = True
    desk.attend()
    assert awaited(answers) == {"status": 200, "body": {}}
    answers, copy.arrived = question(desk), False
    desk.attend(idle=True)
    assert (awaited(answers)["status"], copy.waited) == (200, True)


@pytest.mark.parametrize("mode", [CanaryMode.LOG, CanaryMode.RAISE])
def test_an_error_in_an_answer_reaches_neither_scheduler_nor_client(
    mode: CanaryMode, caplog: pytest.LogCaptureFixture
) -> None:
    def begin(asked: Mapping[str, Any]) -> Answer:
        yield ARRIVED
        raise RuntimeError("secret")

    context.managers.append(ManagerRig(mode).manager)
    desk = QuestionDesk(begin)
    context.attend_questions = desk.attend
    answers = question(desk)
    scheduler.after_idle(None, None)
    assert awaited(answers)["status"] == 500
    assert "secret" not in json.dumps(answers)
    assert "secret" in caplog.text
    assert context.managers[0].armed


def test_a_question_that_nobody_waits_for_is_not_answered() -> None:
    begun: list[Any] = []
    desk = QuestionDesk(lambda asked: begun.append(asked) or echo(asked))
    assert awaited(question(desk, wait_s=0.0)) is None
    desk.attend()
    assert begun == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"x" * (1 << 15),
        b'{"question": 1}\n',
        b"[" * 16000 + b"\n",
        b'{"question": {}, "until": 1e999}\n',
    ],
    ids=lambda line: repr(line[:40]),
)
def test_what_is_no_question_does_not_end_the_thread(tmp_path: Path, line: bytes) -> None:
    with answering(tmp_path):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(tmp_path / "1.sock"))
            stranger.sendall(line)
        assert client(tmp_path).get("/kv_canary/slot/5", headers=ADMIN).status_code == 200


def test_a_process_without_free_descriptors_takes_questions_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system reserves one for a connection before it waits for it: the first one is still accepted."""
    before, path = resource.getrlimit(resource.RLIMIT_NOFILE), str(tmp_path / "1.sock")
    asked = {"question": {"slot": 5}, "until": time.monotonic() + 30}
    first, second = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with answering(tmp_path), first, second:
        second.settimeout(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            first.connect(path)
            first.sendall(b"\n")
            second.connect(path)
            deadline = time.monotonic() + 30
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(2 * question_desk.RETRY_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        second.sendall(json.dumps(asked).encode() + b"\n")
        with second.makefile("rb") as stream:
            assert json.loads(stream.readline())["status"] == 200
    (said,) = [record.getMessage() for record in caplog.records]
    assert "kv-canary takes no live questions for now: OSError: [Errno 24]" in said


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process whose canary answers questions, with a request in row 1."""
    rig = ManagerRig()
    rig.result(rig.extend(1, range(70001, 70021)))
    context.add(rig.manager, rig)
    with monkeypatch.context() as patch:
        patch.setenv(farewell.FOLDER_ENV, "")
        farewell._before_launch(None, SimpleNamespace(kv_canary="log"))
        folder = Path(os.environ[farewell.FOLDER_ENV])
        install_question_desk(SimpleNamespace(admin_api_key=KEY))
    yield folder
    farewell._before_kill(os.getpid(), include_parent=False)
    assert not folder.exists()


def test_answers_come_from_the_managers_and_hold_no_token(installed: Path) -> None:
    assert stat.S_IMODE(installed.stat().st_mode) == 0o700
    http, found = client(installed), []

    def ask() -> None:
        for path in ("slot/6", "request/req-1", "slot/0", "request/nobody"):
            found.append(http.get(f"/kv_canary/{path}", headers=ADMIN))

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < deadline:
        scheduler.after_idle(None, None)
        time.sleep(0.001)
    assert [answer.status_code for answer in found] == [200, 200, 400, 404]
    (slot,) = found[0].json()["ranks"]
    (request,) = found[1].json()["ranks"]
    assert slot["groups"][0]["writer"]["request_id"] == "req-1"
    assert slot["groups"][0]["records"]["K_HEAD"]["token"] is None
    assert (request["row"], request["length"]) == (1, 20)
    assert "7000" not in found[0].text + found[1].text


@pytest.mark.parametrize(("key", "folder"), [(None, True), (KEY, False)])
def test_without_a_key_or_a_main_process_there_is_no_desk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str | None, folder: bool
) -> None:
    monkeypatch.delenv(farewell.FOLDER_ENV, raising=False)
    if folder:
        monkeypatch.setenv(farewell.FOLDER_ENV, str(tmp_path))
    install_question_desk(SimpleNamespace(admin_api_key=key))
    assert context.attend_questions is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_socket_is_said_and_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv(farewell.FOLDER_ENV, str(deep))
    with caplog.at_level(logging.WARNING, logger=question_desk.logger.name):
        install_question_desk(SimpleNamespace(admin_api_key=KEY))
    assert context.attend_questions is None
    assert "kv-canary answers no live questions: cannot make the socket" in caplog.text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
