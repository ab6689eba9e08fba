"""One sentence that says what happened, as a person would. It says only what is known."""

from __future__ import annotations

from collections.abc import Callable

from ..pool_kind import PoolKind
from ..record import PREV_ANCHOR, Mode, Reason
from .evidence import ALL_ZERO, Evidence
from .safe_text import safe_text
from .violation import STATE_TIER, Actor, Violation

_NOBODY = "a request not on record"


def sentence(e: Evidence) -> str:
    """One line without a full stop. Request ids are safe to print."""
    if e.first.tier == STATE_TIER:
        return _state(e)
    said = next((say(e) for reason, say in _SAYINGS if e.has(reason)), _reads(e))
    return said + _other_readers(e)


# Who


def _name(actor: Actor | None) -> str:
    known = actor is not None and actor.request_id
    return f'"{safe_text(actor.request_id)}"' if known else _NOBODY


def _subject(e: Evidence) -> str:
    name = _name(e.first.reader)
    return name if name == _NOBODY else f"request {name}"


def _other_readers(e: Evidence) -> str:
    others = e.readers if e.is_sweep else e.readers - 1
    if others < 1:
        return ""
    least = "at least " * e.more_readers
    more = "" if e.is_sweep else " more"
    return f"; {least}{others}{more} request{'s' * (others > 1)} read{'s' * (others == 1)} it, too"


# Where


def _slot(e: Evidence) -> str:
    v = e.first
    if e.kind is PoolKind.FULL:
        return f"slot {v.slot}"
    full = "" if v.full_slot is None else f" (full slot {v.full_slot})"
    return f"{e.kind.value} slot {v.slot}{full}"


def _at(position: int | None) -> str:
    return "" if position is None else f" at position {position}"


def _reads(e: Evidence) -> str:
    v = e.first
    where = _at(v.position)
    if v.tier is not None:
        return f"the canary finds {v.page}{where}"
    if e.is_sweep:
        return f"the sweep finds {_slot(e)} in the prefix cache{where}"
    what = "no readable slot" if v.slot is None else _slot(e)
    return f"{_subject(e)}{where} reads {what}"


# When


def _ago(e: Evidence) -> str:
    forwards = e.forwards_ago
    if forwards is None or forwards < 0:
        return ""
    if forwards == 0:
        return " in the same forward"
    return f" {forwards} forward{'s' * (forwards > 1)} earlier"


def _which_wrote(e: Evidence, verb: str = "wrote") -> str:
    """A relative clause about the slot."""
    if e.is_own:
        return f"which it {verb} itself{_ago(e)}"
    if e.history.is_earlier_run:
        return f"which an earlier run of {_name(e.first.writer)} {verb}{_ago(e)}"
    return f"which {_name(e.first.writer)} {verb}{_ago(e)}"


def _wrote(e: Evidence, what: str = "it") -> str:
    """A clause of its own."""
    if e.is_own:
        return f"the request wrote {what} itself{_ago(e)}"
    if e.history.is_earlier_run:
        return f"an earlier run of {_name(e.first.writer)} wrote {what}{_ago(e)}"
    return f"{_name(e.first.writer)} wrote {what}{_ago(e)}"


def _after_free(v: Violation) -> str:
    number = "" if v.cause is None else f" (cause #{v.cause})"
    return f", after it was freed after forward {v.freed.forward}{number}" if v.freed else ""


# States of linear-attention layers

_IN_STATE: dict[Reason, Callable[[Violation], str]] = {
    Reason.DOUBLE_FREE: lambda v: "was freed while it was free",
    Reason.USE_AFTER_FREE: lambda v: f"was freed{_after_free_of_state(v)}",
    Reason.UNMAPPED_SLOT: lambda v: "is padding",
    Reason.SLOT_OUT_OF_RANGE: lambda v: "does not exist",
    Reason.ROW_CHAIN: lambda v: f"is {_held(v)}",
    Reason.POSITION: lambda v: f"holds the state after {v.stored_position} tokens",
    Reason.CHAIN: lambda v: "holds the state of another prefix",
    Reason.NEVER_WRITTEN: lambda v: "holds only zeros",
    Reason.CONTENT: lambda v: "is not the one that was cached",
}


