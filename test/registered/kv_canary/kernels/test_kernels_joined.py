"""Slots of events, joined: the kernel and the reference against plain Python, into the device and into a ring."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.event_slots import SlotTable
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton.joined_slots import BLOCK
from sglang_kv_canary_rigs.kernel_cases import kernel_device
from sglang_kv_canary_rigs.volume import volume

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")
register_cuda_ci(est_time=20, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

BACKENDS = pytest.mark.parametrize(
    "backend", [reference, triton_backend], ids=["reference", "kernels"]
)
CPU = torch.device("cpu")

# Where each begins in a tensor that is longer, its slots, and whether they are int64
LISTS = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1 << 31), max_size=9), st.booleans())


def _tensor(before: int, slots: list[int], is_wide: bool, device: torch.device) -> torch.Tensor:
    dtype = torch.int64 if is_wide else torch.int32
    least = [slot % (1 << 31) for slot in slots] if not is_wide else slots
    return torch.tensor([7] * before + least, dtype=dtype, device=device)[before:]


def _join(backend, lists, ring, position):
    """(slots, ring) after a join on the backend's device."""
    device = CPU if backend is reference else kernel_device()
    tensors = [_tensor(*each, device) for each in lists]
    table = SlotTable(pinned=device.type == "cuda")
    assert table.fill(tensors)
    joined = torch.full((table.slots + 3,), -5, dtype=torch.int64, device=device)
    kept = None
    if ring is not None:
        kept = torch.tensor(ring, dtype=torch.int64)
        kept = kept.pin_memory() if device.type == "cuda" else kept
    backend.join_slots(table, joined, kept, position)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return joined.tolist(), None if kept is None else kept.tolist()


@BACKENDS
@settings(max_examples=volume(25, 200), deadline=None)
@given(
    lists=st.lists(LISTS, min_size=1, max_size=6),
    more=st.integers(0, 40),
    position=st.integers(0, 200),
    keeps=st.booleans(),
)
def test_joined_slots_are_those_of_the_events_in_order(backend, lists, more, position, keeps):
    slots = [slot if is_wide else slot % (1 << 31) for _, each, is_wide in lists for slot in each]
    ring = [-1 - i for i in range(len(slots) + more)] if keeps else None
    position = position % max(1, len(ring)) if keeps else 0
    joined, kept = _join(backend, lists, ring, position)
    assert joined == [*slots, -5, -5, -5]
    if ring is not None:
        for i, slot in enumerate(slots):
            ring[(position + i) % len(ring)] = slot
    assert kept == ring


@BACKENDS
@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_an_event_may_have_more_slots_than_a_program_takes_at_once(backend, count):
    lists = [(1, list(range(10, 10 + count)), True), (0, [3, 4], False)]
    joined, kept = _join(backend, lists, [0] * (count + 2), 5)
    slots = [*range(10, 10 + count), 3, 4]
    assert joined[:-3] == slots
    assert kept == slots[-5:] + slots[:-5]


@pytest.mark.parametrize(
    "slots",
    [torch.arange(9)[::2], torch.arange(3, dtype=torch.int16), torch.arange(3).float()],
    ids=["gaps", "int16", "float"],
)
def test_what_a_table_cannot_list_is_refused_whole(slots):
    table = SlotTable(pinned=False)
    assert table.fill([torch.arange(2)])
    before = table.words.clone(), table.events, table.slots
    assert not table.fill([torch.arange(5), slots])
    assert torch.equal(table.words, before[0])
    assert (table.events, table.slots) == before[1:]


def test_a_table_is_refused_more_events_than_it_has_rows():
    table, one = SlotTable(pinned=False), torch.tensor([4])
    assert table.fill([one] * SlotTable.MOST_EVENTS)
    assert table.slots == SlotTable.MOST_EVENTS
    assert not table.fill([one] * (SlotTable.MOST_EVENTS + 1))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
