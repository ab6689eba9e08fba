"""Compiles, at start-up, what prefills, frees and sweeps launch; else the first requests would wait for the compiler.

Decode launches need none of this: graph capture runs them.
"""

from __future__ import annotations

import torch

from sglang.srt.kv_canary.config import CanaryConfig, TokenCheck
from sglang.srt.kv_canary.expected_inputs import ExpectedTokens
from sglang.srt.kv_canary.plan_input import ForwardPlan, SweepVerifyPlan, VerifyPlan, WritePlan
from sglang.srt.kv_canary.record import Mode
from sglang.srt.kv_canary.runner.launcher import Launcher, launch_endpoints_sweep
from sglang.srt.kv_canary.slot_event import SlotEventKind

# One batch size for each vector length that the kernels are compiled for; larger prefill batches are rare.
BATCH_SIZES = (1, 17, 65)
TOKENS_PER_REQUEST = 2
MANY_SLOTS = 4096  # more than one program frees at once


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


def warm_up_slot_events(launcher: Launcher, page_size: int) -> None:
    """Every allocator event, of slot 0 only, which none of them touches; `free()` is given int32 and int64."""
    for group in launcher.groups:
        device = group.k_head.device
        for kind in (SlotEventKind.ALLOC, SlotEventKind.FREE):
            for dtype in (torch.int32, torch.int64):
                for count in (1, MANY_SLOTS):
                    slots = torch.zeros(count, dtype=dtype, device=device)
                    launcher.backend.apply_slot_event(kind, slots, group, launcher.state, page_size)
        # Nothing is live yet, so clearing changes nothing.
        launcher.backend.apply_slot_event(
            SlotEventKind.CLEAR, None, group, launcher.state, page_size
        )


def warm_up_sweep(launcher: Launcher) -> None:
    """The sweep's launches, on a list of padding slots; nothing may be armed."""
    for group in launcher.groups:
        zeros = torch.zeros(1, dtype=torch.int64, device=group.k_head.device)
        for anchors in (None, zeros):
            launch_endpoints_sweep(launcher, SweepVerifyPlan(zeros, zeros, zeros, anchors), group)
