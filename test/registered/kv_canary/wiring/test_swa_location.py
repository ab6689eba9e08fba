"""Where attention stores new tokens in SWA slots, as HEAD learns it from newer releases' attention backends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.pool_fixtures import make_decode_batch, make_swa_pool

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

if not release().has_own_canary:
    pytest.skip(
        "this release keeps translations of its own, see test_swa_translation.py; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang_kv_canary.wiring.from_0_5_17 import swa_location  # noqa: E402

HEADS, HEAD_DIM = 2, 8
SWA_LAYER = 0


class Rig:
    """A SWA pool, and one sliding-window layer on SGLang's real backend."""

    def __init__(self) -> None:
        self.pool, self.allocator = make_swa_pool(
            size=64, size_swa=64, head_num=HEADS, head_dim=HEAD_DIM
        )
        self.allocator.swa_attn_allocator.alloc(5)  # so that full and SWA slots differ
        self.rows = ReqToTokenPool(4, 32, "cpu", enable_memory_saver=False)
        self.backend = TorchNativeAttnBackend(
            SimpleNamespace(device="cpu", req_to_token_pool=self.rows, token_to_kv_pool=self.pool)
        )
        self.layer = RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, SWA_LAYER, sliding_window_size=8)

    def decode_batch(self, count: int = 3) -> ForwardBatch:
        return make_decode_batch(self.rows, self.allocator, count)

    def run_layer(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns the keys that the layer stored, [tokens, heads, head_dim]."""
        count = len(batch.out_cache_loc)
        k, v = torch.randn(2, count, HEADS, HEAD_DIM)
        q = torch.randn(count, HEADS * HEAD_DIM)
        self.backend.forward_decode(q, k, v, self.layer, batch)
        return k


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_location_is_where_the_layer_stores(rig: Rig) -> None:
    batch = rig.decode_batch()
    rig.backend.init_forward_metadata(batch)
    location = swa_location.location_of_attention(rig.backend, batch)
    assert location.tolist() != batch.out_cache_loc.tolist()
    location[1] = stale = int(rig.allocator.swa_attn_allocator.free_pages[-1])
    keys = rig.run_layer(batch)
    stored = rig.pool.swa_kv_pool.get_key_buffer(0)
    torch.testing.assert_close(stored[location], keys)
    torch.testing.assert_close(stored[stale], keys[1])


def test_a_batch_that_is_narrower_than_the_metadata_has_its_first_part(rig: Rig) -> None:
    batch = rig.decode_batch()
    rig.backend.init_forward_metadata(batch)
    whole = swa_location.location_of_attention(rig.backend, batch)
    batch.out_cache_loc = batch.out_cache_loc[:2]
    assert swa_location.location_of_attention(rig.backend, batch).tolist() == whole[:2].tolist()


def test_a_prefill_that_is_padded_after_its_metadata_has_slot_0_there(rig: Rig) -> None:
    """As a prefill graph pads its batch. The layer gets the tokens of the requests alone."""
    batch = rig.decode_batch()
    rig.backend.init_forward_metadata(batch)
    slots = swa_location.location_of_attention(rig.backend, batch).tolist()
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, 2))
    batch.forward_mode, batch.extend_seq_lens_cpu = ForwardMode.EXTEND, [2, 1]
    assert swa_location.location_of_attention(rig.backend, batch).tolist() == [*slots, 0, 0]
    batch.extend_seq_lens_cpu = [2, 2]
    with pytest.raises(RuntimeError, match="holds 3 SWA slots for 5 new tokens"):
        swa_location.location_of_attention(rig.backend, batch)


def test_a_batch_without_new_tokens_has_none(rig: Rig) -> None:
    batch = rig.decode_batch(0)
    assert swa_location.location_of_attention(rig.backend, batch) is None
    batch.out_cache_loc = None
    assert swa_location.location_of_attention(rig.backend, batch) is None


@pytest.mark.parametrize("held", [None, 2])
def test_a_backend_without_a_location_for_each_token_is_an_error(rig: Rig, held) -> None:
    batch = rig.decode_batch()
    rig.backend.swa_out_cache_loc = None if held is None else torch.arange(held)
    with pytest.raises(RuntimeError, match=f"holds {held} SWA slots for 3 new tokens"):
        swa_location.location_of_attention(rig.backend, batch)


def test_of_a_pair_of_backends_the_one_that_runs_is_asked(rig: Rig) -> None:
    batch, other = rig.decode_batch(), Rig().backend
    rig.backend.init_forward_metadata(batch)
    pair = HybridAttnBackend.__new__(HybridAttnBackend)
    pair.prefill_backend, pair.decode_backend = other, rig.backend
    found = swa_location.location_of_attention(pair, batch)
    assert found.data_ptr() == rig.backend.swa_out_cache_loc.data_ptr()


# Start-up


class NewBackend:
    """An attention backend that came with a newer release."""


class Runner:
    """As much of a ModelRunner as the hook reads. `managed`: the canary protects its pool."""

    def __init__(self, backend: Any, pool: Any, managed: bool = True) -> None:
        self.attn_backend, self.token_to_kv_pool = backend, pool
        self.model = SimpleNamespace(forward=lambda batch: batch.out_cache_loc_swa)
        if managed:
            has_swa = getattr(pool, "full_to_swa_index_mapping", None) is not None
            kinds = (PoolKind.FULL, PoolKind.SWA) if has_swa else (PoolKind.FULL,)
            groups = [SimpleNamespace(allocator_kind=kind) for kind in kinds]
            context.add(SimpleNamespace(armed=True, capturing=False, groups=groups), self)


def _pair(prefill: Any, decode: Any) -> HybridAttnBackend:
    pair = HybridAttnBackend.__new__(HybridAttnBackend)
    pair.prefill_backend, pair.decode_backend = prefill, decode
    return pair


def test_a_backend_that_nobody_has_read_is_refused_by_name(rig: Rig) -> None:
    for backend in (NewBackend(), _pair(rig.backend, NewBackend())):
        with pytest.raises(CanaryStartupError, match="NewBackend"):
            swa_location._after_backends_exist(None, Runner(backend, rig.pool))
    swa_location._after_backends_exist(None, Runner(_pair(rig.backend, rig.backend), rig.pool))


def test_a_server_without_swa_pool_or_canary_may_have_any_backend(rig: Rig) -> None:
    # Both live, as in a server: managers are found by the runner's id.
    without_swa = Runner(NewBackend(), rig.pool.full_kv_pool)
    without_canary = Runner(NewBackend(), rig.pool, managed=False)
    for runner in (without_swa, without_canary):
        swa_location._after_backends_exist(None, runner)


def test_the_backend_of_deepseek_v4_is_not_asked(rig: Rig) -> None:
    """It makes its SWA slots inside the graph, and HEAD could read them too early."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    runner = Runner(DeepseekV4AttnBackend.__new__(DeepseekV4AttnBackend), rig.pool)
    forward = runner.model.forward
    swa_location._after_backends_exist(None, runner)
    assert runner.model.forward is forward


@pytest.mark.parametrize("armed", [True, False])
def test_the_model_gets_the_location_with_its_batch(rig: Rig, armed: bool) -> None:
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    runner, batch = Runner(rig.backend, rig.pool), rig.decode_batch()
    swa_location._after_backends_exist(None, runner)
    context.manager_of(runner).armed = armed
    rig.backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=rig.backend)):
        got = runner.model.forward(batch)
    if armed:
        assert got.tolist() == rig.backend.swa_out_cache_loc.tolist()
    else:
        assert got is None  # warm-up runs batches without metadata


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
