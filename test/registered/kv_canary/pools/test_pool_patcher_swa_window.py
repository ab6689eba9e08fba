"""The window of SWA groups against SGLang itself: all that is verified is kept, and one position more is not."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.pool_patcher import attach_canary_buffers
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary_rigs import pool_fixtures as pools
from sglang_kv_canary_rigs.fresh_process import FreshProcesses

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

WINDOW = 8


def _tree_cache(allocator, page_size: int):
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache

    rows = ReqToTokenPool(size=2, max_context_len=128, device="cpu", enable_memory_saver=False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
        sliding_window_size=WINDOW,
    )
    return SWARadixCache(params), rows


def _swa_group(pool, allocator):
    groups = attach_canary_buffers(
        pool, allocator=allocator, content=False, sliding_window_size=WINDOW
    )
    return groups[-1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_eviction_of_a_running_request_keeps_the_window_and_a_page_more(page_size: int) -> None:
    """At every decode position n, after `_evict_swa(req, n)`: [n - window, n) is mapped, with a margin of one page."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams

    pool, allocator = pools.make_swa_pool(size=96, size_swa=96, page_size=page_size)
    group = _swa_group(pool, allocator)
    tree, rows = _tree_cache(allocator, page_size)
    req = Req("rid", "", list(range(64)), SamplingParams(max_new_tokens=1))
    req.req_pool_idx = 1
    batch = ScheduleBatch(
        reqs=[req],
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
        tree_cache=tree,
    )
    slots = _alloc(allocator, 64)
    rows.req_to_token[1, :64] = slots.to(torch.int32)
    margins = []
    for new_position in range(64):
        batch._evict_swa(req, new_position)
        mapped = group.swa_index_lut[rows.req_to_token[1, :64].long()] > 0
        start = max(0, new_position - group.window)
        assert mapped[start:new_position].all(), new_position
        if not mapped.all():
            margins.append(start - int(mapped.nonzero()[0]))
    assert min(margins) == page_size


def _alloc(allocator, count: int) -> torch.Tensor:
    """Full slots with SWA slots; the paged allocator's own alloc_extend is a Triton kernel."""
    if allocator.page_size == 1:
        return allocator.alloc(count)
    full = allocator.full_attn_allocator.alloc(count)
    allocator.set_full_to_swa_mapping(full, allocator.swa_attn_allocator.alloc(count))
    return full


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_tree_keeps_the_window_of_a_locked_prefix_and_no_more(page_size: int) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    pool, allocator = pools.make_swa_pool(size=96, size_swa=96, page_size=page_size)
    group = _swa_group(pool, allocator)
    tree, _ = _tree_cache(allocator, page_size)
    tokens, slots = list(range(32)), _alloc(allocator, 32)
    for end in range(
        page_size, 32 + page_size, page_size
    ):  # one node per page, so that locks end anywhere
        tree.insert(
            InsertParams(key=RadixKey(tokens[:end]), value=slots[:end], prev_prefix_len=end)
        )
    last = _deepest(tree.root_node)
    tree.inc_lock_ref(last)
    tree.evict(EvictParams(swa_num_tokens=96))
    mapped = group.swa_index_lut[slots] > 0
    assert mapped[32 - group.window :].all()
    assert not mapped[: 32 - group.window].any()


def _deepest(node):
    while node.children:
        (node,) = node.children.values()
    return node


_TRITON_WINDOW = """
import torch
from sglang.srt.layers.attention.triton_backend import update_sliding_window_buffer
req_to_token = torch.arange(64, dtype=torch.int32).view(1, 64)
for length in (3, 8, 20):
    lens = torch.tensor([length], dtype=torch.int64)
    indptr = torch.zeros(2, dtype=torch.int32)
    _, indices, _, _ = update_sliding_window_buffer(
        indptr, req_to_token, {window}, lens, torch.tensor([0]), 1, "cpu"
    )
    print("reads", length, *indices.tolist())
"""


def test_the_triton_backend_reads_the_window_of_the_prefix() -> None:
    """On extend its prefix buffer holds exactly [p - window, p). Triton's interpreter needs a process of its own."""
    pool, allocator = pools.make_swa_pool()
    window = _swa_group(pool, allocator).window
    done = FreshProcesses().run(_TRITON_WINDOW.format(window=WINDOW), for_imports=INTERPRETED)
    assert done.returncode == 0, done.stderr[-2000:]
    reads = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("reads ")]
    assert len(reads) == 3
    for p, *positions in ([int(word) for word in words] for words in reads):
        assert positions == list(range(max(0, p - window), p))


def test_dsv4_reads_one_token_less_than_the_window_says() -> None:
    """Its config's 128 counts the new token; the backend (which no CPU can import) reads 128 with the new one."""
    from sglang_kv_canary.pool_patcher.adapters.dsv4 import ATTENTION_WINDOW

    source = Path(find_spec("sglang.srt.layers.attention.deepseek_v4_backend").origin).read_text()
    assert re.findall(r"^SWA_WINDOW = (\d+)$", source, re.MULTILINE) == [str(ATTENTION_WINDOW)]
    pool, allocator = pools.make_dsv4_pool()
    groups = attach_canary_buffers(
        pool, allocator=allocator, content=False, sliding_window_size=ATTENTION_WINDOW
    )
    assert groups[0].window == 127


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
