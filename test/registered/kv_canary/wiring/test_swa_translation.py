"""The full-to-SWA translation of a forward: once, never stale, on SGLang's real pools and attention backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins import load_plugins
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.swa_translation import (
    SwaOutCacheLoc,
    get_swa_out_cache_loc,
    translate_full_to_swa,
)
from sglang_kv_canary.wiring.v0_5_12.swa_location import translated_once, use_running_translation
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_decode_batch, make_dsv4_pool, make_swa_pool

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")
register_cuda_ci(est_time=30, suite="stage-b-test-1-gpu-small")

HEADS, HEAD_DIM = 2, 8
WINDOW = 8
SWA_LAYER, FULL_LAYER = 0, 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    load_plugins()


class Rig:
    """A SWA pool under the canary's hooks, and one attention layer of each kind on the real backend."""

    def __init__(self, device: str = DEVICE) -> None:
        self.pool, self.allocator = make_swa_pool(
            size=64, size_swa=64, head_num=HEADS, head_dim=HEAD_DIM, device=device
        )
        self.device = device
        self.rows = ReqToTokenPool(4, 32, device, enable_memory_saver=False)
        self.backend = TorchNativeAttnBackend(SimpleNamespace(device=device))
        self.layers = {
            SWA_LAYER: self._layer(SWA_LAYER, WINDOW),
            FULL_LAYER: self._layer(FULL_LAYER, -1),
        }
        self.allocator.alloc(7)  # so that full and SWA slots differ ...
        self.allocator.swa_attn_allocator.alloc(5)
        use_running_translation(self.pool)

    @staticmethod
    def _layer(layer_id: int, window: int) -> RadixAttention:
        return RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, layer_id, sliding_window_size=window)

    def decode_batch(self, count: int = 3) -> ForwardBatch:
        return make_decode_batch(
            self.rows,
            self.allocator,
            count,
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
        )

    def run_layer(self, batch: ForwardBatch, layer_id: int = SWA_LAYER) -> torch.Tensor:
        """One attention layer of `batch`; returns the keys that it stored, [tokens, heads, head_dim]."""
        count = len(batch.out_cache_loc)
        k, v = torch.randn(2, count, HEADS, HEAD_DIM, device=self.device)
        q = torch.randn(count, HEADS * HEAD_DIM, device=self.device)
        self.backend.forward(q, k, v, self.layers[layer_id], batch)
        return k

    def swa_of(self, full_slots: torch.Tensor) -> torch.Tensor:
        return self.pool.full_to_swa_index_mapping[full_slots]

    def remap(self, full_slots: torch.Tensor) -> torch.Tensor:
        """Give full slots other SWA slots; returns those they had."""
        before = self.swa_of(full_slots).clone()
        fresh = self.allocator.swa_attn_allocator.alloc(len(full_slots))
        self.pool.full_to_swa_index_mapping[full_slots] = fresh
        return before

    def keys_at(self, swa_slots: torch.Tensor) -> torch.Tensor:
        return self.pool.swa_kv_pool.get_key_buffer(0)[swa_slots]


@pytest.fixture
def rig() -> Rig:
    context.managers.append(SimpleNamespace(ledger=None))  # the hooks obey: the canary is on
    return Rig()


def assert_written(rig: Rig, swa_slots: torch.Tensor, keys: torch.Tensor) -> None:
    torch.testing.assert_close(rig.keys_at(swa_slots), keys)


# Translation


def test_a_compiled_layer_translates_on_its_own(rig: Rig) -> None:
    """The running translation belongs to one forward, and the compiled layer serves all."""
    torch._dynamo.reset()
    translate = torch.compile(
        lambda slots: rig.pool.translate_loc_from_full_to_swa(slots),
        backend="eager",
        fullgraph=True,
    )
    for batch in (rig.decode_batch(), rig.decode_batch()):
        with translated_once(rig.pool, batch):
            rig.remap(batch.out_cache_loc)
            assert (
                translate(batch.out_cache_loc).tolist() == rig.swa_of(batch.out_cache_loc).tolist()
            )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapping_dtype", [torch.int32, torch.int64])
