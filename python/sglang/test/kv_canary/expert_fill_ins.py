"""Expert parallelism without DeepEP, for tests on machines that lack it: the exchange of tokens, in plain torch.

SGLang's own code splits batches in two, schedules the halves' operations, pads and merges. Only what DeepEP's kernels
do is filled in: tokens of all ranks are gathered, each rank computes its own experts, and the results are added up.
The exchange waits for the device, so that no CUDA graph can hold it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.nn.functional import pad, silu

__all__ = ["deepep_in_plain_torch"]


def deepep_in_plain_torch() -> None:
    """`--moe-a2a-backend deepep`: gloo on the CPU, NCCL on GPUs."""
    from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
    from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPConfig
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dispatcher = type("PlainDispatcher", (_Exchange, BaseDispatcher), {})
    experts = "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core"
    HookRegistry.register(
        "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPDispatcher",
        dispatcher,
        HookType.REPLACE,
    )
    HookRegistry.register(experts, _run_local_experts, HookType.REPLACE)
    HookRegistry.register(
        "sglang.srt.batch_overlap.two_batch_overlap.TboForwardBatchPreparer.prepare",
        _pad_request_ids,
        HookType.BEFORE,
    )
    DeepEPConfig._instance = SimpleNamespace(num_sms=0)
    if torch.cuda.is_available():
        return
    # The halves of a prefill share the GPU's multiprocessors with DeepEP.
    torch.cuda.get_device_properties = lambda *_, **__: SimpleNamespace(multi_processor_count=0)


def _pad_request_ids(_: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang pads an eager decode to the other ranks' size, except for its request ids, and then refuses to split it.

    On a GPU decodes are CUDA graphs, which have no request ids.
    """
    if batch.rids is not None:
        batch.rids = [*batch.rids, *[None] * (batch.batch_size - len(batch.rids))]


class _Tokens(NamedTuple):
    """Tokens of all ranks, in their order."""

    hidden_states: torch.Tensor  # [tokens, hidden size]
    topk_ids: torch.Tensor  # [tokens, k], -1: none
    topk_weights: torch.Tensor  # [tokens, k]


class _Exchange:
    """What `MaybeTboDeepEPDispatcher` needs of a dispatcher. Each half of a batch has one of its own."""

    def __init__(self, group: Any, **_: Any) -> None:
        super().__init__()
        self._group = group
        self._mine = slice(0, 0)
        self._tokens: _Tokens | None = None
        self._combined: torch.Tensor | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> _Tokens:
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        # A rank without requests has tokens of padding, and no experts for them.
        missing = (0, 0, 0, hidden_states.shape[0] - topk_output.topk_ids.shape[0])
        ids = pad(topk_output.topk_ids, missing, value=-1)
        mine = (hidden_states, ids, pad(topk_output.topk_weights, missing))
        parts: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(parts, [part.cpu() for part in mine], group=self._group)
        rank = distributed.get_rank(self._group)
        first = sum(part[0].shape[0] for part in parts[:rank])
        self._mine = slice(first, first + hidden_states.shape[0])
        gathered = (torch.cat(column) for column in zip(*parts, strict=True))
        self._tokens = _Tokens(*(column.to(hidden_states.device) for column in gathered))

    def dispatch_b(self) -> _Tokens:
        assert self._tokens is not None
        tokens, self._tokens = self._tokens, None
        return tokens

    def combine(self, combine_input: torch.Tensor) -> torch.Tensor:
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: torch.Tensor) -> None:
        distributed.all_reduce(combine_input, group=self._group)
        self._combined = combine_input

    def combine_b(self) -> torch.Tensor:
        assert self._combined is not None
        combined, self._combined = self._combined, None
        return combined[self._mine]


def _run_local_experts(layer: Any, dispatch_output: _Tokens) -> torch.Tensor:
    """This rank's part of the experts' sum, for the tokens of all ranks."""
    tokens, ids, weights = dispatch_output
    total = torch.zeros_like(tokens)
    first = layer.moe_ep_rank * layer.num_local_experts
    limit = layer.moe_runner_config.swiglu_limit  # DeepSeek-V4
    for expert in range(layer.num_local_experts):
        chosen = torch.where(ids == first + expert, weights, 0).sum(1, keepdim=True)
        gate, up = (tokens @ _weight(layer, "w13_weight", expert, tokens.dtype).T).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        down = _weight(layer, "w2_weight", expert, tokens.dtype)
        total += chosen * ((silu(gate) * up) @ down.T)
    return total


def _weight(layer: Any, name: str, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """Matrix [out, in] of one expert. FP8 has one scale for each block."""
    weight, scales = getattr(layer, name)[expert], getattr(layer, f"{name}_scale_inv", None)
    if scales is None:
        return weight
    for dim in (0, 1):
        block = -(-weight.shape[dim] // scales.shape[dim + 1])
        scales = scales.repeat_interleave(block, dim + 1)
    return (weight.float() * scales[expert]).to(dtype)
