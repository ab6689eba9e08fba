"""A prefill's inputs, kept for checks after its layers."""

from __future__ import annotations

import torch

from ...plan.kept_inputs import BEGIN, PER_TOKEN
from ...state import CanaryDeviceState
from .host import array, longs


def keep_inputs(
    input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, state: CanaryDeviceState
) -> None:
    """Copy the inputs to `state.inputs`; arguments as of `triton.inputs.keep_inputs`."""
    words = array(state.inputs.words)
    kept = words[BEGIN:].reshape(PER_TOKEN, -1)
    for row, values in zip(kept, (input_ids, positions, slots), strict=True):
        row[: values.shape[0]] = longs(values)
    words[0] = array(state.inputs.done)[0]
