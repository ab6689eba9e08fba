"""Hooks on ModelRunner: bracket every forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runner.manager import CanaryManager
from . import after_layers
from .anchors import update_anchors
from .context import context
from .expected_tokens import expected_tokens_of
from .guard import attempt, attempt_aside
from .hook_spec import HookSpec, HookType
from .model_forward import wrap_forward


def wrap_model_forward(model: Any, manager: CanaryManager, compiled: bool = False) -> None:
    """Bracket `model.forward` on the instance, so that captured graphs hold the launches too.

    `compiled`: SGLang may compile the model. Then nothing is put within `model.forward`.
    """
    logits_processor = None if compiled else after_layers.logits_processor_of(model)
    wrap_forward(model, lambda batch: after_layers.bracket(manager, batch, logits_processor))


def _around_forward(
    original: Callable[..., Any], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    manager = context.by_runner.get(id(model_runner))
    if manager is None or manager.identity.role == "draft":
        return original(model_runner, forward_batch, *args, **kwargs)
    # `is_decode` is a call. The requests of both have been prefilled, or have arrived.
    decodes = forward_batch.forward_mode._name_ in ("DECODE", "TARGET_VERIFY")
    if not decodes and forward_batch.forward_mode.is_extend():
        attempt(update_anchors, context.managers, context.requests)
    if context.states is not None:
        context.states.note_forward(forward_batch, context.requests)
    expected = None
    if not decodes:  # it has none
        expected = attempt_aside(expected_tokens_of, manager, forward_batch, context.requests)
    with manager.with_ops_outside_graph(
        maybe_inaccurate_forward_batch=forward_batch, expected=expected
    ):
        return original(model_runner, forward_batch, *args, **kwargs)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
HOOKS = (HookSpec(f"{_RUNNER}.forward", _around_forward, HookType.AROUND, "every forward"),)
