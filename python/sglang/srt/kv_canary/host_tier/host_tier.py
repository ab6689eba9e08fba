"""The records of host pages: written back, loaded and dropped with their pages, and compared with their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import record
from ..buffer_group import CanaryBufferGroup
from ..config import ContentMode
from ..kernels.layout import content_bytes_per_slot, slots_between_visits, turn_of
from ..load_back import LoadBack
from ..pool_kind import Side
from ..record import State
from ..reports.tier_finding import Finding
from ..reports.violation import HOST_TIER
from ..state import CanaryDeviceState
from .host_content import HostContent, Sources, refuse_unlike
from .host_records import HostRecords, SlotRecords
from .launches import Launches

# What a sector of mode `partial` takes from budgets: the CPU fetches one or two cache lines of 64 bytes.
HOST_SECTOR_BYTES = 128


class Part(NamedTuple):
    """What has one record for each slot: a half of a group."""

    group: CanaryBufferGroup
    half: str


class HostTier:
    """Beside the host pools of one slot space. Host slots are int64 on the CPU, device slots int64 on the device.

    `found` takes findings, from any thread.
    """

    def __init__(
        self,
        groups: tuple[CanaryBufferGroup, ...],  # in one slot space: a page takes all of them along
        state: CanaryDeviceState,
        content: tuple[Sources, ...],  # of the host pools, per part; empty: content is not checked
        num_slots: int,
        mode: ContentMode,
        check_budget_bytes: int,
        found: Callable[[Finding], None],
        loads_in_background: bool = False,
    ) -> None:
        """`loads_in_background`: forwards of other requests run on while a prefix is loaded."""
        self.groups = groups
        self.parts = tuple(Part(group, half) for group in groups for half in group.halves)
        for (group, half), sources in zip(self.parts, content, strict=False):
            refuse_unlike(sources, group.content(half))
        self.mode = mode
        self.content = content
        self._bytes = HostContent(content, mode)
        # What a comparison of one slot reads.
        each = [content_bytes_per_slot(group, mode, HOST_SECTOR_BYTES) for group in groups]
        self.bytes_per_slot = max(1, sum(each) if content else 1)
        self.records = HostRecords(num_slots, len(self.parts))
        self.launches = Launches()
        self.written_back = 0  # slots, since the start
        self.loaded = 0
        self.refused = 0  # slots that were not loaded, because they have no record or are damaged
        self._state = state
        self.report = found
        self._check_budget_bytes = check_budget_bytes
        self._loads_in_background = loads_in_background
        self._checks = 0

    # Device to host

    def copy_back(
        self, host_slots: torch.Tensor, device_slots: torch.Tensor, stream: Any | None = None
    ) -> Callable[[], None]:
        """Copy the records of pages that are written back, on `stream` (None: the current one).

        Call the result on the same stream, once the bytes are copied too.
        """
        cuda = device_slots.is_cuda
        with _on(stream, device_slots.device):
            tails = [group.records(half, Side.TAIL) for group, half in self.parts]
            words = torch.stack([tail[device_slots] for tail in tails], dim=1)
            records = SlotRecords(_to_host(words))
            if cuda:
                device_slots.record_stream(torch.cuda.current_stream(device_slots.device))
        self.written_back += len(records)

        def bytes_are_copied() -> None:
            event = None
            if cuda:
                event = torch.cuda.Event()
                event.record(stream)
            self.records.put(host_slots, records, event)

        return bytes_are_copied

    # Host to device

    def records_for(
        self, host_slots: torch.Tensor, device_slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Of each group words int64[n, halves, RECORD_WORDS] on the device, for pages that go to `device_slots`."""
        records = self.records.get(host_slots)
        self.loaded += len(records)
        of_groups = records.words.split([len(group.halves) for group in self.groups], dim=1)
        return tuple(_to_device(words, device_slots.device) for words in of_groups)

    def load_back(
        self, device_slots: torch.Tensor, words: Sequence[torch.Tensor], stream: Any | None = None
    ) -> tuple[LoadBack, ...]:
        """The events that give `words`, of each group, to `device_slots`.

        Call it once `stream` has the copies of the bytes.
        """
        event = None
        with _on(stream, device_slots.device):
            complete_after = self._state.last_begun()
            if device_slots.is_cuda:
                event = torch.cuda.Event()
                event.record()
        shared = complete_after, event, self._loads_in_background
        return tuple(
            LoadBack(group, device_slots, of_group, *shared)
            for group, of_group in zip(self.groups, words, strict=True)
        )

    def usable(self, host_slots: torch.Tensor) -> int:
        """How many of `host_slots`, from the first on, may be loaded.

        A slot without a record ends the prefix. So does one whose bytes do not fit its record. That is a finding, and
        the slot loses its record.
        Of large loads every k-th slot is compared, in turn.
        """
        asked = host_slots.numpy()
        turn = self._turn(len(asked))
        count, known = self.records.look_up(asked, turn)
        slots = asked[turn]
        wrong = self.damaged(slots, known)
        if wrong:
            count = min(count, turn.start + turn.step * wrong[0])
            self.records.clear(torch.from_numpy(slots[wrong]))
        self.refused += len(asked) - count
        return count

    def _turn(self, count: int) -> slice:
        """Which slots of a load are compared now, every k-th, as far as the budget goes."""
        if not self.content:
            return slice(0, 0, 1)
        k = slots_between_visits(count, max(1, self._check_budget_bytes // self.bytes_per_slot))
        self._checks += 1
        return slice(turn_of(self._checks, k), None, k)

    def compare(self, first: int, stop: int) -> int:
        """Compare the bytes of the host slots [first, stop) with their records. Returns how many there were."""
        records = self.records.part(first, stop)
        slots = torch.arange(first, min(stop, self.records.num_slots))
        present = records.present
        slots, records = slots[present], records[present]
        wrong = self.damaged(slots.numpy(), records.words.numpy())
        if wrong:
            self.records.clear(slots[wrong])
        return len(slots)

    def damaged(
        self,
        slots: np.ndarray,
        words: np.ndarray,
        tier: str = HOST_TIER,
        key: str | None = None,
    ) -> list[int]:
        """Which of the host slots `slots` int64[n] have bytes that differ from their records, in order.

        `words`: of their `SlotRecords`. Each difference is a finding of `tier`.
        """
        if not self.content or not len(slots):
            return []
        now = self._bytes.fingerprints(slots, words).T
        differ = now != words[:, :, record.WORD_CONTENT]
        if not differ.any():
            return []
        differ &= _has_content(words)
        for index, place in np.argwhere(differ.T).tolist():
            slot = int(slots[place]) if key is None else None
            group, half = self.parts[index]
            where = (tier, key, group.kind, half, slot)
            self.report(Finding.of(*where, words[place, index], int(now[place, index])))
        return np.flatnonzero(differ.any(axis=1)).tolist()


def _has_content(words: np.ndarray) -> np.ndarray:
    """bool[n, parts] of `words` int64[n, parts, RECORD_WORDS]."""
    state = (words[:, :, record.WORD_WRITER] >> record.WRITER_STATE_SHIFT) & 0xF
    return (state == State.LIVE) & (words[:, :, record.WORD_CONTENT] != 0)


def _on(stream: Any | None, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.get_device_module(device).stream(stream)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, complete once the current stream is that far."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = values.contiguous()
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
