"""The scheduler's own token lists for the forward that is about to run."""

from __future__ import annotations

from typing import Any

from sglang.srt.kv_canary.config import TokenCheck
from sglang.srt.kv_canary.expected_inputs import TAIL_TOKENS, ExpectedTokens
from sglang.srt.kv_canary.runner.manager import CanaryManager


def expected_tokens_of(
    manager: CanaryManager, forward_batch: Any, requests: list[Any]
) -> ExpectedTokens | None:
    """What the requests' own lists say of an extend forward's tokens; None where nothing is known.

    Mode `tail`: the last TAIL_TOKENS of each cached prefix. Mode `all`: the whole prefix and the input.
    """
    mode = manager.config.token_check
    prefix_lens = forward_batch.extend_prefix_lens_cpu
    if mode is TokenCheck.NONE or not manager.armed or prefix_lens is None:
        return None
    if len(requests) != len(prefix_lens) or forward_batch.input_embeds is not None:
        return None
    known = [
        _known_tokens(request, int(prefix), int(length), mode)
        for request, prefix, length in zip(
            requests, prefix_lens, forward_batch.extend_seq_lens_cpu, strict=True
        )
    ]
    return ExpectedTokens.from_lists(known, manager.identity.device, manager.state.token_lists)


def _known_tokens(
    request: Any, prefix: int, length: int, mode: TokenCheck
) -> tuple[int, list[int]]:
    if mode is TokenCheck.ALL:
        return 0, list(request.fill_ids[: prefix + length])
    first = max(0, prefix - TAIL_TOKENS)
    return first, list(request.fill_ids[first:prefix])
