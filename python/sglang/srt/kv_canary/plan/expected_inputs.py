"""The host's knowledge of a forward's tokens, on the device: its own token lists and each request's start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch

from ..cuda_streams import record
from ..host_code import HOST
from ..host_code.twins import SPAN_WORDS

TURNS = 4  # lists that may be on their way at once: a scheduler is ahead of the device by two forwards, as a rule
TAIL_TOKENS = 32  # prefix tokens compared per request when the token check is `tail`


def words_of_lists(batch_size: int, new_tokens: int) -> int:
    """int64 words for the lists of a batch: `new_tokens` tokens, and TAIL_TOKENS before those of each request."""
    return batch_size * (SPAN_WORDS + TAIL_TOKENS // 2) + (new_tokens + 1) // 2


class RowStart(IntEnum):
    """What the host says about a request's row instead of a length."""

    KEEP = -1  # the row is as its last forward left it
    FORGET = -2  # the request is new in the row, and its prefix's chain is unknown
    DECODES = -3  # KEEP, and the request's first new token is the one sampled for it


class KnownTokens(NamedTuple):
    """What the host knows about one request of a batch. A tuple, as `host_code` takes it.

    The token at position p is known iff first <= p < first + len(tokens). `start` >= 0: the request is new in its
    row, with `start` cached tokens whose chain is `start_chain`. Otherwise `start` is a RowStart.
    """

    first: int = 0
    tokens: Sequence[int] = ()
    start: int = RowStart.KEEP
    start_chain: int = 0


class ListMemory:
    """Memory on the device for the lists of one forward, which the next one's replace. Its views are made once.

    On a GPU the host writes lists to pinned memory of its own, in TURNS parts that are used in turn: to ask torch for
    pinned memory, and for views of it, takes longer than the copy.
    """

    __slots__ = ("_parts", "_spans", "_turn", "_views", "tokens", "words")

    def __init__(self, words: int, device: torch.device | str) -> None:
        """`words`: of the lists of a forward, int64."""
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        self.tokens = self.words.view(torch.int32)
        self._spans: dict[int, torch.Tensor] = {}  # by batch size
        self._views = views_of(self.words)
        self._parts = [_Part(words) for _ in range(TURNS)] if self.words.is_cuda else ()
        self._turn = 0

    def put(self, known: list[KnownTokens], words: int) -> bool:
        """Copy lists of `words` words here, in order of the current stream. Returns whether they fit.

        They stay valid until the next lists are put. The host does not wait.
        """
        if words > self.words.shape[0]:
            return False
        if not self._parts:
            HOST.pack_lists(known, self.words.data_ptr(), words)
            return True
        part = self._parts[(self._turn + 1) % TURNS]
        if not part.done.query():  # all parts are on their way
            self.words[:words].copy_(_packed(known, words, pinned=True), non_blocking=True)
            return True
        self._turn = (self._turn + 1) % TURNS
        HOST.pack_lists(known, part.address, words)
        size = (words - 1).bit_length()
        self._views[size].copy_(part.views[size], non_blocking=True)
        record(part.done, self.words)
        return True

    def spans(self, batch_size: int) -> torch.Tensor:
        """int64[batch size, SPAN_WORDS], the first words."""
        found = self._spans.get(batch_size)
        if found is None:
            found = self._spans[batch_size] = _spans_in(self.words, batch_size)
        return found


class _Part:
    """Pinned memory of the host, the views of it that are copied, and what says that its copy is done."""

    __slots__ = ("address", "done", "views")

    def __init__(self, words: int) -> None:
        pinned = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self.address, self.views = pinned.data_ptr(), views_of(pinned)
        self.done = torch.cuda.Event()


def _packed(known: list[KnownTokens], words: int, pinned: bool) -> torch.Tensor:
    """The lists in new memory of the host, int64[words]."""
    host = torch.empty(words, dtype=torch.int64, pin_memory=pinned)
    HOST.pack_lists(known, host.data_ptr(), words)
    return host


def views_of(words: torch.Tensor) -> list[torch.Tensor]:
    """The first 1, 2, 4, ... of `words`, and all of them."""
    size = words.shape[0]
    return [words[: min(1 << i, size)] for i in range((size - 1).bit_length() + 1)]


def _spans_in(words: torch.Tensor, batch_size: int) -> torch.Tensor:
    return words[: SPAN_WORDS * batch_size].view(-1, SPAN_WORDS)


@dataclass(slots=True)
class ExpectedTokens:
    """What the host knows about each request of a batch.

    `tokens` int32[n], in which only what a span names is a token; `spans` int64[batch size, SPAN_WORDS] of (offset
    into `tokens`, first position, count, start, start chain), see KnownTokens.
    """

    tokens: torch.Tensor
    spans: torch.Tensor

    @classmethod
    def from_lists(
        cls,
        known: Sequence[KnownTokens],
        device: torch.device | str,
        memory: ListMemory | None = None,
    ) -> ExpectedTokens:
        """From one KnownTokens per request.

        Lists that fit into `memory`, on `device`, are copied there, in order of the current stream. They stay valid
        until the next lists are copied. A separate allocation would move SGLang's activations, which slows prefill by
        0.25 %.
        """
        device = torch.device(device)
        count = sum([len(k.tokens) for k in known])
        if not count and all(k.start == RowStart.KEEP for k in known):
            return cls.nothing(len(known), device)
        # One copy for both: it does not wait, but each copy costs host time.
        size = SPAN_WORDS * len(known) + max(1, (count + 1) // 2)
        if memory is not None and memory.put(list(known), size):
            return cls(memory.tokens, memory.spans(len(known)))
        host = _packed(list(known), size, device.type == "cuda")
        packed = host.to(device, non_blocking=True)
        return cls(packed.view(torch.int32), _spans_in(packed, len(known)))

    @classmethod
    def nothing(cls, batch_size: int, device: torch.device) -> ExpectedTokens:
        """Nothing is known about any request. Costs nothing."""
        tokens, spans = _nothing(1 << max(0, batch_size - 1).bit_length(), device)
        return cls(tokens, spans[:batch_size])


# Works them out, for checks that run after a forward's layers. Called once, or not at all
ExpectedLater = Callable[[], "ExpectedTokens | None"]


@lru_cache
def _nothing(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One token, and spans of length 0. They are never written."""
    spans = torch.zeros(batch_size, SPAN_WORDS, dtype=torch.int64, device=device)
    spans[:, 3] = RowStart.KEEP
    return torch.zeros(1, dtype=torch.int32, device=device), spans
