"""Host side of keeping a prefill's inputs."""

from __future__ import annotations

import torch

from ...host_code import HOST
from ...state import CanaryDeviceState
from .device.inputs_kernel import keep_inputs_kernel
from .kernel_launcher import FixedArguments, KernelLauncher
from .launch import dense

BLOCK = 1024
_launch = KernelLauncher(keep_inputs_kernel)


def keep_inputs(
    input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, state: CanaryDeviceState
) -> None:
    """Copy int[n] of each to `state.inputs`, and with them the number of the last forward whose TAIL ran.

    n is at most the capacity there. The host does little here: the GPU waits for it.
    """
    memory = state.inputs
    fixed = HOST.prepared_for(
        state.prepared,
        "inputs",
        (),
        lambda: FixedArguments(
            {
                "words": memory.words,
                "done": memory.done,
                "capacity": memory.capacity,
                "BLOCK": BLOCK,
            }
        ),
    )
    tokens = input_ids.shape[0]
    arguments = {
        "input_ids": _numbers(input_ids),
        "positions": _numbers(positions),
        "slots": _numbers(slots),
        "num_tokens": tokens,
    }
    _launch((-(-tokens // BLOCK),), 4, arguments, fixed)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """As int64, which they are as a rule: a variant for each mixture of types would have to be compiled."""
    return dense(values if values.dtype is torch.int64 else values.long())
