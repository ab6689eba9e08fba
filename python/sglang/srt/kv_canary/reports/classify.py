"""A guess at the class of bug behind a cause, from an ordered table of rules. A wrong guess is worse than none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ..pool_kind import PoolKind
from ..record import PREV_ANCHOR, Reason
from .evidence import ALL_ZERO, Evidence


class BugClass(str, Enum):
    """Classes of bugs. The value is the name in events."""

    ALIASING = "aliasing"
    ROW_SUBSTITUTION = "row_substitution"
    USE_AFTER_FREE = "use_after_free"
    DOUBLE_FREE = "double_free"
    SWA_MAPPING = "swa_mapping"
    BYTES_DAMAGED = "bytes_damaged"
    LATE_WRITE = "late_write"
    WRONG_TRANSFER = "wrong_transfer"
    NEVER_STORED = "never_stored"
    WRONG_POSITION = "wrong_position"
    ALTERED_TOKEN = "altered_token"
    RECORDS_DAMAGED = "records_damaged"
    WRONG_INPUTS = "wrong_inputs"
    STALE_WEIGHTS = "stale_weights"
    UNKNOWN = "unknown"


TITLES: dict[BugClass, str] = {
    BugClass.ALIASING: "slot mapped twice",
    BugClass.ROW_SUBSTITUTION: "wrong entries in the request's row",
    BugClass.USE_AFTER_FREE: "use after free",
    BugClass.DOUBLE_FREE: "double free",
    BugClass.SWA_MAPPING: "wrong full-to-SWA mapping",
    BugClass.BYTES_DAMAGED: "bytes damaged in place",
    BugClass.LATE_WRITE: "late or stray write",
    BugClass.WRONG_TRANSFER: "wrong transfer",
    BugClass.NEVER_STORED: "never stored",
    BugClass.WRONG_POSITION: "wrong position on write",
    BugClass.ALTERED_TOKEN: "altered token",
    BugClass.RECORDS_DAMAGED: "the canary's records damaged",
    BugClass.WRONG_INPUTS: "wrong row or length of a forward",
    BugClass.STALE_WEIGHTS: "KV kept across a weight update",
    BugClass.UNKNOWN: "unknown",
}


class Confidence(str, Enum):
    """How sure a guess is."""

    SURE = "sure"  # what was found admits nothing else
    LIKELY = "likely"
    UNSURE = "unsure"  # the class is only a first suspicion


@dataclass(frozen=True, slots=True)
class Guess:
    """A class of bug, the reason for it, and how sure it is."""

    bug: BugClass
    reason: str
    confidence: Confidence

    def text(self) -> str:
        """One line."""
        return f"{TITLES[self.bug]} ({self.confidence.value}): {self.reason}"

    def as_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return {
            "class": self.bug.value,
            "confidence": self.confidence.value,
            "reason": self.reason,
        }

    @classmethod
    def from_event(cls, guess: Mapping[str, str]) -> Guess:
        """The inverse of `as_dict`."""
        return cls(BugClass(guess["class"]), guess["reason"], Confidence(guess["confidence"]))


@dataclass(frozen=True, slots=True)
class Rule:
    """If `fits`, the guess is `bug`. The first rule of the table that fits decides."""

    name: str
    bug: BugClass
    fits: Callable[[Evidence], bool]
    reason: str
    confidence: Confidence

    @property
    def guess(self) -> Guess:
        return Guess(self.bug, self.reason, self.confidence)


_SLOT_HOLDS = (Reason.POSITION, Reason.TOKEN, Reason.CHAIN)
_LIFETIME = (Reason.USE_AFTER_FREE, Reason.UNWRITTEN_SINCE_ALLOC)


def _holds_something_else(e: Evidence) -> bool:
    return e.has(*_SLOT_HOLDS) and e.only(*_SLOT_HOLDS)


def _written_by_another(e: Evidence) -> bool:
    return _holds_something_else(e) and e.is_foreign


def _own_position(e: Evidence) -> bool:
    return _holds_something_else(e) and e.is_own and e.has(Reason.POSITION)


def _bytes_only(e: Evidence) -> bool:
    return e.has(Reason.CONTENT) and e.only(Reason.CONTENT)


def _never_written(e: Evidence) -> bool:
    return e.has(Reason.NEVER_WRITTEN)


def _freed_prefix(e: Evidence) -> bool:
    return e.has(*_LIFETIME) and e.same_position and e.same_chain and not e.has_other_token


def _is_of_an_entry(e: Evidence) -> bool:
    """Whether a wrong entry explains it, and no free of the reader's own slot does."""
    return (
        _never_written(e)
        or _holds_something_else(e)
        or (e.has(*_LIFETIME) and not _freed_prefix(e))
    )


