"""What the kernels of a server will be compiled for, as far as its arguments and its model's config say.

The main process asks, long before any pool exists. The answer need not be right: what is missing is compiled later,
and what is too much is never launched. Pool sizes do not matter, so small buffers on the CPU stand in for the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..buffer_group import CanaryBufferGroup
from ..capacities import MOST_REQUESTS, CanaryLaunchCapacities
from ..config import CanaryConfig, ContentMode
from ..endpoint import Part
from ..launch.launcher import Launcher, launch_endpoints_per_forward
from ..plan.plan_input import ForwardPlan, PlanInput
from ..plan.speculation import SpeculationShape
from ..pool_kind import PoolKind, Side
from ..pool_patcher.adapters.mha import attach_mha
from ..pool_patcher.adapters.mla import attach_mla
from ..pool_patcher.adapters.sub_pool import as_swa
from ..pool_patcher.attachment import AttachOptions
from ..single_forward_manager import BesideLayers
from ..state import CanaryDeviceState
from .content_share import attention_ranks
from .cuda_graph import beside_layers
from .memory import pool_class_of
from .refusals import requests_of_rank
from .releases import release
from .warm_up import decodes, launches_of_target, plans_of, prefills

if TYPE_CHECKING:
    from ..kernels.triton.variant import Variant

_USUAL_REQUESTS = 4096  # SGLang's limit where the user sets none
_CONTEXT = 8  # columns of the small req_to_token


def predicted_variants(args: Any, model_config: Any, capability: int) -> list[Variant]:
    """Variants of a target's launches, those that take longest first. [] for pools that nothing is said about here.

    `args`: settled. `model_config`: the target's ModelConfig. `capability`: the GPU's compute capability, such as 90.
    """
    from ..kernels import triton as triton_backend

    config = CanaryConfig.from_server_args(args)
    groups = _groups(args, model_config, config)
    if not groups:
        return []
    target = _target(args, config, groups, triton_backend)
    with triton_backend.collecting_variants(capability) as variants:
        for plan in prefills(args, target.largest, known=True).plans(target.plan_input):
            launch_endpoints_per_forward(target.launcher, plan, Side.HEAD)
            launch_endpoints_per_forward(target.launcher, plan, Side.TAIL)
        branches = beside_layers(args) is not BesideLayers.NOTHING
        for plan in _captured(args, target):
            launch_endpoints_per_forward(target.launcher, plan, Side.HEAD)
            beside = plan.tail_beside_the_layers if branches else Part(0)
            for part in (beside, Part.ALL & ~beside):
                launch_endpoints_per_forward(target.launcher, plan, Side.TAIL, part)
        first, _ = release().captured(args)
        for plan in plans_of(decodes(args, first + 1, target.largest), target.plan_input):
            launch_endpoints_per_forward(target.launcher, plan, Side.HEAD)
            launch_endpoints_per_forward(target.launcher, plan, Side.TAIL)
        target.launcher.publish()
        for launch in launches_of_target(target, args, args.page_size):
            launch()
    return list(variants.values())


def _target(
    args: Any, config: CanaryConfig, groups: tuple[CanaryBufferGroup, ...], backend: Any
) -> SimpleNamespace:
    """What the launches need of a CanaryManager."""
    largest = min(requests_of_rank(args) or _USUAL_REQUESTS, MOST_REQUESTS)
    rows = torch.zeros((largest + 1, _CONTEXT), dtype=torch.int32)
    speculation = SpeculationShape.from_server_args(args)
    capacities = CanaryLaunchCapacities.from_args(
        max_running_requests=largest,
        request_rows=largest + 1,
        context_len=_CONTEXT,
        ring_capacity=1,
        verify_budget_slots=config.verify_budget_slots,
        content_budget_bytes=config.content_budget_bytes,
    )
    state = CanaryDeviceState.allocate(capacities, "cpu")
    return SimpleNamespace(
        config=config,
        groups=groups,
        launcher=Launcher(backend, groups, state, config.content_mode),
        plan_input=PlanInput.allocate(
            rows, False, speculation.tree_width(False), speculation.draft_tokens, groups
        ),
        largest=largest,
    )


def _captured(args: Any, target: SimpleNamespace) -> Iterator[ForwardPlan]:
    """Forwards that decode graphs hold."""
    last, lens = release().captured(args)
    last = min(last, target.largest)
    return plans_of(decodes(args, 1, last, seq_lens=lens), target.plan_input)


def _groups(args: Any, model_config: Any, config: CanaryConfig) -> tuple[CanaryBufferGroup, ...]:
    """Groups like those of the target's pool, but small."""
    options = AttachOptions(
        content=config.content_mode is not ContentMode.NONE,
        allocator=None,
        token_offset=0,
        sliding_window_size=None,
    )
    if release().shares_buffer(args):
        return ()
    pools = _SmallPools(args, model_config)
    pool_class = pool_class_of(model_config)
    if pool_class == "MHATokenToKVPool":
        heads = model_config.get_num_kv_heads(attention_ranks(args))
        widths = model_config.head_dim, model_config.v_head_dim
        return attach_mha(pools.mha(model_config.num_hidden_layers, heads, *widths), options).groups
    if pool_class == "MLATokenToKVPool":
        return attach_mla(pools.mla(), options).groups
    if pool_class == "SWAKVPool" and args.pp_size == 1:  # stages differ in layers of each kind
        return _swa_groups(pools, args, model_config, options)
    return ()


