"""Records that come into a pool together with their bytes, and not from a forward of this pool."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .buffer_group import CanaryBufferGroup
from .pool_kind import PoolKind


@dataclass(frozen=True, slots=True)
class LoadBack:
    """Records for slots that have been handed out. Another stream copies their bytes."""

    group: CanaryBufferGroup
    slots: torch.Tensor  # int64[n], in the group's slot space, on the device
    words: torch.Tensor  # int64[n, halves, RECORD_WORDS], on the device
    complete_after: (
        torch.Tensor
    )  # int64[1]: the last forward that had begun when all bytes were there
    complete: Any | None = (
        None  # event of the stream that writes `complete_after`; None: written already
    )
    # Whether forwards run on while the bytes come. Otherwise the next one waits for them.
    in_background: bool = False

    @property
    def bytes_are_awaited(self) -> bool:
        """Whether nothing may read the slots yet, nor wait for them."""
        return self.in_background and self.complete is not None and not self.complete.query()

    @property
    def pool_kind(self) -> PoolKind:
        return self.group.allocator_kind

    def land(self, backend: ModuleType) -> Landed:
        """Write the records on the current stream. HEAD and TAIL get the same, without content at HEAD."""
        if self.slots.is_cuda:
            stream = torch.cuda.current_stream(self.slots.device)
            for tensor in (self.slots, self.words, self.complete_after):
                tensor.record_stream(stream)
        before = torch.empty_like(self.slots)
        backend.write_loaded(self.slots, self.words, before, self.group)
        return Landed(self, before)


@dataclass(frozen=True, slots=True)
class Landed:
    """A load whose records are written. Its bytes are complete after the next forward, or come in the background."""

    load: LoadBack
    before: torch.Tensor  # int64[n]: the slots' last writers before

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What `expose_late_writes` reads."""
        a = self.load
        return a.slots, a.words, self.before, a.complete_after

    def expose_late_writes(self, backend: ModuleType) -> None:
        """Take back the records of slots that a forward has written after all bytes were there.

        A queued forward may belong to a request that has ended. Its slots may have been handed out again. If it began
        after the copy, it has replaced bytes that arrived. The slot then counts as not written since its allocation.
        That forward is its last writer.
        """
        a = self.load
        if a.complete is not None:
            torch.get_device_module(a.slots.device).current_stream().wait_event(a.complete)
        backend.expose_late_writes(a.slots, a.words, self.before, a.complete_after, a.group)
