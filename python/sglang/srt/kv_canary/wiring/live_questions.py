"""The main process's side of live questions: two HTTP routes, for holders of SGLang's admin key.

`GET /kv_canary/slot/{n}` and `GET /kv_canary/request/{rid}` ask every scheduler process on this node, over the sockets
of `question_desk`. They exist only with `--admin-api-key`. SGLang's middleware enforces the key. The routes check it
themselves, too: an application that serves SGLang's `app` in its own way may have no such middleware.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import is_asked_for
from ..reports.internal_errors import describe_error
from ..reports.violation import MAX_REQUEST_ID
from ..runner.live_answers import Unanswerable
from .context import context
from .hook_spec import HookSpec, HookType
from .question_desk import ANSWERED

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["HOOKS", "QuestionWindow", "add_routes"]

logger = logging.getLogger(__name__)

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
WAIT_S = 10.0  # for a scheduler process: it answers between two steps
MAX_AT_A_TIME = 4  # questions
MAX_ANSWER = 1 << 22  # bytes
MAX_DIGITS = 18
_POOLS = ("FULL", "SWA")


class QuestionWindow:
    """Asks the scheduler processes of this node. For one event loop."""

    def __init__(self, folder: Path, wait_s: float = WAIT_S) -> None:
        self._folder, self._wait_s = folder, wait_s
        self._open = 0

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """{"ranks": answers}. Raises `Unanswerable` if no process has one."""
        if self._open >= MAX_AT_A_TIME:
            raise Unanswerable(429, f"{MAX_AT_A_TIME} questions are being answered; try again")
        self._open += 1
        try:
            sockets = sorted(self._folder.glob("*.sock"))
            answers = await asyncio.gather(*(self._ask_one(s, question) for s in sockets))
        finally:
            self._open -= 1
        if not answers:
            raise Unanswerable(503, "no scheduler process takes questions; see the server's log")
        return {"ranks": self._merged(answers)}

    async def _ask_one(self, path: Path, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of one process, as {"status", "body"}."""
        line = json.dumps({"question": question, "until": time.monotonic() + self._wait_s})
        try:
            return json.loads(await asyncio.wait_for(_exchange(path, line), self._wait_s))
        except (OSError, ValueError, asyncio.TimeoutError):
            problem = (
                f"no answer within {self._wait_s:g} s: the scheduler process {path.stem} is in a long step, hangs or "
                "has ended"
            )
            return {"status": 504, "body": {"error": problem}}

    def _merged(self, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What was answered, and who did not answer at all. Raises `Unanswerable` if nothing was."""
        if not any(answer["status"] == ANSWERED for answer in answers):
            worst = max(answers, key=lambda answer: answer["status"])
            raise Unanswerable(worst["status"], worst["body"]["error"])
        # A data parallel rank that never saw the request is no part of its answer.
        return [answer["body"] for answer in answers if answer["status"] not in (400, 404)]


async def _exchange(path: Path, line: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_ANSWER)
    try:
        writer.write(line.encode() + b"\n")
        await writer.drain()
        return await reader.readline()
    finally:
        writer.close()


def add_routes(app: Any, admin_api_key: str, window: QuestionWindow) -> None:
    """Add the routes to a FastAPI or Starlette `app`, instead of those of an earlier launch."""
    from starlette.convertors import PathConvertor, register_url_convertor
    from starlette.routing import Route

    from sglang.srt.utils.auth import AuthLevel, auth_level, decide_request_auth

    class AnyText(PathConvertor):
        regex = "(?s:.*)"  # a request id may have line breaks, too

    register_url_convertor("kv_canary_text", AnyText())

    def is_admin(request: Request) -> bool:
        # The path of the scope: older releases of Starlette make that of the URL of the client's Host header.
        return decide_request_auth(
            method=request.method,
            path=request.scope["path"],
            authorization_header=request.headers.get("Authorization"),
            api_key=None,
            admin_api_key=admin_api_key,
            auth_level=AuthLevel.ADMIN_FORCE,
        ).allowed

    def route(path: str, question_of: Callable[[Request], dict[str, Any]]) -> Route:
        @auth_level(AuthLevel.ADMIN_FORCE)
        async def answer(request: Request) -> Response:
            if not is_admin(request):
                return _json(401, {"error": "Unauthorized"})
            try:
                return _json(ANSWERED, await window.ask(question_of(request)))
            except Unanswerable as error:
                return _json(error.status, {"error": str(error)})

        return Route(path, answer, methods=["GET"])

    questions = {
        "/kv_canary/slot/{slot}": _slot_question,
        "/kv_canary/request/{request_id:kv_canary_text}": _request_question,
    }
    routes = app.router.routes
    for old in [known for known in routes if getattr(known, "path", None) in questions]:
        routes.remove(old)
    routes.extend(route(path, question) for path, question in questions.items())


def _slot_question(request: Request) -> dict[str, Any]:
    slot, pool = request.path_params["slot"], request.query_params.get("pool", _POOLS[0])
    if not (slot.isascii() and slot.isdigit() and len(slot) <= MAX_DIGITS):
        raise Unanswerable(400, "expected the number of a slot, such as /kv_canary/slot/17")
    if pool not in _POOLS:
        raise Unanswerable(400, f"expected pool={' or pool='.join(_POOLS)}")
    return {"slot": int(slot), "pool": pool}


def _request_question(request: Request) -> dict[str, Any]:
    request_id = request.path_params["request_id"]
    if not 0 < len(request_id) <= MAX_REQUEST_ID:
        raise Unanswerable(
            400, f"expected a request id of 1 to {MAX_REQUEST_ID} characters, percent-encoded"
        )
    return {"request_id": request_id}


def _json(status: int, body: Mapping[str, Any]) -> Response:
    """ASCII only: request ids are whatever clients sent."""
    from starlette.responses import Response

    return Response(json.dumps(body) + "\n", status, media_type="application/json")


def _after_launch(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Engine._launch_subprocesses. SGLang's HTTP server is about to start if its module is loaded."""
    server_args = kwargs.get("server_args") or args[1]
    key, module = getattr(server_args, "admin_api_key", None), sys.modules.get(_HTTP_SERVER)
    folders = context.farewell_folders.get(os.getpid())
    if not key or module is None or not folders or not is_asked_for(server_args):
        return
    try:
        add_routes(module.app, key, QuestionWindow(folders[-1]))  # of the engine just launched
    except Exception as error:  # what protects the server works without the routes
        logger.error("kv-canary answers no live questions: %s", describe_error(error))


HOOKS = (
    HookSpec(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        _after_launch,
        HookType.AFTER,
        "answers to live questions",
    ),
)
