"""Slots that a store outside of SGLang fills, layer by layer during a forward. It keeps no records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .. import record
from ..config import ContentMode
from ..plan.host_chain import chain_of_tokens, links_of_tokens
from ..plan.upload import upload
from ..pool_kind import Side
from .launcher import Launcher

__all__ = ["LoadedPrefix", "adopt_content", "write_records"]


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """A cached prefix whose last slots are being filled."""

    tokens: list[int]  # from position 0
    # int64[n], FULL: those of the last n tokens. Their SWA slots get records, too, as far as they are mapped.
    slots: torch.Tensor
    anchor: int


def write_records(launcher: Launcher, prefix: LoadedPrefix, forward: int) -> None:
    """Records of the tokens that the slots are to hold. Their content is unknown until `adopt_content`."""
    first = len(prefix.tokens) - prefix.slots.shape[0]
    before = chain_of_tokens(prefix.tokens[:first], prefix.anchor)
    identities, chains = links_of_tokens(prefix.tokens[first:], before, first)
    words = np.zeros((len(chains), record.RECORD_WORDS), dtype=np.int64)
    words[:, record.WORD_IDENTITY], words[:, record.WORD_CHAIN] = identities, chains
    words[:, record.WORD_WRITER] = record.pack_writer(
        forward, 0, record.Mode.LOADED, record.State.LIVE
    )
    rows = upload(words.reshape(-1), prefix.slots.device).view(-1, record.RECORD_WORDS)
    for group in launcher.groups:
        slots = group.own_slots(prefix.slots)
        for half in group.halves:
            for side in (Side.HEAD, Side.TAIL):
                records = group.records(half, side)
                records[slots] = rows
                records[0] = 0  # the padding slot, where tokens without a slot went


def adopt_content(launcher: Launcher, slots: torch.Tensor) -> None:
    """The bytes of `slots` (int64[n], FULL) are there now. Fingerprint those whose content is unknown."""
    if launcher.content_mode is not ContentMode.NONE:
        for group in launcher.groups:
            launcher.renew_content(group, group.own_slots(slots), only_unknown=True)
