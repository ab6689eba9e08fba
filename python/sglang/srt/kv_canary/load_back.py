"""Records that come into a pool together with their bytes, and not from a forward of this pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import record
from .buffer_group import CanaryBufferGroup, PoolKind, Side
from .record import Mode, State

_FORWARDS_AHEAD = (
    1 << 31
)  # a forward counter that is less than this far ahead of another one is later


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

    def land(self) -> Landed:
        """Write the records on the current stream. HEAD and TAIL get the same, without content at HEAD."""
        if self.slots.is_cuda:
            for tensor in (self.slots, self.words, self.complete_after):
                tensor.record_stream(torch.cuda.current_stream(self.slots.device))
        before = self._last_writers()
        for index, half in enumerate(self.group.halves):
            words = self.words[:, index]
            self.group.records(half, Side.TAIL)[self.slots] = words
            head = words.clone()
            head[:, record.WORD_CONTENT].masked_fill_(_state(words) == State.LIVE, 0)
            self.group.records(half, Side.HEAD)[self.slots] = head
        return Landed(self, before)

    def _last_writers(self) -> torch.Tensor:
        """int64[n]: writer word of the forward that wrote each slot last, 0 where none has."""
        present = self.group.k_tail[self.slots]
        state = _state(present)
        given_back = (state == State.FREED) | (state == State.ALLOCATED)
        content, writer = present[:, record.WORD_CONTENT], present[:, record.WORD_WRITER]
        return torch.where(given_back, content, writer)


@dataclass(frozen=True, slots=True)
class Landed:
    """A load whose records are written. Its bytes are complete after the next forward, or come in the background."""

    load: LoadBack
    before: torch.Tensor  # int64[n]: the slots' last writers before

    def expose_late_writes(self) -> None:
        """Take back the records of slots that a forward has written after all bytes were there.

        A queued forward may belong to a request that has ended. Its slots may have been handed out again. If it began
        after the copy, it has replaced bytes that arrived. The slot then counts as not written since its allocation.
        That forward is its last writer.
        """
        a = self.load
        if a.complete is not None:
            torch.get_device_module(a.slots.device).current_stream().wait_event(a.complete)
        ahead = (self.before - a.complete_after) & record.FORWARD_MASK
        late = (self.before != 0) & (ahead > 0) & (ahead < _FORWARDS_AHEAD)
        allocated = record.pack_writer(0, 0, Mode.FREE, State.ALLOCATED)
        for index, half in enumerate(a.group.halves):
            for side in (Side.HEAD, Side.TAIL):
                records = a.group.records(half, side)
                words = records[a.slots]
                writer = words[:, record.WORD_WRITER]
                theirs = late & (writer == a.words[:, index, record.WORD_WRITER])
                words[:, record.WORD_WRITER] = torch.where(theirs, allocated, writer)
                content = words[:, record.WORD_CONTENT]
                words[:, record.WORD_CONTENT] = torch.where(theirs, self.before, content)
                records[a.slots] = words


def _state(words: torch.Tensor) -> torch.Tensor:
    return (words[:, record.WORD_WRITER] >> record.WRITER_STATE_SHIFT) & 0xF
