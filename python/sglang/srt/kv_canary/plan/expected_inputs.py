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
MOST_WORDS_IN_PLACE = 2048  # 16 KiB, less than 1 us over PCIe 5.0 at half of its 63 GB/s
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
    """Memory for the lists of one forward, which the next one's replace. Its views are made once.

    On a GPU the host writes lists to pinned memory of its own, in TURNS parts that are used in turn. To ask torch for
    it, and for views of it, takes longer than the copy. Kernels read short lists where they lie: the copy takes the
    host longer than their way over the bus takes the GPU.
    """

    __slots__ = ("_lists", "_parts", "_turn", "_unread", "_views", "words")

    def __init__(self, words: int, device: torch.device | str) -> None:
        """`words`: of the lists of a forward, int64, on the device."""
        self.words = torch.zeros(words, dtype=torch.int64, device=device)
        self._lists = Lists(self.words)
        self._views = views_of(self.words)
        self._parts = [_Part(words) for _ in range(TURNS)] if self.words.is_cuda else ()
        self._turn = 0
        self._unread: _Part | None = None  # the last one: what reads it may not be queued yet

    def put(self, known: list[KnownTokens], words: int, on_device: bool = False) -> Lists | None:
        """Lists of `words` words, for what is queued on the current stream before the next lists are put.

        `on_device`: not in place, because torch reads them, too. None: they do not fit. The host does not wait.
        """
        if words > self.words.shape[0]:
            return None
        if not self._parts:
            HOST.pack_lists(known, self.words.data_ptr(), words)
            return self._lists
        if self._unread is not None:
            record(self._unread.done, self.words)
            self._unread = None
        part = self._parts[(self._turn + 1) % TURNS]
        if not part.done.query():  # all parts are on their way
            self.words[:words].copy_(_packed(known, words, pinned=True), non_blocking=True)
            return self._lists
        self._turn, self._unread = (self._turn + 1) % TURNS, part
        HOST.pack_lists(known, part.address, words)
        if words <= MOST_WORDS_IN_PLACE and not on_device:
            return part.lists
        size = (words - 1).bit_length()
        self._views[size].copy_(part.views[size], non_blocking=True)
        return self._lists


class Lists:
    """Lists in `words`, int64[any], which begin with their spans."""

    __slots__ = ("_spans", "_words", "tokens")

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words
        self.tokens = words.view(torch.int32)
        self._spans: dict[int, torch.Tensor] = {}  # by batch size

    def spans(self, batch_size: int) -> torch.Tensor:
        """int64[batch size, SPAN_WORDS], the first words."""
        found = self._spans.get(batch_size)
        if found is None:
            found = self._spans[batch_size] = _spans_in(self._words, batch_size)
        return found


class _Part:
    """Pinned memory of the host, the views of it that are copied, and what says that nothing reads it any more."""

    __slots__ = ("address", "done", "lists", "views")

    def __init__(self, words: int) -> None:
        pinned = torch.zeros(words, dtype=torch.int64, pin_memory=True)
        self.address, self.views = pinned.data_ptr(), views_of(pinned)
        self.lists = Lists(pinned)
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
        on_device: bool = False,
    ) -> ExpectedTokens:
        """From one KnownTokens per request. `on_device`: for torch, too. Kernels also read memory of the host.

        Lists that fit into `memory`, of `device`, are put there, in order of the current stream. They stay valid
        until the next lists are put. A separate allocation would move SGLang's activations, which slows prefill by
        0.25 %.
        """
        device = torch.device(device)
        count = sum([len(k.tokens) for k in known])
        if not count and all(k.start == RowStart.KEEP for k in known):
            return cls.nothing(len(known), device)
        # One copy for both: it does not wait, but each copy costs host time.
        size = SPAN_WORDS * len(known) + max(1, (count + 1) // 2)
        lists = None if memory is None else memory.put(list(known), size, on_device)
        if lists is not None:
            return cls(lists.tokens, lists.spans(len(known)))
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
