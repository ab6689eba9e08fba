"""Where the layers of a captured forward end: the model calls its LogitsProcessor, which runs the LM head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..launch.launcher import is_capturing
from ..runner.manager import CanaryManager

__all__ = ["bracket", "logits_processor_of"]


def logits_processor_of(model: Any) -> Any | None:
    """The LogitsProcessor of `model`. None if it has none or several: then the end of the layers is not known."""
    from sglang.srt.layers.logits_processor import LogitsProcessor

    found = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return found[0] if len(found) == 1 else None


def bracket(
    manager: CanaryManager, batch: Any, logits_processor: Any | None
) -> AbstractContextManager[None]:
    """`manager`'s bracket of one `model.forward`. Of a captured one, the manager also learns where the layers end."""
    own = manager.bracket_model_forward(batch)
    if logits_processor is None or not is_capturing():
        return own
    return _with_end_of_layers(own, manager, logits_processor)


@contextmanager
def _with_end_of_layers(
    own: AbstractContextManager[None], manager: CanaryManager, logits_processor: Any
) -> Iterator[None]:
    hook = logits_processor.register_forward_pre_hook(lambda *_: manager.layers_have_run())
    try:
        with own:
            yield
    finally:
        hook.remove()
