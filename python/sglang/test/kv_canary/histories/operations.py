"""What may happen: operations, which hold small raw numbers that a history resolves."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_kv_canary.slot_event import SlotEventKind

TOKENS = (
    0,
    1,
    2,
    3,
    151643,
    2**31 - 1,
    -1,
)  # few, so that only chain and position tell many slots apart


@dataclass(frozen=True, slots=True)
class Job:
    """One request's part of a forward. A row without tokens takes the donor's first `share` tokens."""

    row: int
    count: int = 1
    donor: int = 0
    share: int = 0


@dataclass(frozen=True, slots=True)
class FlipRecord:
    group: int
    half: int
    side: int
    slot: int
    word: int
    bit: int


@dataclass(frozen=True, slots=True)
class FlipContent:
    group: int
    half: int
    source: int
    slot: int
    byte: int
    bit: int


@dataclass(frozen=True, slots=True)
class Alias:
    """A req_to_token entry gets another value; `kind` 0: any slot, 1: zero, 2: negative, 3: too large."""

    row: int
    position: int
    value: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Remap:
    """A full-to-SWA mapping value changes; kinds as for Alias."""

    slot: int
    value: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class SwapRows:
    """Two rows of req_to_token change places: each request reads all of the other's slots."""

    row: int
    other: int


Damage = FlipRecord | FlipContent | Alias | Remap | SwapRows

ROW_GROWTH = 3  # of all steps: one less than the tokens that 'verify' and 'tree' bring at most


@dataclass(frozen=True, slots=True)
class InputFault:
    """Wrong input of a forward: 'token', 'position', 'out_slot', 'location', 'known', 'start', 'row' or 'length'."""

    what: str
    index: int
    value: int = 1
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward.

    `style`: 'ragged' (extend), 'decode', 'verify' (several tokens each, no ext_lens) or 'tree' (the same, and
    tokens follow `parents`; afterwards the last token's ancestors are accepted and the others freed).
    """

    jobs: tuple[Job, ...]
    style: str = "ragged"
    tokens_each: int = 2  # of styles 'verify' and 'tree'
    parents: tuple[int, ...] = ()  # of style 'tree'
    already_verified: bool = False
    padding: int = 0  # padding requests at the end
    stale: bool = False  # of 'verify' and 'tree': padding keeps a row, and is told by its slot
    locates: bool = (
        True  # whether it is known ahead where attention stores the new tokens in the SWA pool
    )
    known: str = "none"  # which tokens the host knows: 'none', 'tail' or 'all'
    ending: str = (
        "full"  # 'full', 'no content' (that launch is missing) or 'aborted' (the model raised)
    )
    seed: int = 0
    samples: bool = False  # whether the requests' next tokens are noted after the forward
    faults: tuple[InputFault, ...] = ()
    during: tuple[Damage, ...] = ()  # while the layers run
    before_content: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """A request ends. `careless`: also slots that others still read are freed."""

    row: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class Evict:
    """SWA slots before the window are freed. `careless`: also those inside."""

    row: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """The records are told of slots, mostly held ones, that nobody freed or allocated; the mapping stays.

    `careless`: slots of a pool that has no draft model are unfilled too. `calls`: of a FREE of pages, which that many
    calls of the allocator list, one after the other.
    """

    slots: tuple[int, ...]
    group: int = 0
    event: SlotEventKind = SlotEventKind.FREE
    careless: bool = False
    calls: int = 1


@dataclass(frozen=True, slots=True)
class AllocatorRuns:
    """ALLOCs and FREEs of one group that its records are told of in one launch, in this order."""

    events: tuple[AllocatorEvent, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Clear:
    """The pool is flushed. `careless`: requests keep reading."""

    careless: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """A token's bytes and records move to a fresh slot. `careless`: the bytes stay behind."""

    row: int
    position: int
    careless: bool = False


@dataclass(frozen=True, slots=True)
class MovePage:
    """A page changes places, with its bytes, with another one. `kind` as of Alias: 1, 2 and 3 unbind it instead."""

    group: int
    page: int
    value: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """All slots that requests hold. `odd`: (field, value) pairs that turn into entries which no walk yields."""

    group: int = 0
    odd: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Arm:
    armed: bool


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """The model gets other weights, without a flush, and reads of older slots are to be reported."""


@dataclass(frozen=True, slots=True)
class SetAnchor:
    row: int
    value: int


Operation = (
    Step
    | Release
    | Evict
    | AllocatorEvent
    | AllocatorRuns
    | Clear
    | Move
    | MovePage
    | Sweep
    | Arm
    | UpdateWeights
    | SetAnchor
    | Damage
)


def odd_value(op: Alias | Remap | InputFault | MovePage, limit: int) -> int:
    """Kind 0: any slot; 1: zero; 2: negative; 3: too large, by one at least."""
    return (1 + op.value % (limit - 1), 0, -1 - op.value % 70000, limit + op.value % 70000)[
        op.kind % 4
    ]