def test_translation_equals_sglangs(
    mapping_dtype: torch.dtype, index_dtype: torch.dtype, rig: Rig
) -> None:
    mapping = rig.pool.full_to_swa_index_mapping
    full_slots = torch.tensor([0, 7, 3, -1, 1, 63], dtype=index_dtype, device=DEVICE)
    ours = translate_full_to_swa(mapping.to(mapping_dtype), full_slots)
    sglangs = rig.pool.translate_loc_from_full_to_swa(full_slots)
    assert ours.dtype == sglangs.dtype == torch.int32
    assert ours.tolist() == sglangs.tolist()
    assert ours[3] == -1


def test_kept_value_is_given_for_views_of_what_was_translated_only() -> None:
    mapping = torch.arange(100, 0, -1)
    whole = torch.arange(10)
    kept = SwaOutCacheLoc.translate(mapping, whole)
    fresh = torch.tensor([-7], dtype=torch.int32)

    def ask(locations: torch.Tensor, of: torch.Tensor = mapping) -> list[int]:
        return get_swa_out_cache_loc(kept, of, locations, lambda _: fresh).tolist()

    assert ask(whole) == mapping[:10].tolist()
    assert ask(whole[:4]) == mapping[:4].tolist()
    assert ask(whole[6:]) == mapping[6:10].tolist()
    halves_of_words = whole.view(torch.int32)[:10]
    others = [whole.clone(), whole[::2], halves_of_words, whole.view(2, 5), torch.arange(12)]
    assert [ask(other) for other in others] == [[-7]] * len(others)
    assert ask(whole, of=mapping.clone()) == [-7]
    longer = torch.arange(20)
    kept = SwaOutCacheLoc.translate(mapping, longer[4:8])
    assert ask(longer[4:8]) == mapping[4:8].tolist()
    assert [ask(longer[a:b]) for a, b in ((3, 7), (4, 9), (0, 2))] == [[-7]] * 3


# The four branches, and draft-extend


def test_no_forward_every_write_translates_afresh(rig: Rig) -> None:
    batch = rig.decode_batch()
    first = rig.run_layer(batch)
    before = rig.remap(batch.out_cache_loc)
    second = rig.run_layer(batch)
    assert_written(rig, before, first)
    assert_written(rig, rig.swa_of(batch.out_cache_loc), second)


def test_kept_value_serves_every_layer_of_the_forward(rig: Rig) -> None:
    """Shown by what must not happen in a forward: a mapping that changes below it is not looked at again."""
    batch = rig.decode_batch()
    with translated_once(rig.pool, batch):
        assert batch.out_cache_loc_swa is context.swa_translation.swa
        before = rig.remap(batch.out_cache_loc)
        keys = rig.run_layer(batch)
        rig.run_layer(batch, FULL_LAYER)
    assert_written(rig, before, keys)
    assert (rig.keys_at(rig.swa_of(batch.out_cache_loc)) == 0).all()


def test_the_next_forward_does_not_see_it(rig: Rig) -> None:
    batch = rig.decode_batch()
    batch.out_cache_loc_swa = sglangs = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with translated_once(rig.pool, batch):
        rig.run_layer(batch)
    assert context.swa_translation is None
    assert batch.out_cache_loc_swa is sglangs
    rig.remap(batch.out_cache_loc)
    with translated_once(rig.pool, batch):
        keys = rig.run_layer(batch)
    assert_written(rig, rig.swa_of(batch.out_cache_loc), keys)


def test_a_forward_that_fails_leaves_nothing_behind(rig: Rig) -> None:
    batch = rig.decode_batch()
    with pytest.raises(RuntimeError, match="model"), translated_once(rig.pool, batch):
        raise RuntimeError("the model failed")
    assert context.swa_translation is None
    assert batch.out_cache_loc_swa is None


