"""Whether a model leaves its inputs alone. Gemma counts its positions up in place, and LLaVA clamps its input ids."""

from __future__ import annotations

import torch

from ..plan.plan_input import ForwardPlan


class InputWatch:
    """Watches forwards of one kind: what HEAD reads of the batch is compared before and after the layers.

    The version counters that torch keeps of tensors show changes by its own operators. They miss those by kernels that
    torch does not know to change their arguments. Values show these, unless the change leaves the values as they are.
    Until a forward has been watched, nothing is known, and `inputs_stay` is False.
    """

    def __init__(self) -> None:
        self.inputs_stay = False
        self._has_changed = False
        self._read: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] | None = None
        self._values: tuple[torch.Tensor, ...] = ()

    def begin(self, plan: ForwardPlan, values: bool) -> None:
        """Before the layers. `values`: compare values, too, which waits for the device at the end."""
        self._read = _what_head_reads(plan)
        self._versions = _versions(self._read)
        self._values = tuple(tensor.clone() for tensor in self._read) if values else ()

    def end(self) -> None:
        """After the layers. One change is enough: from then on `inputs_stay` is False.

        Torch counts no versions of tensors made in its inference mode. A forward with such inputs says nothing.
        """
        read, versions, values = self._read, self._versions, self._values
        self._read, self._versions, self._values = (), None, ()
        if versions is None:
            return
        same = all(map(torch.equal, read, values)) if values else True
        if versions != _versions(read) or not same:
            self._has_changed = True
        self.inputs_stay = not self._has_changed


def _what_head_reads(plan: ForwardPlan) -> tuple[torch.Tensor, ...]:
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
    return tuple(tensor for tensor in read if tensor is not None)


def _versions(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...] | None:
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return tuple(tensor._version for tensor in tensors)
