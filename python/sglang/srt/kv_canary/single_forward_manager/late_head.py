"""HEAD of long prefills after their layers.

Until the layers begin, the GPU waits for the host. Once they are queued, the host has time. Such a HEAD reads copies of
the inputs that are made before the layers, and prefixes as they are after the layers.

Slots and rows may be given back and handed out again while the forward runs, by the schedule stream. Records of such
slots change on the forward stream only, with the next forward. So they change after this HEAD, as after its TAIL. A
late HEAD reads no table of SGLang's. It reads rows with a prefix only where they keep it until the result is there. A
request that is preempted gives its row back, so findings of it are moot, and its new slots are freed. What is wrong in
a row only until the layers have run is not seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..buffer_group import CanaryBufferGroup
from ..launch.launcher import Launcher
from ..plan.kept_inputs import KeptInputs

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

__all__ = ["LateHead", "head_can_wait"]


class LateHead:
    """Of one runner."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.can_wait = head_can_wait(launcher)

    def take(self, batch: ForwardBatch) -> KeptInputs | None:
        """What HEAD and TAIL of `batch` need after the layers. None: HEAD must run now."""
        if batch.extend_seq_lens is None or batch.extend_prefix_lens_cpu is None:
            return None
        launcher = self._launcher
        kept = launcher.state.inputs.of(batch)
        if kept is not None:
            inputs = batch.input_ids, batch.positions, batch.out_cache_loc
            launcher.backend.keep_inputs(*inputs, launcher.state)
        return kept


def head_can_wait(launcher: Launcher) -> bool:
    """Whether HEAD reads no table that the schedule stream changes while a forward runs, but rows."""
    return all(map(_can_wait, launcher.groups))


def _can_wait(group: CanaryBufferGroup) -> bool:
    """False where new slots are looked up in a table of SGLang's: freed ones are gone from it at once."""
    return group.swa_index_lut is None and group.slot_names is None
