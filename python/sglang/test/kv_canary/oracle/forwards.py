"""What an oracle is asked about."""

from __future__ import annotations

from sglang_kv_canary.record import UNKNOWN
from sglang_kv_canary.selftest.forwards import Forward, Request, SweepEntry

__all__ = ["Forward", "Request", "SweepEntry", "known_token"]


def known_token(request: Request, position: int) -> int:
    index = position - request.known_from
    return request.known[index] if 0 <= index < len(request.known) else UNKNOWN
