"""A plugin of SGLang, which the command adds to the servers that it starts: breaks and mends the scheduler's parts.

Commands come through the control folder of fault injection, under an address of their own.
"""

from __future__ import annotations

from typing import Any

from ..perturb.control_folder import Command, ControlFolder, address_of
from .bench import AWAIT, BREAK, ROLE, Bench
from .table import FAULTS

__all__ = ["stage_faults"]


def stage_faults() -> None:
    """SGLang's plugin: takes commands at the start of each scheduler iteration."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.recv_requests"
    HookRegistry.register(target, _Desk(), HookType.BEFORE)


class _Desk:
    """Executes commands in the scheduler process. AWAIT is answered once the request has so many output tokens."""

    __name__ = "stage_faults"

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self._folder: ControlFolder | None = None
        self._waiting: list[Command] = []

    def __call__(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._bench is None or self._folder is None:
            from sglang.srt.environ import envs

            self._bench = Bench(scheduler)
            folder = envs.SGLANG_KV_CANARY_PERTURB_DIR.get()
            self._folder = ControlFolder(folder, address_of(ROLE, 0))
        self._waiting += self._folder.take()
        still, self._waiting = self._waiting, []
        for command in still:
            try:
                answer = _execute(self._bench, command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            if answer is None:
                self._waiting.append(command)
            else:
                self._folder.reply(command.name, answer)


def _execute(bench: Bench, command: Command) -> dict[str, Any] | None:
    """The answer; None: not yet."""
    if command.fault == AWAIT:
        request = bench.running(command.args["name"])
        far = request is not None and len(request.output_ids) >= command.args["tokens"]
        return {"detail": "running"} if far else None
    strikes = bench.mend()
    if command.fault == BREAK:
        bench.renew_scenes()
        FAULTS[command.args["id"]].breaks(bench)
        return {"detail": "broken"}
    return {"detail": "mended", "strikes": strikes}