def test_length_changed_by_padding_translates_afresh(rig: Rig) -> None:
    batch = rig.decode_batch()
    with translated_once(rig.pool, batch):
        rig.remap(batch.out_cache_loc)
        batch.out_cache_loc = batch._pad_tensor_to_size(batch.out_cache_loc, 5)
        batch.req_pool_indices = batch._pad_tensor_to_size(batch.req_pool_indices, 5)
        batch.seq_lens = batch._pad_tensor_to_size(batch.seq_lens, 5, value=1)
        keys = rig.run_layer(batch)
    assert_written(rig, rig.swa_of(batch.out_cache_loc[:3]), keys[:3])


def test_a_batch_padded_before_the_forward_is_translated_with_its_padding(rig: Rig) -> None:
    batch = rig.decode_batch()
    batch.out_cache_loc = batch._pad_tensor_to_size(batch.out_cache_loc, 5)
    with translated_once(rig.pool, batch):
        assert context.swa_translation.swa[3:].tolist() == [0, 0]


def test_narrowed_batch_gets_its_part(rig: Rig) -> None:
    """As SGLang's split op of prefill graphs narrows a padded batch to its real tokens, for one layer."""
    batch = rig.decode_batch()
    real, batch.out_cache_loc = 3, batch._pad_tensor_to_size(batch.out_cache_loc, 8)
    with translated_once(rig.pool, batch):
        before = rig.remap(batch.out_cache_loc[:real])
        batch.out_cache_loc = batch.out_cache_loc[:real]
        rig.pool.set_swa_loc(batch.out_cache_loc_swa[:real])
        keys = rig.run_layer(batch)
    assert_written(rig, before, keys)


@needs_gpu
def test_narrowed_by_sglangs_split_op_gets_its_part(rig: Rig) -> None:
    """The same by the operator itself, which SGLang registers for CUDA only."""
    from sglang.srt.compilation.piecewise_context_manager import (
        enable_piecewise_cuda_graph,
        set_forward_context,
    )
    from sglang.srt.layers.radix_attention import unified_attention_with_output

    batch = rig.decode_batch()
    batch.out_cache_loc = batch._pad_tensor_to_size(batch.out_cache_loc, 8)
    batch.num_token_non_padded_cpu, batch.attn_backend = 3, rig.backend
    k, v, q = torch.randn(3, 8, HEADS, HEAD_DIM, device=DEVICE)
    output = torch.empty_like(q).view(8, -1)
    layers = [rig.layers[SWA_LAYER]]
    with (
        enable_piecewise_cuda_graph(),
        set_forward_context(batch, layers, None, [], []),
        translated_once(rig.pool, batch),
    ):
        before = rig.remap(batch.out_cache_loc[:3])
        unified_attention_with_output(q.view(8, -1), k, v, output, True, SWA_LAYER)
        assert rig.pool.swa_loc is None
    assert_written(rig, before, k[:3])


def test_idle_batch_has_nothing_to_translate(rig: Rig) -> None:
    batch = rig.decode_batch(count=0)
    batch.forward_mode = ForwardMode.IDLE
    with translated_once(rig.pool, batch):
        assert context.swa_translation is None
        rig.run_layer(batch)
    batch.out_cache_loc = None
    with translated_once(rig.pool, batch):
        assert context.swa_translation is None


def test_draft_extend_whose_slots_arrive_after_its_metadata(rig: Rig) -> None:
    """The graph's buffer is filled between metadata and forward; another step's tensor replaces it."""
    batch = rig.decode_batch()
    arrived, batch.out_cache_loc = batch.out_cache_loc, torch.zeros_like(batch.out_cache_loc)
    rig.backend.init_forward_metadata(batch)
    batch.out_cache_loc.copy_(arrived)
    with translated_once(rig.pool, batch):
        assert context.swa_translation.swa.tolist() == rig.swa_of(arrived).tolist()
        batch.out_cache_loc = rig.allocator.alloc(3)
        keys = rig.run_layer(batch)
    assert_written(rig, rig.swa_of(batch.out_cache_loc), keys)


