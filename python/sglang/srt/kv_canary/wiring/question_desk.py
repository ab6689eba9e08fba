"""The scheduler process's side of live questions: a thread takes them, the scheduler answers between steps.

A question is one line of JSON on a Unix domain socket, the answer another one. The socket lies in the folder that the
main process has made for its scheduler processes, which nobody else can enter. The thread only waits: everything that
the canary knows is read by the scheduler's own thread.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..analysis.redaction import Redaction
from ..reports.async_copy import FutureTensors
from ..reports.complaints import Complaints
from ..reports.internal_errors import describe_error
from ..runner.live_answers import Answer, LiveAnswers, Unanswerable
from .context import context
from .farewell import FOLDER_ENV
from .surroundings import SchedulerSurroundings

__all__ = ["ANSWERED", "QuestionDesk", "install_question_desk", "serve"]

logger = logging.getLogger(__name__)

ANSWERED = 200
MAX_QUESTION = 1 << 14  # bytes
READ_S = 5.0  # for the main process, to send a question
MOST_WAIT_S = 60.0  # for an answer, whatever the question says
RETRY_S = 0.5  # after an error of the system, such as no free file descriptor
_CLOSED = (errno.EBADF, errno.EINVAL)  # of `accept`, once the socket is closed or shut down


@dataclass(slots=True)
class _Asked:
    """A question under way between the two threads."""

    question: Mapping[str, Any]
    until: float  # time.monotonic() at which nobody waits for the answer any more
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)

    def reply(self, status: int, body: Mapping[str, Any]) -> None:
        self.answer = {"status": status, "body": body}
        self.done.set()


class QuestionDesk:
    """Hands questions from the socket's thread to the scheduler's, one at a time."""

    def __init__(self, begin: Callable[[Mapping[str, Any]], Answer]) -> None:
        """`begin`: the answer to a question. It may raise `Unanswerable`, also later."""
        self._begin = begin
        self._waiting: deque[_Asked] = deque()
        self._current: tuple[_Asked, Answer, FutureTensors] | None = None
        self._redaction = Redaction()

    def ask(self, question: Mapping[str, Any], until: float) -> dict[str, Any] | None:
        """The answer, as {"status", "body"}. None if there is none until `until`. Not for the scheduler's thread."""
        asked = _Asked(question, until)
        self._waiting.append(asked)
        return asked.answer if asked.done.wait(max(0.0, until - time.monotonic())) else None

    def attend(self, idle: bool = False) -> None:
        """Go on with answers. Never raises, and waits for the device only if the server is `idle`."""
        while self._waiting or self._current is not None:
            if self._current is None:
                asked = self._waiting.popleft()
                if time.monotonic() < asked.until:
                    self._go_on(asked, None)
                continue
            asked, answer, copy = self._current
            if idle:
                copy.wait()
            elif not copy.ready():
                return
            self._current = None
            self._go_on(asked, answer)

    def _go_on(self, asked: _Asked, answer: Answer | None) -> None:
        """Begin or continue an answer, up to the next copy that it waits for. No question may harm the scheduler."""
        try:
            answer = self._begin(asked.question) if answer is None else answer
            self._current = asked, answer, next(answer)
        except StopIteration as done:
            asked.reply(ANSWERED, self._redaction.apply(done.value))
        except Unanswerable as error:
            asked.reply(error.status, {"error": str(error)})
        except Exception as error:
            logger.error("kv-canary cannot answer a question: %s", describe_error(error))
            asked.reply(500, {"error": "kv-canary failed to answer; the server's log says why"})


def serve(listener: socket.socket, desk: QuestionDesk) -> None:
    """Pass on what connections to `listener` ask, one after the other, until it is closed."""
    complaints = Complaints()
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            complaints.log(f"takes no live questions for now: {describe_error(error)}")
            time.sleep(RETRY_S)
            continue
        # Who asked may be gone, or may send anything. A nested line ends in a RecursionError.
        with suppress(Exception), connection:
            _pass_on(connection, desk)


def _pass_on(connection: socket.socket, desk: QuestionDesk) -> None:
    connection.settimeout(READ_S)
    asked = json.loads(_line_of(connection))
    until = min(float(asked["until"]), time.monotonic() + MOST_WAIT_S)
    answer = desk.ask(asked["question"], until)
    if answer is not None:
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _line_of(connection: socket.socket) -> bytes:
    """Raises ValueError for a line that is too long or not complete."""
    with connection.makefile("rb") as stream:
        line = stream.readline(MAX_QUESTION)
    if not line.endswith(b"\n"):
        raise ValueError(f"expected one line of at most {MAX_QUESTION} bytes")
    return line


def install_question_desk(server_args: Any) -> None:
    """In a scheduler process whose canary is active. Without an admin key there are no questions."""
    folder = os.environ.get(FOLDER_ENV)
    if not getattr(server_args, "admin_api_key", None) or folder is None:
        return
    path = Path(folder, f"{os.getpid()}.sock")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        logger.warning(
            "kv-canary answers no live questions: cannot make the socket %s: %s. A shorter TMPDIR may help",
            path,
            error,
        )
        return
    oracle = None if context.target is None else context.target.token_oracle
    answers = LiveAnswers(context.managers, SchedulerSurroundings(oracle), context.history)
    desk = QuestionDesk(lambda question: _answer(answers, question))
    context.attend_questions = desk.attend
    threading.Thread(
        target=serve, args=(listener, desk), name="kv-canary questions", daemon=True
    ).start()


def _answer(answers: LiveAnswers, question: Mapping[str, Any]) -> Answer:
    if "slot" in question:
        return answers.slot(question["slot"], question["pool"])
    return answers.request(question["request_id"])
