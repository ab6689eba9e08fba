"""Device state of one CanaryManager: counters, the armed flag and the violation ring."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from .buffer_group import CanaryBufferGroup
from .capacities import CanaryLaunchCapacities
from .endpoint import NUM_TAGS
from .plan.expected_inputs import ListMemory, words_of_lists
from .plan.kept_inputs import InputMemory
from .pool_kind import PoolKind
from .record import (
    ROW_WORD_CHAIN,
    ROW_WORD_LENGTH,
    ROW_WORDS,
    UNKNOWN,
    VIOLATION_COLUMNS,
)


class Header(IntEnum):
    """First words of the summary, each int64."""

    FORWARD_DONE = 0  # forward counter of the last forward whose TAIL ran
    FORWARD_RUNNING = 1  # forward counter that the last HEAD assigned
    ARMED = 2  # 0 during warm-up and graph capture: nothing is checked or written
    VIOLATIONS = 3  # rows ever appended to the ring
    # Last forward before the last weight update; 0: reads of older slots are not reported
    WEIGHTS_SINCE = 4
    PUBLISHED = 5  # what the last `publish` has written to the outbox

    RING_LOCK = 7  # taken by kernels while an append overflows the ring


HEADER_WORDS = 8


class TagCounter(IntEnum):
    """Counters per launch tag, int64 each, never reset."""

    LAUNCHES = 0
    CHECKED = 1  # slots checked
    ELIGIBLE = 2  # slots that an unlimited budget would check
    WRITTEN = 3
    CONTENT_CHECKED = 4
    CONTENT_WRITTEN = 5
    IDX_DIVERGENCE = 6  # checked slots whose SWA index differs from the full index
    OUT_OF_WINDOW = 7  # prefix tokens that lie before the window


NUM_COUNTERS = len(TagCounter)
SUMMARY_WORDS = HEADER_WORDS + NUM_TAGS * NUM_COUNTERS

# The outbox is one word, because nobody can see one half of a store of 8 bytes. Low bits: FORWARD_DONE; the rest:
# VIOLATIONS. Both are cut to so many bits.
OUTBOX_BITS = 32
NOT_PUBLISHED = -1  # in the outbox before the first `publish`

READER_FORWARDS = 4  # the last ones of which it is known which rows found something; a power of two


@dataclass(frozen=True, slots=True)
class ViolationLog:
    """The ring: `rows` int64[capacity, columns]. The row with sequence number s lies at s % capacity.

    `readers` outlives the rows that a flood overwrites. Place [row, f % READER_FORWARDS] holds f if request row `row`
    has found something in forward f. Row 0 stands for a row that is not known. The last row is for what a sweep or a
    free has found after forward f. Kernels get one pointer: `memory` holds `rows`, a word with the number of request
    rows, and `readers`.
    """

    memory: torch.Tensor  # int64[words]

    rows: torch.Tensor
    total: torch.Tensor  # int64[1], a view into the summary
    readers: torch.Tensor  # int64[request rows + 1, READER_FORWARDS]

    @classmethod
    def allocate(cls, capacity: int, total: torch.Tensor, request_rows: int) -> ViolationLog:
        if capacity <= 0:
            raise ValueError(f"ring capacity must be positive, got {capacity}")
        end = capacity * VIOLATION_COLUMNS
        words = end + 1 + (request_rows + 1) * READER_FORWARDS
        memory = torch.full((words,), UNKNOWN, dtype=torch.int64, device=total.device)
        memory[end] = request_rows
        return cls(
            memory=memory,
            rows=memory[:end].view(capacity, VIOLATION_COLUMNS),
            total=total,
            readers=memory[end + 1 :].view(request_rows + 1, READER_FORWARDS),
        )

    @property
    def capacity(self) -> int:
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class RowMemory:
    """The state of each request row after its last forward, so that the next forward can detect a change.

    Records of a prefix agree with each other even if the whole prefix is another request's. This memory detects that.
    """

    # int64[pool kinds, request rows, ROW_WORDS]: each group keeps its own, because their launches run in sequence
    words: torch.Tensor
    # int64[request rows]: the token sampled for the row (low 32 bits), and after which of its forwards (high 32 bits)
    sampled: torch.Tensor

    @classmethod
    def allocate(cls, request_rows: int, device: torch.device | str) -> RowMemory:
        shape = (len(PoolKind), request_rows, ROW_WORDS)
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(request_rows, dtype=torch.int64, device=device),
        )

    def forget(self) -> None:
        """Nothing is known about any row: forwards ran unseen, or noted tokens were never computed."""
        self.words.zero_()

    def hold(
        self,
        groups: Iterable[CanaryBufferGroup],
        rows: torch.Tensor,
        lengths: torch.Tensor,
        chains: torch.Tensor,
        forward: torch.Tensor,
    ) -> None:
        """`forward` int64[] leaves `rows` with `lengths` tokens that end in `chains`, int64[n] each."""
        for group in groups:
            words = self.of(group)
            if words is not None:
                words[rows, ROW_WORD_LENGTH] = (lengths + 1) | (forward << 32)
                words[rows, ROW_WORD_CHAIN] = chains

    def of(self, group: CanaryBufferGroup) -> torch.Tensor | None:
        """int64[request rows, ROW_WORDS] of `group`. None if its forwards do not define a row's length.

        Draft forwards write ahead of accepted tokens; the target's next verify checks the same rows. A strided slot
        is complete only with its last token.
        """
        if group.chain_source is not None or group.stride != 1:
            return None
        return self.words[group.kind.index]


@dataclass(frozen=True, slots=True)
class CanaryDeviceState:
    """Everything on the device besides the records. `summary` is what the host copies.

    `outbox` lies in host memory, at an address that the device knows, too: kernels write to it, and the host reads it.
    """

    summary: torch.Tensor  # int64[SUMMARY_WORDS]
    outbox: torch.Tensor  # int64[1]
    violations: ViolationLog
    anchors: torch.Tensor  # int64[max_request_rows], chain anchor per request row
    token_lists: ListMemory
    inputs: InputMemory
    row_memory: RowMemory
    capacities: CanaryLaunchCapacities
    # What a backend has worked out for its launches on this state, by what they are for. A state that is made from
    # this one, with other capacities, has its own.
    prepared: dict[Hashable, Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def allocate(
        cls, capacities: CanaryLaunchCapacities, device: torch.device | str
    ) -> CanaryDeviceState:
        summary = torch.zeros(SUMMARY_WORDS, dtype=torch.int64, device=device)
        total = summary[Header.VIOLATIONS : Header.VIOLATIONS + 1]
        done = summary[Header.FORWARD_DONE : Header.FORWARD_DONE + 1]
        sizes = capacities.max_batch_size, capacities.max_extend_tokens
        # Memory that is pinned has one address for host and device.
        pinned = summary.is_cuda
        return cls(
            summary=summary,
            outbox=torch.full((1,), NOT_PUBLISHED, dtype=torch.int64, pin_memory=pinned),
            violations=ViolationLog.allocate(
                capacities.ring_capacity, total, capacities.max_request_rows
            ),
            anchors=torch.zeros(capacities.max_request_rows, dtype=torch.int64, device=device),
            token_lists=ListMemory(words_of_lists(*sizes), device),
            inputs=InputMemory.allocate(capacities.max_extend_tokens, done),
            row_memory=RowMemory.allocate(capacities.max_request_rows, device),
            capacities=capacities,
        )

    @property
    def counters(self) -> torch.Tensor:
        """int64[NUM_TAGS, NUM_COUNTERS] view of the summary."""
        return self.summary[HEADER_WORDS:].view(NUM_TAGS, NUM_COUNTERS)

    @property
    def nbytes(self) -> int:
        rows = (self.row_memory.words, self.row_memory.sampled)
        batch = (self.token_lists.words, self.inputs.words)
        tensors = (self.summary, self.violations.memory, self.anchors, *batch, *rows)
        return sum(t.numel() * t.element_size() for t in tensors)

    def last_begun(self) -> torch.Tensor:
        """A new int64[1]: the last forward that has begun by now, in order of the current stream.

        HEAD of a long prefill may come after its layers. That one has begun when its inputs were kept.
        """
        running = self.summary[Header.FORWARD_RUNNING : Header.FORWARD_RUNNING + 1]
        return torch.maximum(running, self.inputs.done_before + 1)

    def set_armed(self, armed: bool) -> None:
        self.summary[Header.ARMED : Header.ARMED + 1].fill_(int(armed))

    def note_weight_update(self) -> None:
        """From now on, in stream order, reads of slots written by earlier forwards are reported as STALE_WEIGHTS."""
        done = self.summary[Header.FORWARD_DONE : Header.FORWARD_DONE + 1]
        self.summary[Header.WEIGHTS_SINCE : Header.WEIGHTS_SINCE + 1].copy_(done)
