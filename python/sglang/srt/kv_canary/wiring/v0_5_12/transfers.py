"""What prefill-decode disaggregation asks of this release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..transfer_answers import TransferAnswers, Transport

__all__ = ["TRANSFERS"]


def _mooncake() -> Transport:
    from ..mooncake import MOONCAKE

    return MOONCAKE


def _nixl() -> Transport:
    from .nixl import NIXL

    return NIXL


def _is_fake(request: Any, server_args: Any) -> bool:
    from sglang.srt.disaggregation.decode import _is_fake_transfer

    return _is_fake_transfer(request, server_args)


def _parallelism() -> tuple[int, int]:
    from sglang.srt.distributed import get_pp_group
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    return get_attention_tp_size(), get_pp_group().world_size


def _send(manager: Any, address: Any, message: Sequence[bytes]) -> None:
    manager._connect(address.to_tcp(), is_ipv6=address.is_ipv6).send_multipart(message)


TRANSFERS = TransferAnswers(
    transports={"mooncake": _mooncake, "nixl": _nixl},
    committed=lambda request: request.kv_committed_len,
    cached=lambda request: len(request.prefix_indices),
    is_fake=_is_fake,
    parallelism=_parallelism,
    send=_send,
    ignores_lost_states=True,
    heeds_damage=True,
)