def _state(e: Evidence) -> str:
    v = e.first
    name = _name(v.reader)
    who = "" if name == _NOBODY else f" for {name}"
    wants = "" if v.expected_position is None else f" after {v.expected_position} tokens"
    fault = next(say(v) for reason, say in _IN_STATE.items() if e.has(reason))
    return f"{v.reader.mode}{who} uses the state{wants} in {v.page}, which {fault}"


def _after_free_of_state(v: Violation) -> str:
    return "" if v.freed is None else f" after forward {v.freed.forward}"


def _held(v: Violation) -> str:
    if v.state == "CACHED":
        return "in the prefix cache"
    return f"the state of {_name(v.writer)}"


# What, by reason


def _holds(e: Evidence) -> str:
    v, freed = e.first, e.freed_before
    if e.is_arrival:
        return f"{_reads(e)}, where {_arrived(e)}"
    if e.is_misfilled:
        who = "the request itself" if e.is_own else _name(v.writer)
        return f"{_reads(e)}, which was filled from elsewhere with what {who} wrote{_ago(e)}{_instead(e)}"
    if e.history.is_of_peer:
        return f"{_reads(e)}, to which a prefill server has written{_instead(e)}"
    if e.in_one_record:
        return f"{_reads(e)}, and only one of its canary records does not fit ({v.tag})"
    if freed is None:
        return f"{_reads(e)}, {_which_wrote(e)}{_instead(e)}"
    return f"{_reads(e)}, {_which_wrote(e, 'rewrote')}{_instead(e)}{_after_free(freed)}"


def _arrived(e: Evidence) -> str:
    """What has come into the slot, as far as it is not what the request expects."""
    v = e.first
    if e.has(Reason.POSITION):
        return f"position {v.stored_position} has arrived"
    if e.has(Reason.TOKEN):
        return f"token {v.stored_token} has arrived instead of {v.expected_token}"
    return "this position of another prefix has arrived"


def _instead(e: Evidence) -> str:
    """What the slot holds, as far as it differs from what the reader expects."""
    v = e.first
    if e.has(Reason.POSITION):
        return _at(v.stored_position)
    if e.has(Reason.TOKEN):
        return f", with token {v.stored_token} instead of {v.expected_token}"
    if e.is_foreign:
        return " at this position of another prefix"
    if v.prev_slot is None or v.prev_slot < PREV_ANCHOR:
        return ", after another prefix"
    if v.prev_slot == PREV_ANCHOR:
        return ", for another start of a prefix"
    return f" at this position, but not after what slot {v.prev_slot} holds now"


def _freed(e: Evidence) -> str:
    v = e.first
    if e.is_arrival:
        if e.is_free_on_peer:
            return f"{_reads(e)}, where the record of a slot has arrived that was free on the prefill server"
        wrote = "" if v.writer is None else f"; {_wrote(e)}{_at(v.stored_position)}"
        return f"{_reads(e)}, where nothing has arrived since it was handed out{wrote}"
    freed = "" if v.freed is None else f" after forward {v.freed.forward}"
    freed += f" ({e.freed_for})" if e.freed_for else ""
    if e.has(Reason.UNWRITTEN_SINCE_ALLOC) or e.was_handed_out:
        freed += ", handed out again and not written since"
    wrote = "" if v.writer is None else f"; {_wrote(e)}{_at(v.stored_position)}"
    return f"{_reads(e)}, which was freed{freed}{wrote}"


def _content(e: Evidence) -> str:
    v, halves = e.first, " and ".join(e.halves_seen)
    if (wrong := e.wrong_record) is not None:
        return f"{_reads(wrong)}, whose {halves} record does not fit: its fingerprint tells nothing of the bytes"
    if e.one_bit_of_content:
        return (
            f"{_reads(e)}, whose {halves} fingerprint does not fit its bytes; {_wrote(e, 'them')}"
        )
    if e.is_arrival:
        what = "zeros" if v.content_now == ALL_ZERO else "bytes"
        return f"{_reads(e)}, where {what} have arrived as {halves} that were not sent"
    now = ", to zero," if v.content_now == ALL_ZERO else ""
    arrived = v.writer is not None and v.writer.mode == Mode.ARRIVAL.name
    since = f"they arrived{_ago(e)}" if arrived else _wrote(e, "them")
    return f"{_reads(e)}, whose {halves} bytes have changed{now} since {since}"


