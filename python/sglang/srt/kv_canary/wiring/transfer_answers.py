"""What prefill-decode disaggregation must know of a family of releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TransferAnswers"]


@dataclass(frozen=True, slots=True)
class TransferAnswers:
    """Of requests on a decode server, unless it says otherwise."""

    committed: Callable[[Any], int]  # tokens whose K and V have arrived
    cached: Callable[[Any], int]  # of them, those that its prefix cache had
    is_fake: Callable[[Any, Any], bool]  # (request, ServerArgs): nothing is transferred
    parallelism: Callable[[], tuple[int, int]]  # sizes of attention TP and of PP, of this server
    # (a manager of a prefill rank, address, message): to a decode rank, before the transfer's status
    send: Callable[[Any, Any, Sequence[bytes]], None]
