"""Whether a model leaves its inputs alone. Gemma counts its positions up in place, and LLaVA clamps its input ids."""

from __future__ import annotations

import torch

from ..plan.plan_input import ForwardPlan


class InputWatch:
    """Of the forwards of one runner, by the version counters that torch keeps of its tensors.

    Until a forward has been watched, nothing is known, and `inputs_stay` is False.
    """

    def __init__(self) -> None:
        self.inputs_stay = False
        self._has_changed = False
        self._before: tuple[int, ...] | None = None

    def begin(self, plan: ForwardPlan) -> None:
        """Before the layers."""
        self._before = _versions(plan)

    def end(self, plan: ForwardPlan) -> None:
        """After the layers. One change is enough: from then on `inputs_stay` is False."""
        before, self._before = self._before, None
        if before is None or before != _versions(plan):
            self._has_changed = True
        self.inputs_stay = not self._has_changed


def _versions(plan: ForwardPlan) -> tuple[int, ...] | None:
    """Of all that HEAD reads of the batch. None: torch does not count, as for tensors made in its inference mode."""
    verify, write = plan.verify, plan.write
    read = (
        verify.rows,
        verify.base_lens,
        write.input_ids,
        write.positions,
        write.out_cache_loc,
        write.swa_out_cache_loc,
        write.parents,
    )
    tensors: list[torch.Tensor] = [tensor for tensor in read if tensor is not None]
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)