def _swa_groups(
    pools: _SmallPools, args: Any, model_config: Any, options: AttachOptions
) -> tuple[CanaryBufferGroup, ...]:
    """FULL and SWA, as `attach_swa` makes them. The window is of any size: nothing is compiled for it."""
    ranks = attention_ranks(args)
    heads, width = model_config.get_num_kv_heads(ranks), model_config.head_dim
    full = swa = heads, width, width
    if model_config.is_hybrid_swa_compress:  # layers of each kind have heads of their own
        full = heads, width, model_config.v_head_dim
        heads = model_config.get_swa_num_kv_heads(ranks)
        swa = heads, model_config.swa_head_dim, model_config.swa_v_head_dim
    layers = len(model_config.full_attention_layer_ids), len(model_config.swa_attention_layer_ids)
    groups = attach_mha(pools.mha(layers[0], *full), options).groups
    pool = pools.mha(layers[1], *swa)
    pool.full_to_swa_index_mapping = torch.zeros(pool.size + pool.page_size, dtype=torch.int64)
    attached = attach_mha(pool, replace(options, kind=PoolKind.SWA)).groups
    return groups + tuple(as_swa(pool, group, 1) for group in attached)


@dataclass(frozen=True, slots=True)
class _SmallPools:
    """What stands in for a pool of one page, on the CPU."""

    args: Any
    model_config: Any

    def mha(self, layers: int, heads: int, width: int, v_width: int) -> SimpleNamespace:
        """`layers`: of all pipeline stages."""
        pool = self._pool(layers)
        pool.k_buffer = self._buffers(pool, heads, width)
        pool.v_buffer = self._buffers(pool, heads, v_width)
        return pool

    def mla(self) -> SimpleNamespace:
        pool = self._pool(self.model_config.num_hidden_layers)
        width = self.model_config.kv_lora_rank + self.model_config.qk_rope_head_dim
        pool.kv_buffer = self._buffers(pool, 1, width)
        return pool

    def _pool(self, layers: int) -> SimpleNamespace:
        return SimpleNamespace(
            layer_num=-(-layers // self.args.pp_size),
            size=self.args.page_size,
            page_size=self.args.page_size,
            device="cpu",
        )

    def _buffers(self, pool: SimpleNamespace, heads: int, width: int) -> list[torch.Tensor]:
        shape = (pool.size + pool.page_size, heads, width)
        dtype = _kv_dtype(self.args, self.model_config)
        return [torch.empty(shape, dtype=dtype) for _ in range(pool.layer_num)]


def _kv_dtype(args: Any, model_config: Any) -> torch.dtype:
    name = args.kv_cache_dtype
    if name.startswith("fp8"):
        return torch.uint8
    return torch.bfloat16 if name in ("bf16", "bfloat16") else model_config.dtype