def _double_free(e: Evidence) -> str:
    v = e.first
    since = "" if v.freed is None else f", and was free since forward {v.freed.forward}"
    last = "" if v.writer is None else f"; {_name(v.writer)} wrote it last"
    return f"{_slot(e)} was freed again after forward {v.reader.forward}{since}{last}"


def _stale_weights(e: Evidence) -> str:
    return f"{_reads(e)}, {_which_wrote(e)}, with older weights"


def _location(e: Evidence) -> str:
    v = e.first
    mapped = f"SWA slot {v.slot}" if v.slot else "no SWA slot"
    return (
        f"{_subject(e)} stores its token{_at(v.expected_position)} in SWA slot {v.attention_slot}, "
        f"but full slot {v.full_slot} is mapped to {mapped}"
    )


def _write_token(e: Evidence) -> str:
    v = e.first
    return (
        f"{_subject(e)} is fed token {v.stored_token}{_at(v.expected_position)} "
        f"instead of {v.expected_token}"
    )


def _write_position(e: Evidence) -> str:
    v = e.first
    return (
        f"{_subject(e)} is fed a new token at position {v.stored_position} "
        f"instead of {v.expected_position}"
    )


def _row_chain(e: Evidence) -> str:
    v = e.first
    return (
        f"{_subject(e)} is given a row that leads to another prefix than its own: "
        f"at position {v.expected_position} it ends in {_slot(e)}, {_which_wrote(e)}"
    )


def _row_length(e: Evidence) -> str:
    v = e.first
    return (
        f"{_subject(e)} is given length {v.stored_position}, "
        f"but its last forward left {v.expected_position}"
    )


def _row_range(e: Evidence) -> str:
    return f"a forward is given row {e.first.reader.row}, which no request has"


def _length_range(e: Evidence) -> str:
    length = e.first.expected_position
    return f"{_subject(e)} is given length {length}, which does not fit into its row"


def _entry(e: Evidence) -> str:
    v = e.first
    who = "the sweep" if e.is_sweep else _subject(e)
    slot = "slot" if e.kind is PoolKind.FULL else "full slot"
    return f"{who}{_at(v.expected_position)} is led to {slot} {v.full_slot}"


_SAYINGS: tuple[tuple[Reason, Callable[[Evidence], str]], ...] = (
    (Reason.DOUBLE_FREE, _double_free),
    (Reason.STALE_WEIGHTS, _stale_weights),
    (Reason.WRITE_LOCATION, _location),
    (Reason.WRITE_POSITION, _write_position),
    (Reason.WRITE_TOKEN, _write_token),
    (Reason.ROW_CHAIN, _row_chain),
    (Reason.ROW_LENGTH, _row_length),
    (Reason.ROW_OUT_OF_RANGE, _row_range),
    (Reason.LENGTH_OUT_OF_RANGE, _length_range),
    (Reason.SLOT_OUT_OF_RANGE, lambda e: f"{_entry(e)}, out of the pool"),
    (Reason.UNMAPPED_SLOT, lambda e: f"{_entry(e)}, which is padding"),
    (
        Reason.SWA_EVICTED_IN_WINDOW,
        lambda e: (
            f"{_entry(e)} inside its window, but the mapping says that the SWA slot is evicted"
        ),
    ),
    (Reason.BAD_STATE, lambda e: f"{_reads(e)}, whose canary record is damaged"),
    (Reason.NEVER_WRITTEN, lambda e: f"{_reads(e)}, {_never_written(e)}"),
    (Reason.USE_AFTER_FREE, _freed),
    (Reason.UNWRITTEN_SINCE_ALLOC, _freed),
    (Reason.POSITION, _holds),
    (Reason.TOKEN, _holds),
    (Reason.CHAIN, _holds),
    (Reason.CONTENT, _content),
)


def _never_written(e: Evidence) -> str:
    if e.is_arrival:
        return "where nothing has arrived"
    if e.in_one_record:
        return f"and only one of its canary records was never written ({e.first.tag})"
    if e.was_filled:
        return "which was filled from elsewhere and whose record came empty"
    return "which no forward has written since the start"
