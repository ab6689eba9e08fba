"""Every check once: the traffic that it watches, the fault that it must report, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import record
from ..config import ContentMode
from ..plan.expected_inputs import RowStart
from ..record import Mode, Reason
from .forwards import SweepEntry
from .scene import Scene
from .scratch_pool import ScratchSpec

PREFIX = (5, 6, 8)  # tokens
ROW, OTHER_ROW = 1, 2
OUTSIDE = 10**6  # a slot that no scratch pool has

PLAIN = ScratchSpec()
PARTIAL = ScratchSpec(content_mode=ContentMode.PARTIAL)
SLIDING = ScratchSpec(swa_slots=48, window=4)
COMPRESSED = ScratchSpec(page_size=4, stride=4)

Traffic = Callable[[Scene, bool], None]
Finding = tuple[str, Reason]  # launch tag, all reasons of the row


@dataclass(frozen=True, slots=True)
class Check:
    """`traffic(scene, faulty)` on a fresh scene finds exactly `findings` if faulty, otherwise nothing."""

    reason: Reason
    side: str
    fault: str
    spec: ScratchSpec
    findings: tuple[Finding, ...]
    traffic: Traffic

    @property
    def name(self) -> str:
        return str(self.reason.name)


_CHECKS: list[Check] = []


def all_checks() -> tuple[Check, ...]:
    """In the order of the reasons."""
    return tuple(sorted(_CHECKS, key=lambda check: check.reason))


def _check(
    reason: Reason,
    fault: str,
    *tags: str,
    also: tuple[Finding, ...] = (),
    reasons: Reason | None = None,
    spec: ScratchSpec = PLAIN,
) -> Callable[[Traffic], Traffic]:
    """Registers a check that reports `reasons` (by default `reason`) at each of `tags`, and the findings `also`."""

    def register(traffic: Traffic) -> Traffic:
        findings = (*((tag, reasons or reason) for tag in tags), *also)
        sides = dict.fromkeys(tag.partition("_")[0] for tag in tags)
        _CHECKS.append(Check(reason, "+".join(sides), fault, spec, findings, traffic))
        return traffic

    return register


def _tags(*sides: str, kind: str = "FULL") -> Iterator[str]:
    return (f"{side}_{half}_{kind}" for side in sides for half in ("K", "V"))


WRITES = tuple(_tags("HEAD"))
READS = tuple(_tags("HEAD", "TAIL"))
SWEEPS = tuple(_tags("SWEEP"))
LEADS_ELSEWHERE: Finding = ("HEAD_K_FULL", Reason.ROW_CHAIN)


# The slot that a request reads


@_check(Reason.NEVER_WRITTEN, "a page table entry of a slot that no forward has written", *READS)
def _never_written(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.table[ROW][1] = scene.spec.num_slots - 1
    scene.decode(ROW)


@_check(Reason.USE_AFTER_FREE, "a free of a slot that is still read", *READS)
def _use_after_free(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.prefill(OTHER_ROW, PREFIX)
    scene.free([scene.slot(ROW if faulty else OTHER_ROW, 2)])
    scene.decode(ROW)


@_check(Reason.UNWRITTEN_SINCE_ALLOC, "a slot handed out again while it is still read", *READS)
def _unwritten_since_alloc(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.prefill(OTHER_ROW, PREFIX)
    slot = scene.slot(ROW if faulty else OTHER_ROW, 2)
    scene.free([slot])
    scene.reallocate([slot])
    scene.decode(ROW)


@_check(Reason.BAD_STATE, "a flipped bit in the state of a record", "HEAD_K_FULL", "TAIL_V_FULL")
def _bad_state(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        for half, side in (("K", "HEAD"), ("V", "TAIL")):
            slot = scene.slot(ROW, 2)
            scene.flip_record(
                scene.full, half, side, slot, record.WORD_WRITER, record.WRITER_STATE_SHIFT
            )
    scene.decode(ROW)


@_check(
    Reason.POSITION,
    "a page table entry of the request's own previous token",
    *READS,
    reasons=Reason.POSITION | Reason.CHAIN,
    also=(LEADS_ELSEWHERE,),
)
def _position(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, [*PREFIX, PREFIX[-1]])
    if faulty:
        scene.table[ROW][3] = scene.slot(ROW, 2)
    scene.decode(ROW)


@_check(Reason.TOKEN, "a cached prefix with another token than the request's", *READS)
def _token(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.decode(ROW, known=(5, 99 if faulty else 6, 8, 7))


@_check(
    Reason.CHAIN,
    "a slot of another prefix, with the same token and position",
    *READS,
    also=(LEADS_ELSEWHERE,),
)
def _chain(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.prefill(OTHER_ROW, (5, 9 if faulty else 6, 8))
    scene.table[ROW][2] = scene.slot(OTHER_ROW, 2)
    scene.decode(ROW)


@_check(
    Reason.CHAIN,
    "a stale full-to-SWA mapping to another request's slot",
    *_tags("HEAD", "TAIL", kind="SWA"),
    also=(("HEAD_K_SWA", Reason.ROW_CHAIN),),
    spec=SLIDING,
)
def _chain_swa(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, (*PREFIX, 4))
    scene.prefill(OTHER_ROW, (9 if faulty else 5, *PREFIX[1:], 4))
    scene.swa.lut[scene.slot(ROW, 3)] = scene.swa.lut[scene.slot(OTHER_ROW, 3)]
    scene.decode(ROW)


@_check(Reason.CONTENT, "a changed byte of K and of V", *_tags("TAIL"))
@_check(Reason.CONTENT, "a token overwritten, sampled bytes only", *_tags("TAIL"), spec=PARTIAL)
def _content(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        _overwrite(scene, scene.slot(ROW, 1))
    scene.decode(ROW)


def _overwrite(scene: Scene, slot: int) -> None:
    for memories in scene.full.memories.values():
        for memory in memories:
            memory.write(slot, bytes(byte ^ 1 for byte in memory.layout.row_of(slot)))


@_check(Reason.SLOT_OUT_OF_RANGE, "a page table entry outside the pool", *READS)
def _slot_out_of_range(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.table[ROW][2] = OUTSIDE
    scene.decode(ROW)


@_check(Reason.UNMAPPED_SLOT, "a page table entry of the padding slot", *READS)
def _unmapped_slot(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.table[ROW][2] = 0
    scene.decode(ROW)


@_check(
    Reason.SWA_EVICTED_IN_WINDOW,
    "a slot evicted inside the window",
    *_tags("HEAD", "TAIL", kind="SWA"),
    spec=SLIDING,
)
def _swa_evicted_in_window(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, (1, 2, 3, 4, 5, 6))
    slot = scene.slot(ROW, 2 if faulty else 1)  # the window has positions 2 to 5
    scene.free([scene.swa.lut[slot]], scene.swa)
    scene.swa.lut[slot] = 0
    scene.decode(ROW)


# What the forward is fed


@_check(Reason.WRITE_TOKEN, "a decode fed with another token than the host's", *WRITES)
def _write_token(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.decode(ROW, 70 if faulty else 7, known=(*PREFIX, 7))


@_check(Reason.WRITE_TOKEN, "a decode fed with a token that was not sampled", *WRITES)
def _write_token_sampled(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.next_tokens({ROW: (7,)})
    scene.decode(ROW, 70 if faulty else 7, start=RowStart.DECODES)


@_check(Reason.WRITE_POSITION, "a decode fed with another position", *WRITES)
def _write_position(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.decode(ROW, positions=[5 if faulty else 3])


@_check(
    Reason.WRITE_LOCATION,
    "attention stores a token elsewhere than the mapping says",
    *_tags("HEAD", kind="SWA"),
    spec=SLIDING,
)
def _write_location(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, (1, 2, 3, 4), swa_out_slots=[5, 6, 7, 8])
    scene.decode(ROW, swa_out_slots=[47 if faulty else 9])


@_check(Reason.ROW_OUT_OF_RANGE, "a request row outside the page table", *WRITES)
def _row_out_of_range(scene: Scene, faulty: bool) -> None:
    last = scene.spec.request_rows - 1
    scene.forward(last + faulty, 0, [5], [20])


@_check(Reason.LENGTH_OUT_OF_RANGE, "a length outside the page table", *WRITES)
def _length_out_of_range(scene: Scene, faulty: bool) -> None:
    scene.forward(ROW, OUTSIDE if faulty else 0, [5], [20])


@_check(Reason.ROW_CHAIN, "a page table row that leads to another request", "HEAD_K_FULL")
def _row_chain(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    scene.prefill(OTHER_ROW, (5, 9 if faulty else 6, 8))
    scene.table[ROW][:3] = scene.table[OTHER_ROW][:3]
    scene.decode(ROW)


@_check(Reason.ROW_LENGTH, "a length that the last forward did not leave", "HEAD_K_FULL")
def _row_length(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.lengths[ROW] -= 1
    scene.decode(ROW)


# Frees and weight updates


@_check(Reason.DOUBLE_FREE, "a slot freed twice", "FREE_FULL")
def _double_free(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    slot = scene.slot(ROW, 1)
    scene.free([slot])
    if not faulty:
        scene.reallocate([slot])
    scene.free([slot])


@_check(Reason.STALE_WEIGHTS, "a prefix of older weights", "HEAD_K_FULL")
def _stale_weights(scene: Scene, faulty: bool) -> None:
    if not faulty:
        scene.update_weights()
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.update_weights()
    scene.decode(ROW)


# The sweep of the prefix cache


@_check(Reason.CHAIN, "a flipped bit in a record that no request reads", "SWEEP_K_FULL")
def _sweep_chain(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        scene.flip_record(scene.full, "K", "TAIL", scene.slot(ROW, 2), record.WORD_CHAIN, 40)
    scene.check_list(scene.walk(ROW))


@_check(Reason.CONTENT, "changed bytes in a prefix that no request reads", *SWEEPS)
def _sweep_content(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    if faulty:
        _overwrite(scene, scene.slot(ROW, 2))
        scene.upload()
    scene.check_list(scene.walk(ROW))


@_check(Reason.USE_AFTER_FREE, "a cached prefix whose slot is free", *SWEEPS, *SWEEPS)
def _sweep_use_after_free(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    entries = scene.walk(ROW)
    if faulty:
        scene.free([entries[2].slot])
    scene.check_list(entries)


@_check(Reason.POSITION, "a cached prefix under another position", *SWEEPS, *SWEEPS)
def _sweep_position(scene: Scene, faulty: bool) -> None:
    scene.prefill(ROW, PREFIX)
    last = scene.walk(ROW)[-1]
    scene.check_list([SweepEntry(last.slot, 7, last.prev_slot)] if faulty else [last])


# Compressed pools: one slot stands for several tokens


@_check(
    Reason.CHAIN,
    "a flipped bit in a record of a compressed pool",
    "HEAD_K_C4",
    spec=COMPRESSED,
)
def _compressed_chain(scene: Scene, faulty: bool) -> None:
    slots = list(range(12, 20))
    scene.table[ROW][:8], scene.lengths[ROW] = slots, 8
    scene.forward(ROW, 0, range(8), slots)
    if faulty:
        scene.flip_record(scene.strided, "K", "HEAD", slots[4] // 4, record.WORD_CHAIN, 40)
    scene.table[ROW][8] = 20
    scene.forward(ROW, 8, [7], [20], mode=Mode.DECODE)
