"""Row memory: whether a row is what its last forward left, and its token was sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ... import record
from ...plan.expected_inputs import RowStart
from ...record import Reason
from ..layout import WRITE_TILE
from . import check, hashing
from .host import array
from .spans import Launch, Requests, entries_at


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is known of each request's row, int64[batch size]."""

    lengths: np.ndarray  # -1: nothing
    chains: np.ndarray
    sampled: np.ndarray  # the token that follows; UNKNOWN where nothing says so
    growth: np.ndarray  # tokens that the row may have grown by since; 0 where that is known

    def seeds(self, requests: Requests) -> np.ndarray:
        """Chain before each request's first new token, used where the record before it cannot be read.

        0 where several programs write the request's tokens: one stores the row that the others would read.
        """
        read = (self.lengths == requests.prefix_lens) & (requests.ext_lens <= WRITE_TILE)
        return self.chains * read

    def inputs(self, requests: Requests) -> np.ndarray:
        """First new token of each request, UNKNOWN where nothing says so."""
        return np.where(self.lengths == requests.prefix_lens, self.sampled, record.UNKNOWN)


def remember(launch: Launch) -> Remembered:
    """What the host or the row's last forward says of the rows."""
    plan, requests, state = launch.plan, launch.requests, launch.state
    memory = array(state.row_memory.of(launch.group))
    rows = requests.rows * requests.valid
    word, chains = memory[rows, record.ROW_WORD_LENGTH], memory[rows, record.ROW_WORD_CHAIN]
    token = array(state.row_memory.sampled)[rows]
    lengths = (word & record.FORWARD_MASK) - 1
    # 0: nothing was sampled yet, or the forward counter has just wrapped.
    fits = ((word >> 32) == (token >> 32)) & ((word >> 32) != 0)
    starts = np.full_like(rows, RowStart.KEEP)
    if plan.expected is not None:
        starts, told_chains = array(plan.expected.spans)[:, 3:5].T
        chains = np.where(starts >= 0, told_chains, chains)
        lengths = np.where(starts == RowStart.FORGET, -1, lengths)
        lengths = np.where(starts >= 0, starts, lengths)
    decodes = starts == RowStart.DECODES
    if plan.write.ext_lens is None:
        decodes |= starts == RowStart.KEEP
    sampled = np.where(decodes & fits, hashing.stored_token(token), record.UNKNOWN)
    growth = np.where(fits | (starts >= 0), 0, plan.row_growth)
    return Remembered(lengths, chains, sampled, growth)


def certain_tokens(plan, requests: Requests) -> np.ndarray:
    """New tokens of each request that stay. Of drafts only the first one does. 0 for padding."""
    certain = np.maximum(requests.ext_lens, 0)
    if plan.write.ext_lens is None:
        certain = np.minimum(certain, 1)
    last = requests.starts + certain - 1
    inside = requests.valid & (certain > 0) & (last >= 0) & (last < plan.num_tokens)
    full = array(plan.write.out_cache_loc)[last * inside] if plan.num_tokens else 0
    return certain * (inside & (full != 0))


def check_rows(launch: Launch, remembered: Remembered) -> None:
    """Report rows whose length or chain is not what is remembered of them."""
    plan, group, requests = launch.plan, launch.group, launch.requests
    records = array(group.k_head)
    prefix, lengths = requests.prefix_lens, remembered.lengths
    known = (certain_tokens(plan, requests) > 0) & (lengths >= 0)
    wrong_length = known & ((lengths > prefix) | (prefix - lengths > remembered.growth))
    last = np.where(known & ~wrong_length, lengths - 1, -1)
    full = entries_at(plan, requests.rows * requests.valid, last)
    slots, slot_reasons = check.translate(group, full)
    words = records[slots]
    chain, writer = words[:, record.WORD_CHAIN], words[:, record.WORD_WRITER]
    live = hashing.state_of(writer) == record.State.LIVE
    wrong_chain = (last >= 0) & (slot_reasons == 0) & live & (chain != remembered.chains)
    reasons = np.where(wrong_length, int(Reason.ROW_LENGTH), wrong_chain * int(Reason.ROW_CHAIN))

    def of_chain(value: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: np.where(wrong_chain, value, record.UNKNOWN)

    identity = words[:, record.WORD_IDENTITY]
    launch.report().append(
        reasons,
        slot=of_chain(slots),
        full_slot=of_chain(full),
        expected_position=np.where(wrong_chain, last, lengths),
        stored_position=np.where(wrong_chain, hashing.stored_position(identity), prefix),
        stored_token=of_chain(hashing.stored_token(identity)),
        expected_chain=of_chain(remembered.chains),
        stored_chain=of_chain(chain),
        reader_row=requests.rows,
        writer=np.where(wrong_chain, writer, 0),
    )


def store_rows(launch: Launch, chains: np.ndarray) -> None:
    """Store what this forward leaves in the rows. `chains` int64[new tokens], request by request."""
    plan, requests = launch.plan, launch.requests
    certain = certain_tokens(plan, requests)
    ext = requests.new_tokens
    keep = certain > 0
    at = (ext.cumsum() - ext + certain - 1)[keep]
    memory, rows = array(launch.state.row_memory.of(launch.group)), requests.rows[keep]
    lengths = (requests.prefix_lens + certain)[keep]
    word = (lengths + 1) | (record.to_signed64(launch.forward << 32))
    memory[rows, record.ROW_WORD_LENGTH] = word
    memory[rows, record.ROW_WORD_CHAIN] = chains[at]
