"""What the device publishes in host memory: the kernel against the reference, and the host's reading of it."""

import mmap
import os
import sys
import time

import numpy as np
import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.reports.outbox import Outbox
from sglang_kv_canary.state import OUTBOX_BITS, Header
from sglang_kv_canary_rigs.kernel_cases import Pool, Twin, kernel_device, make_group, make_state

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")
register_cuda_ci(est_time=30, suite="stage-b-test-1-gpu-small")

MANY = 1 << OUTBOX_BITS


def _settled() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def test_forwards_and_findings_are_published_as_by_the_reference() -> None:
    twin, pool = Twin(make_group(400), make_state()), Pool(kernel_device(), 400, 256, 8)
    readers = [Outbox(state.outbox) for state in (twin.state, twin.kernel_state)]
    for reader in readers:
        reader.trusted = True
    plans = [pool.extend({1: 40, 2: 3}), pool.decode([1, 2]), pool.decode([1, 2])]
    for forward, plan in enumerate(plans, start=1):
        if forward == len(plans):
            for group in (twin.group, twin.kernel_group):
                group.k_head[int(pool.req_to_token[1, 7]), 1] ^= 1
        for side in (Side.HEAD, Side.TAIL):
            twin.check_and_write(plan, side)
        twin.run("publish", lambda f, group, state: f(state))
        found = twin.assert_equal()
        _settled()
        assert twin.state.outbox.tolist() == twin.kernel_state.outbox.tolist()
        for reader in readers:
            assert reader.take(forward)
            assert (reader.forward, reader.found) == (forward, found)
            assert not reader.take(forward)
    assert found > 0


@pytest.mark.parametrize("done", [0, 5, MANY // 2, MANY - 1, MANY, 3 * MANY + 9])
@pytest.mark.parametrize("found", [0, 7, MANY - 1, MANY + 2])
def test_numbers_may_be_larger_than_their_half_of_the_word(done: int, found: int) -> None:
    state = make_state()
    reader = Outbox(state.outbox)
    reader.found = max(0, found - MANY // 2)  # as it was read before
    state.summary[Header.FORWARD_DONE], state.summary[Header.VIOLATIONS] = done, found
    triton_backend.publish(state)
    _settled()
    reader.expect(int(state.summary[Header.PUBLISHED]))
    reader.check(done)
    assert reader.trusted
    assert reader.take(done + 3)
    assert (reader.forward, reader.found) == (done, found)


def test_a_word_that_is_written_meanwhile_is_read_whole() -> None:
    """By another process, as fast as it can: the halves of all that is read belong together."""
    words, reads = np.frombuffer(mmap.mmap(-1, 8), dtype=np.int64), 0
    reader = Outbox(torch.from_numpy(words))
    reader.trusted = True
    child = os.fork()
    if not child:
        for n in range(1, 400_000):
            words[0] = (3 * n) << OUTBOX_BITS | n
        os._exit(0)
    deadline = time.monotonic() + 30
    while reader.forward < 399_999 and time.monotonic() < deadline:
        if reader.take(400_000):
            reads += 1
            assert reader.found == 3 * reader.forward
    os.waitpid(child, 0)
    assert reader.forward == 399_999
    assert reads > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs_publish_while_the_host_reads() -> None:
    """No synchronisation in between: what is read belongs together, never goes back, and the last word arrives."""
    state, replays = make_state(), 2000
    triton_backend.publish(state)  # compiled before the capture
    reader, graph = Outbox(state.outbox), torch.cuda.CUDAGraph()
    one, three = (torch.full((1,), n, dtype=torch.int64, device="cuda") for n in (1, 3))
    with torch.cuda.graph(graph):
        state.summary[Header.FORWARD_DONE : Header.FORWARD_DONE + 1] += one
        state.summary[Header.VIOLATIONS : Header.VIOLATIONS + 1] += three
        triton_backend.publish(state)
    reader.trusted, last, seen = True, 0, set()
    for launched in range(1, replays + 1):
        graph.replay()
        if reader.take(launched):
            assert reader.found == 3 * reader.forward
            assert reader.forward >= last
            last = reader.forward
            seen.add(last)
    deadline = time.monotonic() + 10  # memory alone tells: no event is asked
    while last < replays and time.monotonic() < deadline:
        if reader.take(replays):
            last = reader.forward
    assert (last, reader.found) == (replays, 3 * replays)
    assert len(seen) > 1
    torch.cuda.synchronize()
    assert np.array_equal(state.outbox.numpy(), state.summary[[Header.PUBLISHED]].cpu().numpy())


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
