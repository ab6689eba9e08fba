"""The table of commands: what each does, its arguments, and the findings that must be reported.

Commands are checked against it, and `kv-canary faults` prints it.
"""

from __future__ import annotations

from ..pool_kind import PoolKind
from ..record import Reason
from . import content, host_pages, inputs, lifetime, observe, records, rows, swa_mapping
from .fault import MIN_INT32, REQUIRED, Argument, Fault, choice, number, switch, text, tokens

__all__ = ["FAULTS", "WITHDRAW"]

WITHDRAW = "withdraw"

# Which request: arguments of every fault that acts on a request of the running batch.
_MODES = ("EXTEND", "DECODE", "MIXED", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2")
READER = (
    text("rid", "request id", otherwise="any request"),
    choice("mode", _MODES, "SGLang's mode of the forward", otherwise="any forward"),
    number("min_prefix", "minimum number of slots that the request reads", 8),
)
# Which slot: of a request, or of a cached prefix.
_POSITION = "position of the slot; the fault waits for a request or prefix that has it"
POSITION = number("position", _POSITION, otherwise="the middle")
NEAR_END = number("position", _POSITION, otherwise="third from the end")
CACHED = tokens(
    "cached",
    "token ids: take a slot of this cached prefix, with the server idle or not",
    otherwise="a slot that a running request reads",
)
SLOT = (*READER, POSITION, CACHED)
# Which buffer.
KIND = choice("kind", tuple(kind.value for kind in PoolKind), "pool kind", "FULL")
HALF = choice("half", ("K", "V"), "half of the pool", "K")
OF_ALLOCATOR = choice(
    "kind", ("FULL", "SWA"), "free in only one pool of a SWA model", otherwise="all pools"
)
KEEP = switch("keep", "do not undo the change after the forward")
ENTRY = (*READER, POSITION, KEEP)


def _table(*faults: Fault) -> dict[str, Fault]:
    return {fault.name: fault for fault in faults}


FAULTS: dict[str, Fault] = _table(
    Fault(
        "flip_bytes",
        content.flip_bytes,
        "Flip bits of one slot's K or V bytes, as a memory error or a late transfer does.",
        (
            *SLOT,
            KIND,
            HALF,
            number("source", "index of the layer, among the layers that the half covers", 0),
            number("count", "bytes to flip", 1, minimum=1),
        ),
        (Reason.CONTENT,),
        "TAIL of that half, at the next forward that reads the slot, or SWEEP. With "
        "--kv-canary-real-data partial, only if the byte is in the sampled sector",
    ),
    Fault(
        "flip_host_bytes",
        host_pages.flip_host_bytes,
        "HiCache: flip bits of one host slot's K or V bytes, of a prefix that only host memory still holds.",
        (
            tokens("cached", "token ids: take a slot of this cached prefix", REQUIRED),
            POSITION,
            KIND,
            HALF,
            number("source", "index of the layer, among the layers that the half covers", 0),
            number("count", "bytes to flip", 1, minimum=1),
            switch(
                "without_record", "also remove the slot's record, as if it had never been stored"
            ),
        ),
        (Reason.CONTENT,),
        "HOST of that half, by the sweep of host memory or before the page is loaded. Nothing without the record",
    ),
    Fault(
        "write_outside_plan",
        content.write_outside_plan,
        "Store K and V of every layer into a slot that the running forward does not own.",
        SLOT,
        (Reason.CONTENT,),
        "TAIL of each half, at the next forward that reads the slot, or SWEEP",
    ),
    Fault(
        "scramble_free_slots",
        content.scramble_free_slots,
        "Overwrite the bytes of all slots that nothing holds. Not a fault: nothing may be reported.",
        (KIND,),
    ),
    Fault(
        "other_requests_slot",
        rows.other_requests_slot,
        "Point one page table entry of a request at another request's slot. Needs two requests in one batch.",
        ENTRY,
        (Reason.CHAIN,),
        "HEAD and TAIL",
    ),
    Fault(
        "other_requests_row",
        rows.other_requests_row,
        "Point a request's whole page table row at another request's slots. Needs a longer request in the batch.",
        (*READER, KEEP),
        (Reason.ROW_CHAIN,),
        "HEAD of the K half, in that forward",
    ),
    Fault(
        "swap_entries",
        rows.swap_entries,
        "Swap two page table entries of a request.",
        (*ENTRY, number("second", "position of the other entry", otherwise="position + 2")),
        (Reason.POSITION,),
        "HEAD and TAIL",
    ),
    Fault(
        "padding_slot",
        rows.padding_slot,
        "Point one page table entry of a request at slot 0.",
        ENTRY,
        (Reason.UNMAPPED_SLOT,),
        "HEAD and TAIL",
    ),
    Fault(
        "never_written_slot",
        rows.never_written_slot,
        "Point one page table entry of a request at a slot that no forward has written since the start.",
        ENTRY,
        (Reason.NEVER_WRITTEN,),
        "HEAD and TAIL",
    ),
    Fault(
        "freed_slot",
        rows.freed_slot,
        "Point one page table entry of a request at a slot that is free.",
        ENTRY,
        (Reason.USE_AFTER_FREE,),
        "HEAD and TAIL",
    ),
    Fault(
        "slot_out_of_range",
        rows.slot_out_of_range,
        "Point one page table entry of a request past the pool. For the HEAD check only: the model would crash.",
        (
            *READER,
            POSITION,
            number("slot", "the slot", otherwise="7 past the end of the pool", minimum=MIN_INT32),
        ),
        (Reason.SLOT_OUT_OF_RANGE,),
        "HEAD",
        eager_only=True,
    ),
    Fault(
        "free_live_slot",
        lifetime.free_live_slot,
        "Free the slot (the page) that a request or a cached prefix still reads.",
        (
            *SLOT,
            OF_ALLOCATOR,
            switch(
                "hand_out_next",
                "the next allocation gets the slot; waits until another request comes first in the batch",
            ),
        ),
        (Reason.USE_AFTER_FREE, Reason.CHAIN),
        "HEAD and TAIL; CHAIN once the slot's next owner has written it",
        breaks_accounting=True,
    ),
    Fault(
        "allocate_live_slot",
        lifetime.allocate_live_slot,
        "Free the slot (the page) that a request or a cached prefix reads, and allocate it again without a write.",
        (*SLOT, OF_ALLOCATOR),
        (Reason.UNWRITTEN_SINCE_ALLOC,),
        "HEAD and TAIL",
    ),
    Fault(
        "double_free",
        lifetime.double_free,
        "Free a slot that is already free. Needs a slot that was freed, e.g. by a flush. The free list is repaired.",
        (OF_ALLOCATOR,),
        (Reason.DOUBLE_FREE,),
        "FREE_FULL, of DeepSeek-V4 FREE_C4 and the like (with kind SWA: FREE_SWA), at the next forward",
    ),
    Fault(
        "damage_record",
        records.damage_record,
        "Flip a bit of one of the canary's own records, or zero it.",
        (
            *SLOT,
            KIND,
            HALF,
            choice("what", (*records.DAMAGE, "zero"), "what to damage", REQUIRED),
            choice("side", ("HEAD", "TAIL"), "side of the record", "HEAD"),
        ),
        (
            Reason.POSITION,
            Reason.TOKEN,
            Reason.CHAIN,
            Reason.CONTENT,
            Reason.BAD_STATE,
            Reason.NEVER_WRITTEN,
        ),
        "the damaged side and half, with the reason that fits the damaged word",
    ),
    Fault(
        "wrong_token",
        inputs.wrong_token,
        "Feed another token at the first new position of a request.",
        READER,
        (Reason.WRITE_TOKEN,),
        "HEAD, with mode EXTEND, DECODE or TARGET_VERIFY",
    ),
    Fault(
        "wrong_position",
        inputs.wrong_position,
        "Feed the first new token of a request with the position after its own.",
        READER,
        (Reason.WRITE_POSITION,),
        "HEAD",
    ),
    Fault(
        "wrong_row",
        inputs.wrong_row,
        "Give the HEAD check a request row that req_to_token does not have.",
        READER,
        (Reason.ROW_OUT_OF_RANGE,),
        "HEAD",
        eager_only=True,
    ),
    Fault(
        "wrong_length",
        inputs.wrong_length,
        "Give the HEAD check a length that does not fit into req_to_token.",
        READER,
        (Reason.LENGTH_OUT_OF_RANGE,),
        "HEAD",
        eager_only=True,
    ),
    Fault(
        "stale_mapping",
        swa_mapping.stale_mapping,
        "Map a slot in the sliding window to the SWA slot of the position before it.",
        (*READER, NEAR_END),
        (Reason.POSITION,),
        "HEAD and TAIL of SWA",
    ),
    Fault(
        "shared_swa_slot",
        swa_mapping.shared_swa_slot,
        "Map a slot in the sliding window to another request's SWA slot. Needs two requests in one batch.",
        (*READER, NEAR_END),
        (Reason.CHAIN,),
        "HEAD and TAIL of SWA",
    ),
    Fault(
        "evicted_in_window",
        swa_mapping.evicted_in_window,
        "Map a slot to 0, which means evicted.",
        (*READER, NEAR_END),
        (Reason.SWA_EVICTED_IN_WINDOW,),
        "HEAD and TAIL of SWA, for a position inside the window",
    ),
    Fault(
        "stale_location",
        swa_mapping.stale_location,
        "Let attention store the first new token of a request in a free SWA slot.",
        READER,
        (Reason.WRITE_LOCATION,),
        "HEAD of SWA",
        eager_only=True,
    ),
    Fault(
        "early_eviction",
        swa_mapping.early_eviction,
        "Let SGLang evict SWA slots too early from now on.",
        (
            number(
                "slots",
                "shorten the window by this many slots; < 0 reverts it",
                REQUIRED,
                minimum=MIN_INT32,
            ),
        ),
        (Reason.SWA_EVICTED_IN_WINDOW,),
        "HEAD and TAIL of SWA, if slots is at least 2: SGLang keeps one more than the window",
    ),
    Fault(
        "counters",
        observe.read_counters,
        "Return the device's counters of every launch tag, and HiCache's slots. Not a fault.",
    ),
    Fault(
        WITHDRAW,
        None,
        "Withdraw a command that still waits. Not a fault.",
        (
            Argument(
                "name",
                "a command's name",
                lambda v: isinstance(v, str),
                "the NAME of that command",
                REQUIRED,
            ),
        ),
    ),
)