@needs_gpu
def test_captured_translation_follows_slots_and_mapping_at_each_replay(rig: Rig) -> None:
    batch = rig.decode_batch(4)
    buffer = batch.out_cache_loc = batch.out_cache_loc.clone()
    k, v = torch.randn(2, 4, HEADS, HEAD_DIM, device=DEVICE)

    def store() -> None:
        with translated_once(rig.pool, batch):
            rig.pool.set_kv_buffer(rig.layers[SWA_LAYER], batch.out_cache_loc, k, v)

    store()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store()
    for _ in range(3):
        buffer.copy_(rig.allocator.alloc(4))
        rig.remap(buffer)
        k.normal_()
        graph.replay()
        assert_written(rig, rig.swa_of(buffer), k)


# SGLang's own caches


def test_what_sglang_precomputed_is_not_consulted(rig: Rig) -> None:
    batch = rig.decode_batch()
    stale = rig.swa_of(batch.out_cache_loc).int()
    rig.pool.set_swa_loc(stale)
    rig.remap(batch.out_cache_loc)
    keys = rig.run_layer(batch)
    assert_written(rig, rig.swa_of(batch.out_cache_loc), keys)
    assert (rig.keys_at(stale.long()) == 0).all()


def test_without_the_canary_sglang_does_as_it_did() -> None:
    rig = Rig()
    batch = rig.decode_batch()
    rig.pool.set_swa_loc(rig.swa_of(batch.out_cache_loc).int())
    before = rig.remap(batch.out_cache_loc)
    keys = rig.run_layer(batch)
    assert_written(rig, before, keys)  # the stale value that SGLang keeps


