"""SGLang's checksum of what a prefill server sends (`--disaggregation-enable-kv-checksum`) leaves records out.

It is of KV and of states, by the slots of a request. Records are beside the states and have other slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from ..disaggregation import RecordComponent
from ..hook_spec import HookSpec, HookType

__all__ = ["HOOKS"]

_CHECKSUMS = "SGLang's checksum of transferred KV, which would take records for a state"


def _states(components: Sequence[Any]) -> list[Any]:
    return [each for each in components if not isinstance(each, RecordComponent)]


def _around_signature(original: Callable[[Any], int], kv_args: Any) -> int:
    """Equal on servers with and without the canary: SGLang compares nothing between unequal ones."""
    plain = copy.copy(kv_args)
    plain.state_item_lens = _states(kv_args.state_item_lens)
    return original(plain)


def _around_init(
    original: Callable[..., None],
    computer: Any,
    device: Any,
    kv_data_ptrs: Sequence[int],
    kv_item_lens: Sequence[int],
    state_data_ptrs: Sequence[Any] = (),
    state_item_lens: Sequence[Any] = (),
) -> None:
    states = _states(state_data_ptrs), _states(state_item_lens)
    original(computer, device, kv_data_ptrs, kv_item_lens, *states)


def _hooks() -> tuple[HookSpec, ...]:
    """0.5.22 has no checksum."""
    from sglang.srt.disaggregation import utils

    if not hasattr(utils, "kv_layout_signature"):
        return ()
    package = "sglang.srt.disaggregation"
    return (
        HookSpec(
            f"{package}.utils.kv_layout_signature", _around_signature, HookType.AROUND, _CHECKSUMS
        ),
        HookSpec(
            f"{package}.checksum.KvChecksumComputer.__init__",
            _around_init,
            HookType.AROUND,
            _CHECKSUMS,
        ),
    )


HOOKS = _hooks()