def _freed_swa_again(e: Evidence) -> bool:
    return e.has(Reason.DOUBLE_FREE) and e.kind is PoolKind.SWA and not e.is_freed_in_full


SURE, LIKELY, UNSURE = Confidence
# Order matters. What the forward was given comes first, then what can be seen of the slot alone, then what takes the
# history of reader and writer.
RULES: tuple[Rule, ...] = (
    Rule(
        "stale weights",
        BugClass.STALE_WEIGHTS,
        lambda e: e.has(Reason.STALE_WEIGHTS),
        "the weights were updated between write and read, without a flush",
        SURE,
    ),
    Rule(
        "SWA slot freed twice through the mapping",
        BugClass.SWA_MAPPING,
        lambda e: _freed_swa_again(e) and e.was_freed_through_mapping,
        "a free clears the entries that it goes through: an entry outlived its slot, or two full slots shared it",
        LIKELY,
    ),
    Rule(
        "SWA slot freed twice",
        BugClass.DOUBLE_FREE,
        lambda e: _freed_swa_again(e) and not e.moments,
        "two owners, or a full-to-SWA entry that outlived its slot: who freed it is not known",
        UNSURE,
    ),
    Rule(
        "double free",
        BugClass.DOUBLE_FREE,
        lambda e: e.has(Reason.DOUBLE_FREE),
        "the allocator was given a slot that was already free",
        SURE,
    ),
    Rule(
        "wrong position",
        BugClass.WRONG_POSITION,
        lambda e: e.has(Reason.WRITE_POSITION),
        "the forward was given a position that does not continue the request",
        SURE,
    ),
    Rule(
        "altered token",
        BugClass.ALTERED_TOKEN,
        lambda e: e.has(Reason.WRITE_TOKEN),
        "the forward was given a token that is not the request's",
        SURE,
    ),
    Rule(
        "stale location",
        BugClass.SWA_MAPPING,
        lambda e: e.has(Reason.WRITE_LOCATION),
        "attention uses a translation that the mapping does not have, or no longer has",
        LIKELY,
    ),
    Rule(
        "wrong inputs",
        BugClass.WRONG_INPUTS,
        lambda e: e.has(Reason.ROW_OUT_OF_RANGE, Reason.LENGTH_OUT_OF_RANGE),
        "the forward was given a row or length that no request has",
        LIKELY,
    ),
    Rule(
        "wrong length",
        BugClass.WRONG_INPUTS,
        lambda e: e.has(Reason.ROW_LENGTH),
        "the forward was given a length that the request's last forward did not leave",
        LIKELY,
    ),
    Rule(
        "damaged state",
        BugClass.RECORDS_DAMAGED,
        lambda e: e.has(Reason.BAD_STATE),
        "the canary never writes such a writer word",
        SURE,
    ),
    Rule(
        "record of a prefill server",
        BugClass.LATE_WRITE,
        lambda e: e.history.is_of_peer and _holds_something_else(e),
        "a prefill server's record lies there, so a transfer wrote to the slot after it had another owner",
        LIKELY,
    ),
    Rule(
        "one record",
        BugClass.RECORDS_DAMAGED,
        lambda e: (
            e.in_one_record
            and (_holds_something_else(e) or e.only(Reason.NEVER_WRITTEN) or e.only(*_LIFETIME))
        ),
        "only one of the slot's records is wrong; a wrong slot would make all of them wrong",
        LIKELY,
    ),
    Rule(
        "one bit of a fingerprint",
        BugClass.RECORDS_DAMAGED,
        lambda e: _bytes_only(e) and e.one_bit_of_content,
        "the fingerprints differ in a single bit, so the record changed rather than the bytes",
        LIKELY,
    ),
    Rule(
        "stored after the fingerprint",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and e.first.content_written == ALL_ZERO,
        "the bytes were all zero after the writer's forward and came later",
        LIKELY,
    ),
    Rule(
        "one word",
        BugClass.BYTES_DAMAGED,
        lambda e: _bytes_only(e) and e.one_word and len(e.halves_seen) == 1,
        "one changed word explains it; a store of a token would change many",
        LIKELY,
    ),
    Rule(
        "one word of each half",
        BugClass.BYTES_DAMAGED,
        lambda e: _bytes_only(e) and e.one_word,
        "one changed word explains one half, so no whole token was stored; but K and V have both changed",
        UNSURE,
    ),
    Rule(
        "handed out while it was awaited",
        BugClass.USE_AFTER_FREE,
        lambda e: e.is_arrival and e.is_anothers and (_is_of_an_entry(e) or e.has(*_LIFETIME)),
        "the slot was handed out to another request while the transfer into it was awaited",
        LIKELY,
    ),
    Rule(
        "a free slot arrived",
        BugClass.WRONG_TRANSFER,
        lambda e: e.is_free_on_peer,
        "the record of a free slot has arrived: the prefill server sent a slot that it had freed",
        LIKELY,
    ),
    Rule(
        "nothing arrived",
        BugClass.WRONG_TRANSFER,
        lambda e: e.is_arrival and (_never_written(e) or e.has(*_LIFETIME)),
        "no record has arrived in the slot: the transfer left it out, or wrote elsewhere",
        LIKELY,
    ),
    Rule(
        "another token arrived",
        BugClass.WRONG_TRANSFER,
        lambda e: e.is_arrival and _holds_something_else(e),
        "what arrived belongs to another slot or request: the transfer exchanged or shifted slots",
        LIKELY,
    ),
    Rule(
        "other bytes arrived",
        BugClass.WRONG_TRANSFER,
        lambda e: e.is_arrival and _bytes_only(e),
        "the record fits and the bytes do not: layers or slots were left out, exchanged, or sent too early",
        LIKELY,
    ),
    Rule(
        "one half of several slots",
        BugClass.LATE_WRITE,
        lambda e: (
            _bytes_only(e) and e.is_complete and len(e.halves_seen) == 1 and e.changed_beside > 0
        ),
        "bytes of other slots have changed, too: a store, a copy of one half, or damage to a whole area",
        UNSURE,
    ),
    Rule(
        "bytes of one half",
        BugClass.BYTES_DAMAGED,
        lambda e: (
            _bytes_only(e) and e.is_complete and len(e.halves) > 1 and len(e.halves_seen) == 1
        ),
        "only one half has changed; a store of a whole token would change both",
        LIKELY,
    ),
    Rule(
        "bytes of an SWA slot",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and len(e.halves_seen) > 1 and e.kind is PoolKind.SWA,
        "a stray store of a token, or one through a stale full-to-SWA translation: which one the bytes cannot tell",
        UNSURE,
    ),
    Rule(
        "bytes of a page",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and len(e.halves_seen) > 1 and e.first.tier is not None,
        "K and V of the page have both changed: its copy brought other bytes, or something wrote to it since",
        LIKELY,
    ),
    Rule(
        "bytes of a filled slot",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and len(e.halves_seen) > 1 and e.was_filled,
        "K and V are not those that filled the slot: the copy brought other bytes, or something wrote there since",
        LIKELY,
    ),
    Rule(
        "bytes of all halves",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and len(e.halves_seen) > 1,
        "K and V have both changed, as a store of a whole token does, and no forward on record made it",
        LIKELY,
    ),
    Rule(
        "bytes of a filled slot, in part",
        BugClass.LATE_WRITE,
        lambda e: _bytes_only(e) and e.was_filled and not e.is_complete,
        "the bytes are not those that filled the slot; whether both halves have changed is not known",
        UNSURE,
    ),
    Rule(
        "bytes",
        BugClass.BYTES_DAMAGED,
        _bytes_only,
        "a stray store of a token or a memory error; what is known of the halves cannot tell",
        UNSURE,
    ),
    Rule(
        "freed with its full slot",
        BugClass.USE_AFTER_FREE,
        lambda e: e.has(Reason.SWA_EVICTED_IN_WINDOW) and e.was_freed_with_full,
        "the full slot was freed after the reader's last forward, and its SWA slot with it",
        LIKELY,
    ),
    Rule(
        "free full slot",
        BugClass.USE_AFTER_FREE,
        lambda e: e.has(Reason.SWA_EVICTED_IN_WINDOW) and e.is_full_free,
        "the full slot is free, so it has no SWA slot: freed too early, or the row's entry is wrong",
        UNSURE,
    ),
    Rule(
        "evicted in the window",
        BugClass.SWA_MAPPING,
        lambda e: e.has(Reason.SWA_EVICTED_IN_WINDOW) and e.is_full_intact,
        "the full slot is intact and the mapping has no SWA slot for it: evicted too early, or its entry was cleared",
        LIKELY,
    ),
    Rule(
        "evicted, full slot unknown",
        BugClass.SWA_MAPPING,
        lambda e: e.has(Reason.SWA_EVICTED_IN_WINDOW),
        "evicted too early, its entry was cleared, or the full slot was freed: what became of that one is not known",
        UNSURE,
    ),
    Rule(
        "padding slot",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(Reason.UNMAPPED_SLOT),
        "the row holds the padding slot inside the request's length",
        LIKELY,
    ),
    Rule(
        "out of the pool",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(Reason.SLOT_OUT_OF_RANGE) and e.kind is PoolKind.FULL,
        "the row holds a number that is no slot",
        LIKELY,
    ),
    Rule(
        "mapped out of the pool",
        BugClass.SWA_MAPPING,
        lambda e: e.has(Reason.SLOT_OUT_OF_RANGE) and e.kind is PoolKind.SWA,
        "the row or the mapping holds a number that is no slot",
        UNSURE,
    ),
    Rule(
        "row of another prefix",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(Reason.ROW_CHAIN) and e.same_slot is None,
        "the slots agree with each other, but lead to another prefix than the request's last forward left",
        LIKELY,
    ),
    Rule(
        "row of another prefix, slot damaged",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(Reason.ROW_CHAIN),
        "the row's last slot has a cause of its own, which may explain it",
        UNSURE,
    ),
    Rule(
        "another page was stored",
        BugClass.WRONG_TRANSFER,
        lambda e: _holds_something_else(e) and e.first.tier is not None,
        "the page is that of other tokens than its key: stored under another key, or exchanged with another file",
        LIKELY,
    ),
    Rule(
        "another token was loaded",
        BugClass.WRONG_TRANSFER,
        lambda e: _holds_something_else(e) and e.is_misfilled,
        "the prefix cache has the slot here, too, and it was filled from elsewhere: with another slot's KV",
        LIKELY,
    ),
    Rule(
        "row of two requests",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.history.is_row_shared and _is_of_an_entry(e),
        "another request ran in the reader's row and has not given it back",
        LIKELY,
    ),
    Rule(
        "came without records",
        BugClass.LATE_WRITE,
        lambda e: _never_written(e) and e.was_filled,
        "the slot was filled from elsewhere, and its record came empty: what was copied had been given up before",
        UNSURE,
    ),
    Rule(
        "never written, SWA",
        BugClass.SWA_MAPPING,
        lambda e: _never_written(e) and e.kind is PoolKind.SWA and e.is_complete,
        "the full slot was written, and the SWA slot that it maps to was not",
        LIKELY,
    ),
    Rule(
        "never written, stored elsewhere",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _never_written(e) and e.is_elsewhere,
        "the request has stored this position in another slot, which is intact",
        LIKELY,
    ),
    Rule(
        "never written, at several positions",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _never_written(e) and e.is_repeated,
        "the row leads to the slot at several positions",
        LIKELY,
    ),
    Rule(
        "never handed out",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _never_written(e) and e.was_free,
        "the allocator has not handed the slot out",
        LIKELY,
    ),
    Rule(
        "never stored",
        BugClass.NEVER_STORED,
        lambda e: _never_written(e) and e.was_handed_out,
        "the slot was handed out, and no forward has stored to it",
        LIKELY,
    ),
    Rule(
        "never written",
        BugClass.NEVER_STORED,
        _never_written,
        "a store that is missing, or a wrong entry in the row: whether the slot was handed out is not known",
        UNSURE,
    ),
    Rule(
        "freed while in use",
        BugClass.USE_AFTER_FREE,
        lambda e: (
            _freed_prefix(e)
            and (e.is_own or (e.first.expected_token is not None and not e.is_of_earlier_owner))
        ),
        "the slot still holds the reader's own prefix, so it was freed too early",
        SURE,
    ),
    Rule(
        "read before the free",
        BugClass.USE_AFTER_FREE,
        lambda e: _freed_prefix(e) and e.was_read_before,
        "another request wrote the slot, and the reader's forward before read it, too: it was not free then",
        LIKELY,
    ),
    Rule(
        "handed out and not stored",
        BugClass.NEVER_STORED,
        lambda e: _freed_prefix(e) and e.was_handed_out,
        "a store of the new owner is missing, or the slot was freed too early: without its token nobody can tell",
        UNSURE,
    ),
    Rule(
        "another's slot freed while in use",
        BugClass.USE_AFTER_FREE,
        lambda e: _freed_prefix(e) and e.was_free and e.first.prev_slot != PREV_ANCHOR,
        "the slot continues what lies before it; its token could not be compared, and another request wrote it",
        LIKELY,
    ),
    Rule(
        "another's free slot",
        BugClass.USE_AFTER_FREE,
        _freed_prefix,
        "another request wrote the slot and its token could not be compared: it may never have been the reader's",
        UNSURE,
    ),
    Rule(
        "freed while cached",
        BugClass.USE_AFTER_FREE,
        lambda e: e.is_sweep and e.has(Reason.USE_AFTER_FREE),
        "the prefix cache holds a slot that has been given back: freed too early, or cached after its free",
        LIKELY,
    ),
    Rule(
        "own slot freed while in use",
        BugClass.USE_AFTER_FREE,
        lambda e: (
            e.has(*_LIFETIME) and e.same_position and e.is_own and e.first.expected_chain is None
        ),
        "the reader itself wrote the slot, at this position, before it was freed",
        LIKELY,
    ),
    Rule(
        "free slot, stored elsewhere",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(*_LIFETIME) and e.is_elsewhere,
        "the request has stored this position in another slot, which is intact",
        LIKELY,
    ),
    Rule(
        "free slot, handed out again",
        BugClass.NEVER_STORED,
        lambda e: e.has(*_LIFETIME) and e.was_handed_out,
        "the slot was handed out again and not stored to: a store that is missing, or a wrong entry in the row",
        UNSURE,
    ),
    Rule(
        "free slot of somebody else",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(*_LIFETIME),
        "the free slot holds nothing of the reader's: a wrong entry in its row, or a store that is missing",
        UNSURE,
    ),
    Rule(
        "shared SWA slot",
        BugClass.SWA_MAPPING,
        lambda e: _holds_something_else(e) and e.kind is PoolKind.SWA and e.is_complete,
        "the full slot is right and the SWA slot that it maps to is not",
        LIKELY,
    ),
    Rule(
        "written after a free",
        BugClass.USE_AFTER_FREE,
        lambda e: _holds_something_else(e) and e.was_held,
        "the slot was freed while the reader held it, and has been written since",
        SURE,
    ),
    Rule(
        "freed and written while in use",
        BugClass.USE_AFTER_FREE,
        lambda e: _holds_something_else(e) and e.written_since and e.was_freed_between,
        "the slot was freed after the reader's last forward, and has been written since",
        LIKELY,
    ),
    Rule(
        "stored elsewhere",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _holds_something_else(e) and e.is_elsewhere and e.swapped is None,
        "the request has stored this position in another slot, which is intact",
        LIKELY,
    ),
    Rule(
        "free slot, written since",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _holds_something_else(e) and e.freed_before is not None,
        "the slot was free at an earlier read, and it is not known that it ever was the reader's",
        UNSURE,
    ),
    Rule(
        "writer was dead",
        BugClass.LATE_WRITE,
        lambda e: _written_by_another(e) and e.history.writer_was_dead,
        "the writer's request had already ended when its forward stored",
        LIKELY,
    ),
    Rule(
        "handed out twice",
        BugClass.ALIASING,
        lambda e: (
            (_written_by_another(e) or (e.is_sweep and _holds_something_else(e)))
            and e.is_handed_out_twice
        ),
        "the allocator handed the slot out twice, and no free came between",
        LIKELY,
    ),
    Rule(
        "freed before it was filled",
        BugClass.USE_AFTER_FREE,
        lambda e: _holds_something_else(e) and e.was_freed_unfilled,
        "the slot was freed before it was filled from elsewhere, and handed out again after that",
        LIKELY,
    ),
    Rule(
        "handed out while filled",
        BugClass.ALIASING,
        lambda e: _holds_something_else(e) and e.is_handed_out_filled,
        "the slot was handed out again after it was filled from elsewhere, and no free came between",
        LIKELY,
    ),
    Rule(
        "written while in use",
        BugClass.ALIASING,
        lambda e: _written_by_another(e) and e.written_since and e.has(Reason.POSITION),
        "another request stored a token of another position to the slot while the reader ran",
        LIKELY,
    ),
    Rule(
        "entry changed since the last read",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _written_by_another(e) and e.read_between,
        "the slot has not changed since the reader's last forward, which found its prefix intact",
        LIKELY,
    ),
    Rule(
        "prefix of another beginning",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _written_by_another(e) and e.begins_elsewhere,
        "its chain begins with another token, extra key, salt or adapter: a prefix hit of another request's prefix",
        LIKELY,
    ),
    Rule(
        "another request's slot, cached",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _written_by_another(e) and e.is_cached_there,
        "the prefix cache has the slot here, too: its prefix is wrong, or the slot was handed out while it was cached",
        UNSURE,
    ),
    Rule(
        "another request's slot",
        BugClass.ROW_SUBSTITUTION,
        _written_by_another,
        "a wrong entry in the row, a wrong prefix hit, or a slot mapped twice: when the entry changed is not known",
        UNSURE,
    ),
    Rule(
        "entries exchanged",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _own_position(e) and e.swapped is not None,
        "two slots of the row hold each other's positions",
        SURE,
    ),
    Rule(
        "own slot of another position",
        BugClass.ROW_SUBSTITUTION,
        lambda e: _own_position(e) and e.read_between,
        "the slot has not changed since the reader's last forward, which found its prefix intact",
        LIKELY,
    ),
    Rule(
        "own slot written again",
        BugClass.ALIASING,
        lambda e: _own_position(e) and e.written_since,
        "the reader stored a later token to a slot that it still holds",
        LIKELY,
    ),
    Rule(
        "own slot, other position",
        BugClass.ROW_SUBSTITUTION,
        _own_position,
        "entries that were exchanged or shifted, or one slot for two positions",
        UNSURE,
    ),
    Rule(
        "own slot behind others",
        BugClass.ROW_SUBSTITUTION,
        lambda e: e.has(Reason.CHAIN) and e.only(Reason.CHAIN) and e.is_own and e.diverges_before,
        "the slot is the reader's own; an entry before it leads to another token, position or request",
        LIKELY,
    ),
    Rule(
        "own slot, other token",
        BugClass.ALTERED_TOKEN,
        lambda e: _holds_something_else(e) and e.is_own and e.has(Reason.TOKEN),
        "the reader itself stored a token that is not in its list",
        LIKELY,
    ),
    Rule(
        "unknown",
        BugClass.UNKNOWN,
        lambda e: True,
        "what was found fits several classes",
        UNSURE,
    ),
)


def decide(evidence: Evidence) -> Rule:
    """The first rule that fits, or that of the cause from which this one follows."""
    found = _began(evidence)
    return next(rule for rule in RULES if rule.fits(found))


def classify(evidence: Evidence) -> Guess:
    """The guess about a cause."""
    guess, found = decide(evidence).guess, _began(evidence)
    if found is evidence:
        return guess
    return replace(guess, reason=f"it follows from cause #{found.first.cause}: {guess.reason}")


def _began(evidence: Evidence) -> Evidence:
    while evidence.origin is not None:
        evidence = evidence.origin
    return evidence
