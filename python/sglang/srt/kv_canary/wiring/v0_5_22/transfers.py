"""What prefill-decode disaggregation asks of these releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..transfer_answers import TransferAnswers, Transport

if TYPE_CHECKING:
    from ...transfer.layout import TransferLayout

__all__ = ["TRANSFERS"]


def _mooncake() -> Transport:
    from ..mooncake import MOONCAKE

    return _failing_damaged(MOONCAKE)


def _nixl() -> Transport:
    from .nixl import NIXL, tells_of_success
    from .nixl_notified import NIXL_NOTIFIED

    return _failing_damaged(NIXL if tells_of_success() else NIXL_NOTIFIED)


def _failing_damaged(transport: Transport) -> Transport:
    def attach_sender(kv_manager: Any, layout: TransferLayout) -> None:
        from .pairs import fail_damaged

        fail_damaged(kv_manager)
        transport.attach_sender(kv_manager, layout)

    return replace(transport, attach_sender=attach_sender)


def _is_fake(request: Any, _: Any) -> bool:
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    return _is_fake_transfer(request)


def _parallelism() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.attn_tp_size, parallel.pp_size


def _send(manager: Any, address: Any, message: Sequence[bytes]) -> None:
    manager._send_multipart_locked(address.to_tcp(), list(message), is_ipv6=address.is_ipv6)


def _resends_cached_keys() -> bool:
    """0.5.22 does. 0.5.23 sends what follows the prefix."""
    from sglang.srt.disaggregation import prefill

    return not hasattr(prefill, "suffix_page_indices")


TRANSFERS = TransferAnswers(
    transports={"mooncake": _mooncake, "nixl": _nixl},
    committed=lambda request: request.kv.kv_committed_len,
    cached=lambda request: request.prefix_len,
    is_fake=_is_fake,
    parallelism=_parallelism,
    send=_send,
    is_computed_again=lambda request: getattr(request, "pd_rebootstrap_in_progress", False),
    fails_damaged=True,
    resends_cached_keys=_resends_cached_keys,
)