class TestDeepSeekV4:
    """The pool is real; the kernels that store into it need a GPU, so the location that they get is looked at."""

    @pytest.fixture
    def stored(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
        from sglang.srt.mem_cache import deepseek_v4_memory_pool as module

        self.pool, self.allocator = make_dsv4_pool()
        self.mapping = self.pool.full_to_swa_index_mapping
        self.mapping[256:512] = torch.arange(256, 512)
        locations: list[torch.Tensor] = []

        def store(_layer: int, loc: torch.Tensor, _values: Any) -> None:
            locations.append(loc.clone())

        monkeypatch.setattr(self.pool.swa_kv_pool, "set_key_buffer", store)
        monkeypatch.setattr(self.pool.swa_kv_pool, "set_key_buffer_fused", store)
        monkeypatch.setattr(
            module,
            "fused_k_norm_rope_flashmla",
            lambda **kwargs: locations.append(kwargs["out_loc"].clone()),
        )
        return locations

    def write(self, path: str, layer_id: int, loc: torch.Tensor) -> None:
        if path == "fused_norm_rope":
            self.pool.set_swa_key_buffer_radix_fused_norm_rope(
                layer_id, loc, None, None, 1e-6, None, None
            )
        elif path == "fused":
            self.pool.set_swa_key_buffer_radix_fused(layer_id, loc, None)
        else:
            self.pool.set_swa_key_buffer_radix(layer_id, loc, None)

    @pytest.mark.parametrize("path", ["plain", "fused", "fused_norm_rope"])
    def test_one_translation_serves_all_layers_and_no_other_forward(
        self, path: str, stored: list[torch.Tensor]
    ) -> None:
        use_running_translation(self.pool)
        batch = SimpleNamespace(out_cache_loc=torch.arange(300, 304), out_cache_loc_swa=None)
        with translated_once(self.pool, batch):
            for layer_id in range(3):
                self.write(path, layer_id, batch.out_cache_loc)
                self.mapping[300:304] += 20
        assert [loc.tolist() for loc in stored] == [[300, 301, 302, 303]] * 3
        assert {loc.dtype for loc in stored} == {torch.int32}
        self.write(path, 1, batch.out_cache_loc)
        assert stored[-1].tolist() == [360, 361, 362, 363]
        assert self.pool.cached_loc is None

    def test_twin_sglang_alone_writes_to_the_stale_location(
        self, stored: list[torch.Tensor]
    ) -> None:
        """What the hooks are for: a layer other than the first, after the mapping has changed."""
        loc = torch.arange(300, 304)
        self.write("fused", 0, loc)
        self.mapping[300:304] += 20
        self.write("fused", 1, loc)
        assert stored[-1].tolist() == [300, 301, 302, 303]


# The canary's own view


class TestStaleLocationIsCaught:
    """A write through a stale location, on real pools under a real manager."""

    @pytest.fixture
    def manager_rig(self) -> Iterator[ManagerRig]:
        rig = ManagerRig(
            real=make_swa_pool(
                size=128, size_swa=96, head_num=HEADS, head_dim=HEAD_DIM, device=DEVICE
            ),
            device=DEVICE,
            sliding_window_size=WINDOW,
        )
        use_running_translation(rig.pool)
        context.managers.append(rig.manager)
        yield rig
        context.managers.clear()

    @staticmethod
    def serve(rig: ManagerRig, stale_to: int | None) -> list[Any]:
        """Two requests; the second one's third token is stored where `stale_to` (a position of the first) lies."""
        rig.extend(1, range(10, 20))
        rig.extend(2, range(30, 40))
        if stale_to is not None:
            victim = int(rig.pool.full_to_swa_index_mapping[rig.slot(1, stale_to)])
            whole = SimpleNamespace(out_cache_loc=None, out_cache_loc_swa=None)
            original = rig._model

            def stale_model(out_cache_loc: torch.Tensor) -> None:
                whole.out_cache_loc = out_cache_loc
                with translated_once(rig.pool, whole):
                    context.swa_translation.swa[0] = victim
                    original(out_cache_loc)

            rig._model = stale_model
            rig.decode([2])
            rig._model = original
        else:
            rig.decode([2])
        rig.decode([1])
        return rig.settle()

    def test_the_slot_that_was_hit_is_reported_when_its_owner_reads_it(
        self, manager_rig: ManagerRig
    ) -> None:
        found = self.serve(manager_rig, stale_to=8)
        assert {(v.tag, tuple(v.reasons)) for v in found} == {
            ("TAIL_K_SWA", ("CONTENT",)),
            ("TAIL_V_SWA", ("CONTENT",)),
        }
        assert {v.full_slot for v in found} == {manager_rig.slot(1, 8)}
        assert {(v.reader.row, v.writer.row) for v in found} == {(1, 1)}

    def test_clean_twin(self, manager_rig: ManagerRig) -> None:
        assert self.serve(manager_rig, stale_to=None) == []

    def test_a_free_slot_that_nobody_reads(self, manager_rig: ManagerRig) -> None:
        """Stale before HEAD: the layers store there, and HEAD says so, since no reader ever would."""
        rig = manager_rig
        rig.extend(1, range(10, 20))
        free = int(rig.allocator.swa_attn_allocator.free_pages[-1])

        def make_stale(batch: ForwardBatch) -> None:
            context.swa_translation.swa[1] = free

        rig.after_translation = make_stale
        rig.extend(2, range(30, 40))
        rig.after_translation = None
        assert (rig.pool.swa_kv_pool.get_key_buffer(0)[free] != 0).any()
        for _ in range(3):
            rig.decode([1, 2])
        found = rig.settle()
        assert [(v.tag, v.reasons) for v in found] == [
            ("HEAD_K_SWA", ("WRITE_LOCATION",)),
            ("HEAD_V_SWA", ("WRITE_LOCATION",)),
        ]
        full_slot = rig.slot(2, 1)
        mapped = int(rig.pool.full_to_swa_index_mapping[full_slot])
        assert {(v.full_slot, v.slot, v.attention_slot) for v in found} == {
            (full_slot, mapped, free)
        }
        assert {(v.reader.row, v.reader.forward, v.expected_position) for v in found} == {(2, 2, 1)}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
