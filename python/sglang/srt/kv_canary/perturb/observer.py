"""Executes the commands of the control folder at step boundaries of one model runner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.environ import envs

from ..runner.step_observer import Observed, StepObserver
from ..wiring.context import context
from ..wiring.model_forward import forward_batch_of
from ..wiring.refusals import splits_attention
from .control_folder import Command, ControlFolder, address_of
from .fault import ArgumentError
from .faults import FAULTS, WITHDRAW
from .scene import Outcome, Scene, readers_of

if TYPE_CHECKING:
    from ..runner.manager import CanaryManager
    from ..runner.ranks import Ranks


class PerturbObserver(StepObserver):
    """Takes commands when the scheduler is idle and right before each forward.

    It wraps `forward` of the model runner's instance, because faults need the batch. A command waits while something
    that it names does not exist yet.
    """

    def __init__(self, perturb_dir: str, model_runner: Any, ranks: Ranks) -> None:
        role = "draft" if model_runner.is_draft_worker else "target"
        args = model_runner.server_args
        is_replica = not splits_attention(args)
        address = address_of(role, ranks.tp, ranks.pp, (is_replica and ranks.dp) or 0)
        self._folder = ControlFolder(perturb_dir, address)
        self._model_runner = model_runner
        self._waiting: dict[str, Command] = {}
        self._wrap_forward()

    def on_idle(self, _: Observed) -> None:
        self._take()
        manager = self._manager()
        if self._waiting and manager is not None:
            self._act(Scene(manager, self._model_runner, None, ()))

    def _manager(self) -> CanaryManager | None:
        return context.manager_of(self._model_runner)

    def _take(self) -> None:
        for command in self._folder.take():
            try:
                command = _checked(command)
            except ArgumentError as error:
                self._folder.reply(command.name, {"error": str(error)})
                continue
            if command.fault == WITHDRAW:
                self._withdraw(command)
            else:
                self._waiting[command.name] = command

    def _withdraw(self, command: Command) -> None:
        name = command.args["name"]
        known = self._waiting.pop(name, None) is not None
        answer = {"detail": f"withdrew {name}"} if known else {"error": f"{name} is not waiting"}
        self._folder.reply(command.name, answer)

    def _wrap_forward(self) -> None:
        original = self._model_runner.forward

        @functools.wraps(original)
        def forward(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
            manager = self._manager()
            self._take()
            if manager is None or not self._waiting:
                return original(forward_batch, *args, **kwargs)
            readers = readers_of(forward_batch, context.requests)
            outcomes = self._act(Scene(manager, self._model_runner, forward_batch, readers))
            try:
                with (
                    _HeadDamage(manager, self._model_runner.model, outcomes),
                    _batch_damage(manager, outcomes),
                ):
                    return original(forward_batch, *args, **kwargs)
            finally:
                for outcome in outcomes:
                    if outcome.after_forward is not None:
                        outcome.after_forward()

        self._model_runner.forward = forward

    def _act(self, scene: Scene) -> list[Outcome]:
        """Execute the commands that can run now, and answer them."""
        outcomes = []
        with _device_at_rest(scene.rows.device):
            executed = [(c, *_execute(c, scene)) for c in self._waiting.values()]
        for command, outcome, answer in executed:
            if answer is None:
                continue
            del self._waiting[command.name]
            self._folder.reply(command.name, answer)
            if outcome is not None:
                outcomes.append(outcome)
        return outcomes


def _checked(command: Command) -> Command:
    """`command` with its defaults filled in. Raises `ArgumentError` if it cannot be executed."""
    fault = FAULTS.get(command.fault)
    if fault is None:
        raise ArgumentError(f"no fault {command.fault[:40]!r}; known: {', '.join(FAULTS)}")
    args = fault.complete(command.args)
    if fault.breaks_accounting and envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE.get():
        raise ArgumentError(
            f"{fault.name}: SGLang's own leak check would end this server; start it with "
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE=0"
        )
    return replace(command, args=args)


@contextmanager
def _device_at_rest(device: torch.device) -> Iterator[None]:
    """Synchronise: faults touch data that both SGLang's schedule stream and its forward stream use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _execute(command: Command, scene: Scene) -> tuple[Outcome | None, dict[str, Any] | None]:
    """(outcome of the fault, answer). The answer is None if the command has to wait."""
    try:
        outcome = FAULTS[command.fault].act(scene, command.args)
        return outcome, None if outcome is None else outcome.as_answer()
    except Exception as error:
        return None, {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _batch_damage(manager: CanaryManager, outcomes: list[Outcome]) -> Iterator[None]:
    """Apply `before_head` damage to one forward, after everything that attention receives has been made."""
    damages = [o.before_head for o in outcomes if o.before_head is not None]
    if not damages:
        yield
        return
    bracket = manager.bracket_model_forward

    def damaged_bracket(forward_batch: Any) -> Any:
        while damages:
            damages.pop()(forward_batch)
        return bracket(forward_batch)

    manager.bracket_model_forward = damaged_bracket
    try:
        yield
    finally:
        del manager.bracket_model_forward


class _HeadDamage:
    """For one forward: applies `around_head` damage before the HEAD check and undoes it before the layers run.

    Eager forwards only: a graph replay does not call `model.forward`.
    """

    def __init__(self, manager: CanaryManager, model: Any, outcomes: list[Outcome]) -> None:
        self._manager, self._model = manager, model
        self._pairs = [o.around_head for o in outcomes if o.around_head is not None]
        self._undo: list[Callable[[], None]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        if not self._pairs:
            return
        # HEAD must not wait for the layers: the damage is gone by then.
        self._manager.late.open = False
        bracketed = self._model.forward

        @functools.wraps(bracketed)
        def forward(*args: Any, **kwargs: Any) -> Any:
            batch = forward_batch_of(args, kwargs)
            for apply, undo in self._pairs:
                apply(batch)
                self._undo.append(functools.partial(undo, batch))
            return bracketed(*args, **kwargs)

        self._bracketed, self._model.forward = bracketed, forward
        for child in self._model.children():
            self._handles.append(child.register_forward_pre_hook(self._before_layers))

    def _before_layers(self, *_: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def __exit__(self, *_: object) -> None:
        if not self._pairs:
            return
        self._before_layers()
        self._model.forward = self._bracketed
        for handle in self._handles:
            handle.remove()
