"""What prefill-decode disaggregation must know of a family of releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..transfer.layout import TransferLayout
    from ..transfer.notice import NoticeBoard

__all__ = ["TransferAnswers", "Transport"]


@dataclass(frozen=True, slots=True)
class Transport:
    """How records travel over one of SGLang's transports. Both get its KV manager of this rank."""

    # On a prefill rank: send records with KV, and a notice that the decode rank has when SGLang sees success
    attach_sender: Callable[[Any, TransferLayout], None]
    # On a decode rank: put notices on the board
    attach_receiver: Callable[[Any, NoticeBoard], None]


@dataclass(frozen=True, slots=True)
class TransferAnswers:
    """Of requests on a decode server, unless it says otherwise."""

    # By SGLang's name; the others are refused. Imported when they are asked for: the release is checked first
    transports: Mapping[str, Callable[[], Transport]]
    committed: Callable[[Any], int]  # tokens whose K and V have arrived
    cached: Callable[[Any], int]  # of them, those that its prefix cache had
    is_fake: Callable[[Any, Any], bool]  # (request, ServerArgs): nothing is transferred
    parallelism: Callable[[], tuple[int, int]]  # sizes of attention TP and of PP, of this server
    # (Mooncake's manager of a prefill rank, address, message): to a decode rank, before the transfer's status
    send: Callable[[Any, Any, Sequence[bytes]], None]
    # Its KV was dropped, and the prefill server has computed all of it again
    is_computed_again: Callable[[Any], bool] = lambda _: False
    ignores_lost_states: bool = False  # an error of Mooncake for states does not fail the request
    heeds_damage: bool = False  # a decode server fails requests whose notice says why
    # A prefill rank ends the transfer of a request that has read damage as failed, for every decode server
    fails_damaged: bool = False
    # Index keys of the prefix that a decode rank has cached are sent, too
    resends_cached_keys: Callable[[], bool] = lambda: True
