"""Work around `model.forward`, kept outside of what torch.compile compiles.

The checks launch kernels of their own and read Python state that changes with each forward. A compiler that traced
them would make them a part of the model, or compile the model again each time. So a compiled model is the bare one, and
the work is done around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .guard import attempt

__all__ = ["around_patch_model", "forward_batch_of", "surrounded", "wrap_forward"]

_MARK = "kv_canary_wrapped"

Around = Callable[[Any], AbstractContextManager[Any]]  # ForwardBatch -> what surrounds its forward


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """What a wrapper adds to `inner`. `wrapper`: wrappers of others take over attributes, so it names the right one."""

    wrapper: Callable[..., Any]
    inner: Callable[..., Any]
    around: Around


def wrap_forward(model: Any, around: Around) -> None:
    """`around` surrounds each later call of `model.forward`, also under capture. The last wrapper is the outermost."""
    model.forward = _wrap(model.forward, around)


def _wrap(inner: Callable[..., Any], around: Around) -> Callable[..., Any]:
    # SGLang inspects the signature of model.forward.
    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = attempt(forward_batch_of, args, kwargs)
        if batch is None:
            return inner(*args, **kwargs)
        with around(batch):
            return inner(*args, **kwargs)

    setattr(forward, _MARK, _Wrapped(forward, inner, around))
    return forward


def forward_batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    batch_class = _batch_class()
    for value in (*args, *kwargs.values()):
        if isinstance(value, batch_class):
            return value
    raise TypeError(
        "kv-canary: model.forward was called without a ForwardBatch, so its K/V cannot be checked"
    )


@functools.cache
def _batch_class() -> type:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch


@contextmanager
def around_patch_model(
    original: Callable[..., Any], model: Any, enable_compile: bool, *args: Any, **kwargs: Any
) -> Iterator[Callable[..., Any]]:
    """Around SGLang's `patch_model`, which yields `model.forward`, compiled or not: compile the bare forward."""
    wrapped = model.forward
    bare, arounds = _unwrap(wrapped)
    if not (enable_compile and arounds):
        with original(model, enable_compile, *args, **kwargs) as forward:
            yield forward
        return
    model.forward = bare
    try:
        with original(model, enable_compile, *args, **kwargs) as forward:
            model.forward = wrapped
            for around in arounds:
                forward = _wrap(forward, around)
            yield forward
    finally:
        model.forward = wrapped


@contextmanager
def surrounded(model: Any, forward_batch: Any) -> Iterator[None]:
    """All that surrounds `model.forward`, around code of SGLang that runs the model's layers without it."""
    with ExitStack() as stack:
        for around in reversed(_unwrap(model.forward)[1]):
            stack.enter_context(around(forward_batch))
        yield


def _unwrap(forward: Callable[..., Any]) -> tuple[Callable[..., Any], list[Around]]:
    """The forward without our wrappers, and what they add, the innermost first."""
    arounds: list[Around] = []
    while (mark := getattr(forward, _MARK, None)) is not None and mark.wrapper is forward:
        arounds.insert(0, mark.around)
        forward = mark.inner
    return forward, arounds
