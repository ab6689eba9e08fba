"""Compiles, at start-up, what prefills launch; else the first requests would wait for the compiler.

Decode launches need none of this: graph capture runs them.
"""

from __future__ import annotations

import torch

from sglang.srt.kv_canary.config import CanaryConfig, TokenCheck
from sglang.srt.kv_canary.expected_inputs import ExpectedTokens
from sglang.srt.kv_canary.plan_input import ForwardPlan, VerifyPlan, WritePlan
from sglang.srt.kv_canary.record import Mode

# One batch size for each vector length that the kernels are compiled for; larger prefill batches are rare.
BATCH_SIZES = (1, 17, 65)
TOKENS_PER_REQUEST = 2


def prefill_plans(
    req_to_token: torch.Tensor, config: CanaryConfig, max_batch_size: int
) -> list[ForwardPlan]:
    """Prefills of padding requests only (row 0, slot 0), with the tensor types of SGLang's ForwardBatch."""
    sizes = [size for size in BATCH_SIZES if size <= max_batch_size]
    return [_prefill_plan(req_to_token, config, size) for size in sizes]


def _prefill_plan(req_to_token: torch.Tensor, config: CanaryConfig, size: int) -> ForwardPlan:
    device = req_to_token.device

    def of(value: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    tokens = size * TOKENS_PER_REQUEST
    expected = None
    if config.token_check is not TokenCheck.NONE:
        expected = ExpectedTokens.from_lists([(0, [])] * size, device)
    return ForwardPlan(
        verify=VerifyPlan(of(0, size, torch.int64), of(0, size, torch.int32), 0),
        write=WritePlan(
            input_ids=of(0, tokens, torch.int64),
            positions=of(0, tokens, torch.int64),
            out_cache_loc=of(0, tokens, torch.int64),
            ext_lens=of(TOKENS_PER_REQUEST, size, torch.int32),
            starts=torch.arange(0, tokens, TOKENS_PER_REQUEST, dtype=torch.int32, device=device),
            tokens_per_request=0,
            mode=Mode.EXTEND,
        ),
        req_to_token=req_to_token,
        expected=expected,
    )
