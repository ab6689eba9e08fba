"""Content fingerprints: the Triton kernels store, compare and report exactly what the NumPy reference does."""

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.buffer_group import CanaryBufferGroup
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.kernels import reference
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.layout import content_bytes_per_slot
from sglang_kv_canary.kernels.reference.content import content_of_records
from sglang_kv_canary.kernels.triton import content as content_launches
from sglang_kv_canary.kernels.triton.kernel_launcher import KernelLauncher
from sglang_kv_canary.launch.launcher import Launcher
from sglang_kv_canary.plan.plan_input import ForwardPlan, SweepVerifyPlan
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.record import Column, Reason
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary.state import OUTBOX_BITS, Header, TagCounter
from sglang_kv_canary_rigs.kernel_cases import (
    ContentShape,
    Pool,
    Twin,
    kernel_device,
    make_group,
    make_page_table,
    make_sources,
    make_state,
    ring_rows,
)

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

SLOTS = 200
TAIL_K, SWEEP_K = (CanaryLaunchTag(PoolKind.FULL, "K", side) for side in (Side.TAIL, Side.SWEEP))
MODES = pytest.mark.parametrize("mode", [ContentMode.ALL, ContentMode.PARTIAL])
LAYOUTS = {
    "bf16 rows": ContentShape((64, 64, 64)),
    "one layer": ContentShape((256,)),
    "many layers": ContentShape((16,) * 66),
    "rows longer than a tile": ContentShape((4500, 32)),
    "584 bytes, paged": ContentShape((584,) * 3, page_size=16, padding=8),
    "sizes and offset all differ": ContentShape((40, 4, 24, 132), page_size=3, padding=4, offset=4),
    "6 bytes": ContentShape((6, 6)),
    "10 bytes, odd addresses": ContentShape((10, 10, 10), padding=1, offset=3),
    "1 byte": ContentShape((1,) * 5),
    "unaligned pages": ContentShape((33, 7), page_size=8),
    "interleaved pages": ContentShape((32, 4, 4), page_size=128, run_slots=32),
    "interleaved, odd addresses": ContentShape(
        (6, 7), page_size=8, padding=1, offset=3, run_slots=2
    ),
    "moving slots": ContentShape((64, 40), padding=4, moves=True),
    "moving pages": ContentShape((36, 80, 4), page_size=8, padding=4, offset=4, moves=True),
}


def run(
    layout: ContentShape, mode: ContentMode, budget: int = 1 << 40, prompt: int = 40, **group
) -> tuple[Twin, Pool]:
    """A twin after a prefill with content."""
    state = make_state(content_budget_bytes=budget)
    twin = Twin(make_group(SLOTS, content=layout, **group), state)
    pool = Pool(kernel_device(), SLOTS, 128, 8)
    forward(twin, pool.extend({1: prompt, 2: 1, 5: 9}), mode)
    return twin, pool


def forward(twin: Twin, plan, mode: ContentMode) -> int:
    for side in (Side.HEAD, Side.TAIL):
        twin.check_and_write(plan, side)
    twin.check_and_write_content(plan, mode)
    return twin.assert_equal()


def flip(twin: Twin, half: str, source: int, slot: int, byte: int) -> None:
    """Change one byte of a slot; both twins read the same buffers."""
    s = twin.group.content(half)[source]
    s.data[s.offset + s.start_of(slot) + byte] ^= 0x10


# PARTIAL only chooses the sector; how bytes are addressed is the layout's business.
CHOOSY = (
    "rows longer than a tile",
    "584 bytes, paged",
    "sizes and offset all differ",
    "10 bytes, odd addresses",
    "moving pages",
)


@pytest.mark.parametrize(
    ("layout", "mode"),
    [(layout, ContentMode.ALL) for layout in LAYOUTS]
    + [(layout, ContentMode.PARTIAL) for layout in CHOOSY],
)
def test_layouts(layout: str, mode: ContentMode):
    shape, prompt = LAYOUTS[layout], 16
    twin, pool = run(shape, mode, prompt=prompt)
    assert forward(twin, pool.decode([5, 1, 2]), mode) == 0
    counters = twin.kernel_state.counters[TAIL_K.id]
    assert int(counters[TagCounter.CONTENT_WRITTEN]) == 29
    assert int(counters[TagCounter.CONTENT_CHECKED]) == 26
    for position, (source, size) in enumerate(enumerate(shape.row_bytes)):
        flip(twin, "V", source, int(pool.req_to_token[1, position % prompt]), size - 1)
    rows = forward(twin, pool.decode([5, 1, 2]), mode)
    if mode is ContentMode.ALL:
        assert rows == min(prompt, len(shape.row_bytes))
    slot = int(pool.req_to_token[1, prompt - 1])
    for byte in range(shape.row_bytes[0]):
        flip(twin, "K", 0, slot, byte)
    assert forward(twin, pool.decode([1]), mode) > rows


def test_halves_of_different_word_sizes_and_a_half_without_content():
    device = kernel_device()
    for k_bytes, v_bytes in ((64, 6), (6, 64), (None, 8), (8, None)):
        generator = torch.Generator().manual_seed(1)
        sources = {
            f"{half}_content": make_sources(ContentShape((size, size)), SLOTS, device, generator)
            for half, size in (("k", k_bytes), ("v", v_bytes))
            if size is not None
        }
        twin = Twin(make_group(SLOTS, **sources), make_state())
        pool = Pool(device, SLOTS, 128, 8)
        forward(twin, pool.extend({1: 12}), ContentMode.ALL)
        for half in "KV":
            if twin.group.content(half):
                flip(twin, half, 1, int(pool.req_to_token[1, 5]), 3)
        expected = sum(size is not None for size in (k_bytes, v_bytes))
        assert forward(twin, pool.decode([1]), ContentMode.ALL) == expected


def test_group_without_content():
    twin = Twin(make_group(SLOTS), make_state())
    pool = Pool(kernel_device(), SLOTS, 128, 8)
    assert forward(twin, pool.extend({1: 12}), ContentMode.ALL) == 0


@MODES
def test_rotation_reads_every_slot_in_turn(mode: ContentMode):
    shape = LAYOUTS["bf16 rows"]
    group = make_group(SLOTS, content=shape)
    budget = 12 * content_bytes_per_slot(group, mode)
    twin, pool = run(shape, mode, budget)
    before = twin.kernel_state.counters.clone()
    for position in (17, 20):
        for byte in range(64):
            flip(twin, "K", 2, int(pool.req_to_token[1, position]), byte)
    found = [forward(twin, pool.decode([2, 1, 5]), mode) for _ in range(7)]
    assert found[0] < found[-1] <= 4
    checked = (twin.kernel_state.counters - before)[TAIL_K.id, TagCounter.CONTENT_CHECKED]
    assert 50 <= int(checked) <= 7 * (12 + 3)


def test_whose_turn_it_is_follows_from_the_forward_that_runs():
    """Not from the one before, while TAIL has not marked this one done: content begins before TAIL has ended."""
    group = make_group(SLOTS, content=LAYOUTS["bf16 rows"])
    budget = 12 * content_bytes_per_slot(group, ContentMode.ALL)
    twin, pool = run(LAYOUTS["bf16 rows"], ContentMode.ALL, budget)
    for position in range(40):
        flip(twin, "K", 0, int(pool.req_to_token[1, position]), 0)
    plan, found = pool.decode([1]), []
    for launched in (Side.HEAD, Side.TAIL):
        twin.check_and_write(plan, launched)
        twin.check_and_write_content(plan, ContentMode.ALL)
        found.append(twin.assert_equal())
    assert found[1] == 2 * found[0] > 0


def test_window_and_mapping():
    permutation = torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(3)) + 1
    lut = torch.cat([torch.zeros(1, dtype=torch.int64), permutation]).to(kernel_device())
    twin, pool = run(
        LAYOUTS["bf16 rows"],
        ContentMode.ALL,
        kind=PoolKind.SWA,
        swa_index_lut=lut,
        window=16,
    )
    for position in (3, 24, 39):  # the first lies before the window
        flip(twin, "K", 0, int(lut[pool.req_to_token[1, position].long()]), 0)
    for position, value in ((30, 0), (31, -4), (32, SLOTS)):
        lut[pool.req_to_token[1, position].long()] = value
    forward(twin, pool.decode([1, 2, 5]), ContentMode.ALL)
    rows = [row for row in ring_rows(twin.kernel_state) if row[Column.REASONS - 1] & Reason.CONTENT]
    assert len(rows) == 2


def test_records_that_are_not_compared():
    """No fingerprint stored, not live, or written by another forward."""
    twin, pool = run(LAYOUTS["bf16 rows"], ContentMode.ALL)
    slots = [int(pool.req_to_token[1, position]) for position in range(4)]
    for slot in slots:
        flip(twin, "V", 1, slot, 1)
    twin.poke("v_tail", slots[0], record.WORD_CONTENT, 0)
    for slot, state in zip(slots[1:3], (record.State.FREED, record.State.UNFILLED), strict=True):
        word = record.pack_writer(1, 1, 1, state)
        twin.poke("v_tail", slot, record.WORD_WRITER, word)
    plan = pool.decode([1, 2, 5])
    for side in (Side.HEAD, Side.TAIL):
        twin.check_and_write(plan, side)
    twin.poke("k_tail", int(plan.write.out_cache_loc[0]), record.WORD_WRITER, 77)
    twin.check_and_write_content(plan, ContentMode.ALL)
    twin.assert_equal()
    rows = ring_rows(twin.kernel_state)
    content = [row for row in rows if row[Column.REASONS - 1] == Reason.CONTENT]
    assert [row[Column.SLOT - 1] for row in content] == slots[3:]


@MODES
def test_list(mode: ContentMode):
    twin, pool = run(LAYOUTS["584 bytes, paged"], mode)
    row = pool.req_to_token[1, :40].long()
    for byte in range(584):
        flip(twin, "K", 1, int(row[3]), byte)
    extra = torch.tensor([0, -1, SLOTS, SLOTS - 1], device=row.device)
    slots = torch.cat([row, extra])
    twin.check_list_content(SweepVerifyPlan(slots, slots, slots), mode)
    assert twin.assert_equal() == 1
    assert int(twin.kernel_state.counters[SWEEP_K.id, TagCounter.CONTENT_CHECKED]) == 40


@MODES
def test_fingerprints_of_a_list(mode: ContentMode):
    for name in ("584 bytes, paged", "10 bytes, odd addresses"):
        group = make_group(SLOTS, content=LAYOUTS[name])
        slots = torch.tensor([5, 1, 0, SLOTS - 1, 77, 5, 8, 9, 10], device=kernel_device())
        for listed in (slots, slots.int()[::2], slots[:0]):
            expected = reference.content_fingerprint(group.k_content, listed.long(), mode)
            actual = triton_backend.content_fingerprint(group.k_content, listed, mode)
            assert torch.equal(actual, expected)
    nothing = triton_backend.content_fingerprint((), slots, mode)
    assert torch.equal(nothing, reference.content_fingerprint((), slots, mode))


@MODES
@pytest.mark.parametrize("pieces", [1, 3, 4])
def test_fingerprints_of_pieces(pieces: int, mode: ContentMode):
    """A number stands for `pieces` slots. Both backends say what they say of these slots, listed one by one."""
    group = make_group(SLOTS, content=LAYOUTS["10 bytes, odd addresses"])
    listed = torch.tensor([0, 7, 1, SLOTS // pieces - 1], device=kernel_device(), dtype=torch.int32)
    singles = [slot * pieces + piece for slot in listed.tolist() for piece in range(pieces)]
    slots = torch.tensor(singles, device=kernel_device())
    expected = [-1, *reference.content_fingerprint(group.k_content, slots, mode).tolist(), -1]
    for backend in (reference, triton_backend):
        out = torch.full((len(singles) + 2,), -1, device=kernel_device())
        backend.fingerprint_pieces(group.k_content, listed, pieces, mode, out, 1)
        assert out.tolist() == expected
        backend.fingerprint_pieces(group.k_content, listed[:0], pieces, mode, out, 1)
        assert out.tolist() == expected


def _move_bytes(group: CanaryBufferGroup, sources: torch.Tensor, targets: torch.Tensor) -> None:
    for half in group.halves:
        for source in group.content(half):
            data = source.data[source.offset :]
            for at, to in zip(sources.tolist(), targets.tolist(), strict=True):
                start, end = (int(source.start_of(torch.tensor(slot))) for slot in (at, to))
                data[end : end + source.row_bytes] = data[start : start + source.row_bytes].clone()


FIXED = [name for name, shape in LAYOUTS.items() if not shape.moves]


@MODES
@pytest.mark.parametrize("layout", FIXED)
def test_fingerprints_move_with_records(layout: str, mode: ContentMode):
    """All but one of five slots have moved. The record of that one has a fingerprint that its bytes do not have."""
    twin, pool = run(LAYOUTS[layout], mode)
    sources, targets = pool.req_to_token[1, :5].long(), pool.req_to_token[1, 20:25].long()
    _move_bytes(twin.group, sources[:4], targets[:4])
    twin.copy_records(sources, targets)
    twin.assert_equal()
    words = twin.kernel_group.k_tail[targets]
    now = content_of_records(twin.group.k_content, targets, mode, words)
    as_written = words[:, record.WORD_CONTENT] == now
    assert as_written[:4].all()
    assert not as_written[4] or LAYOUTS[layout].row_bytes == (1,) * 5


@MODES
def test_live_records_alone_are_renewed(mode: ContentMode):
    twin, pool = run(LAYOUTS["bf16 rows"], mode)
    unknown, freed, other = pool.req_to_token[1, :3].tolist()
    never = int(next(slot for slot in range(1, SLOTS) if not twin.group.k_tail[slot].any()))
    twin.poke("k_tail", unknown, record.WORD_CONTENT, 0)
    twin.apply_slot_event(SlotEventKind.FREE, torch.tensor([freed], device=kernel_device()))
    writer = int(twin.group.k_tail[freed, record.WORD_CONTENT])
    slots = torch.tensor([unknown, freed, other, never], device=kernel_device())
    for slot in slots.tolist():
        flip(twin, "K", 0, slot, 0)
    before = twin.group.k_tail[slots]
    now = content_of_records(twin.group.k_content, slots, mode, before).tolist()
    for only_unknown, expected in ((True, int(before[2, record.WORD_CONTENT])), (False, now[2])):
        twin.renew_content(slots, mode, only_unknown)
        twin.assert_equal()
        stored = twin.kernel_group.k_tail[slots, record.WORD_CONTENT].tolist()
        assert stored == [now[0], writer, expected, 0]


@MODES
def test_bytes_of_an_unbound_page_become_unknown(mode: ContentMode):
    twin, pool = run(LAYOUTS["moving pages"], mode)
    slots = pool.req_to_token[1, [3, 39]].long()
    twin.group.k_content[0].page_table.pages[slots[0] // 8] = -1
    for listed in (slots, slots.int()):
        twin.renew_content(listed, mode)
        twin.assert_equal()
        stored = twin.kernel_group.k_tail[slots, record.WORD_CONTENT].tolist()
        assert [bool(word) for word in stored] == [False, True]


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))


def test_moved_slots_take_one_launch_and_no_torch_operation(monkeypatch):
    launched = []
    monkeypatch.setattr(
        KernelLauncher, "__call__", lambda launch, *_: launched.append(launch._kernel.__name__)
    )
    group = make_group(SLOTS, content=LAYOUTS["bf16 rows"])
    launcher = Launcher(triton_backend, (group,), make_state(), ContentMode.PARTIAL)
    slots = torch.arange(1, 6, device=kernel_device())
    with _Operations() as operations:
        launcher.copy_records(group, slots, slots.flip(0))
    assert launched == ["copy_kernel"]
    assert operations.names == ["aten.flip.default"]


@MODES
@pytest.mark.parametrize("layout", ["moving slots", "moving pages"])
def test_bytes_are_found_where_their_page_has_moved_to(layout: str, mode: ContentMode):
    twin, pool = run(LAYOUTS[layout], mode)
    table = twin.group.k_content[0].page_table
    pages = [int(pool.req_to_token[1, position]) // table.page_size for position in (3, 39)]
    places = table.pages[pages].tolist()
    for half in "KV":
        for source in twin.group.content(half):
            bytes_of = source.data[source.offset :]
            size = source.page_stride
            one, other = (bytes_of[place * size : (place + 1) * size] for place in places)
            one[:], other[:] = other.clone(), one.clone()
    table.pages[pages] = table.pages[pages].flip(0)
    assert forward(twin, pool.decode([1, 2, 5]), mode) == 0  # the clean twin
    table.pages[pages] = table.pages[pages].flip(0)
    assert forward(twin, pool.decode([1]), mode) >= 4  # two slots at least, in two halves


@MODES
@pytest.mark.parametrize("entry", [-1, 0, SLOTS], ids=["unbound", "padding", "beyond the last"])
def test_slots_without_bytes_are_not_compared(entry: int, mode: ContentMode):
    """Attention reads the padding page there. That the page was freed is for the records to say."""
    twin, pool = run(LAYOUTS["moving pages"], mode)
    sources = twin.group.k_content
    lost, kept = (int(pool.req_to_token[1, position]) for position in (3, 39))
    sources[0].page_table.pages[lost // 8] = entry
    before = twin.kernel_state.counters[TAIL_K.id].clone()
    assert forward(twin, pool.decode([1]), mode) == 0
    counted = twin.kernel_state.counters[TAIL_K.id] - before
    in_page = sum(int(slot) // 8 == lost // 8 for slot in pool.req_to_token[1, :40])
    assert int(counted[TagCounter.CONTENT_CHECKED]) == 40 - in_page
    slots = torch.tensor([lost, kept], device=kernel_device())
    for backend in (reference, triton_backend):
        found = backend.content_fingerprint(sources, slots, mode).tolist()
        assert [bool(word) for word in found] == [False, True]


def test_what_is_written_to_an_unbound_page_has_unknown_content():
    twin, pool = run(LAYOUTS["moving slots"], ContentMode.ALL)
    plan = pool.decode([1])
    slot = int(plan.write.out_cache_loc[0])
    table = twin.group.k_content[0].page_table
    place, table.pages[slot] = int(table.pages[slot]), -1
    assert forward(twin, plan, ContentMode.ALL) == 0
    assert int(twin.kernel_group.k_tail[slot, record.WORD_CONTENT]) == 0
    table.pages[slot] = place
    assert forward(twin, pool.decode([1]), ContentMode.ALL) == 0


def test_sources_of_a_group_share_one_page_table():
    shape, generator = LAYOUTS["moving slots"], torch.Generator().manual_seed(1)
    device = kernel_device()
    tables = [make_page_table(shape, SLOTS, device, generator) for _ in "KV"]
    halves = [make_sources(shape, SLOTS, device, generator, table) for table in tables]
    group = make_group(SLOTS, k_content=halves[0], v_content=halves[1])
    with pytest.raises(ValueError, match="one page table"):
        triton_backend.prepare(group)
    with pytest.raises(ValueError, match="pages of 1 slots, as in the page table"):
        make_sources(LAYOUTS["584 bytes, paged"], SLOTS, device, generator, tables[0])


@pytest.mark.parametrize(
    ("layout", "mode"),
    [(layout, ContentMode.ALL) for layout in LAYOUTS]
    + [(layout, ContentMode.PARTIAL) for layout in CHOOSY],
)
def test_new_slots_in_a_launch_of_their_own(layout: str, mode: ContentMode):
    """The second chunk re-reads the first one. Its own slots are fingerprinted with it, or later."""
    together, apart = (run(LAYOUTS[layout], mode) for _ in range(2))
    for twin, pool in (together, apart):
        chunk = pool.extend({1: 30, 5: 3, 6: 7})
        for byte in range(LAYOUTS[layout].row_bytes[0]):
            flip(twin, "K", 0, int(pool.req_to_token[1, 2]), byte)
        for side in (Side.HEAD, Side.TAIL):
            twin.check_and_write(chunk, side)
        twin.check_and_write_content(chunk, mode, writes=twin is together[0])
        if twin is apart[0]:
            slots = chunk.write.out_cache_loc
            assert not twin.kernel_group.k_tail[slots, record.WORD_CONTENT].any()
            twin.write_content(chunk, mode)
        assert twin.assert_equal() == 1
    for name in ("k_tail", "v_tail"):
        one, other = (getattr(twin.kernel_group, name) for twin, _ in (together, apart))
        assert torch.equal(one, other)
    assert torch.equal(*(twin.kernel_state.counters for twin, _ in (together, apart)))
    for twin, pool in (together, apart):
        for byte in range(LAYOUTS[layout].row_bytes[0]):
            flip(twin, "V", 0, int(pool.req_to_token[6, 4]), byte)
        assert forward(twin, pool.decode([5, 6]), mode) == 2


def test_new_slots_that_another_forward_has_written_are_left_alone():
    """As where a step was launched before the late fingerprints of the one before it."""
    twin, pool = run(LAYOUTS["bf16 rows"], ContentMode.ALL)
    chunk = pool.extend({6: 7})
    for side in (Side.HEAD, Side.TAIL):
        twin.check_and_write(chunk, side)
    forward(twin, pool.decode([1]), ContentMode.ALL)
    twin.write_content(chunk, ContentMode.ALL)
    twin.assert_equal()
    slots = chunk.write.out_cache_loc
    assert not twin.kernel_group.v_tail[slots, record.WORD_CONTENT].any()


@pytest.mark.parametrize("backend", [reference, triton_backend])
def test_new_slots_of_strided_groups_do_not_come_later(backend):
    base = make_group(SLOTS)
    group = make_group(
        50, halves="K", stride=4, chain_base=base, content=ContentShape((64,)), kind=PoolKind.C4
    )
    plan = Pool(kernel_device(), SLOTS, 128, 8).extend({1: 8})
    with pytest.raises(ValueError, match="stands for 4 tokens"):
        backend.write_content(plan, group, make_state(), ContentMode.ALL)


def test_unarmed_does_nothing():
    twin, pool = run(LAYOUTS["bf16 rows"], ContentMode.ALL)
    for state in (twin.state, twin.kernel_state):
        state.set_armed(False)
    before = twin.kernel_group.k_tail.clone()
    forward(twin, pool.decode([1, 2]), ContentMode.ALL)
    slots = pool.req_to_token[1, :5].long()
    twin.check_list_content(SweepVerifyPlan(slots, slots, slots), ContentMode.ALL)
    twin.assert_equal()
    assert torch.equal(before, twin.kernel_group.k_tail)


def test_tables_follow_the_group():
    """A group with the same records and other sources gets tables of its own."""
    twin, _ = run(LAYOUTS["bf16 rows"], ContentMode.ALL)
    group = twin.kernel_group
    first = triton_backend.prepare(group)
    assert triton_backend.prepare(group) is first
    other = make_group(SLOTS, content=LAYOUTS["one layer"])
    moved = type(group)(
        **{name: getattr(group, name) for name in ("kind", "k_head", "k_tail", "v_head", "v_tail")},
        k_content=other.k_content,
        v_content=other.v_content,
    )
    addresses = triton_backend.prepare(moved)[0][1].table[:, 0].tolist()
    assert addresses == [other.k_content[0].address, other.v_content[0].address]


def test_a_launcher_has_made_its_tables_before_the_first_forward(monkeypatch):
    group = make_group(SLOTS, content=LAYOUTS["bf16 rows"])
    Launcher(triton_backend, (group,), make_state(), ContentMode.ALL)
    made = []
    monkeypatch.setattr(content_launches, "_make_launch", made.append)
    triton_backend.prepare(group)
    assert made == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_tables_are_not_made_while_a_graph_is_captured():
    group = make_group(SLOTS, content=LAYOUTS["bf16 rows"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="prepare"):
        triton_backend.prepare(group)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_what_begins_early_waits_for_tail() -> None:
    """Each of TAIL's programs verifies before one of them writes 64 slots. Content has little else to do than these.

    An H100 is through with TAIL before content comes there. So the wait of `publish` is what has been seen red.
    """
    requests, prefix, device = 64, 2300, kernel_device()
    pool = Pool(device, 150_000, prefix + 8, requests + 1)
    group = make_group(150_000, device=device, content=LAYOUTS["one layer"])
    state = make_state(device, request_rows=requests + 1)
    rows = range(1, requests + 1)
    plans = [pool.extend(dict.fromkeys(rows, prefix)), pool.decode(list(rows))]
    budget = 1  # slots

    def tail(plan: ForwardPlan) -> None:
        triton_backend.check_and_write(plan, group, Side.TAIL, state)
        triton_backend.check_and_write_content(plan, group, state, ContentMode.ALL, budget)
        triton_backend.publish(state)

    for plan in plans:
        triton_backend.check_and_write(plan, group, Side.HEAD, state)
        tail(plan)
    new = plans[-1].write.out_cache_loc
    stored, graph = group.k_tail[new].clone(), torch.cuda.CUDAGraph()
    assert (stored[:, record.WORD_CONTENT] != 0).all()
    with torch.cuda.graph(graph):
        group.k_tail.index_fill_(0, new, 0)
        state.summary[Header.FORWARD_DONE : Header.FORWARD_DONE + 1] -= 1
        tail(plans[-1])
    damaged = pool.req_to_token[requests, prefix - 2].long()
    group.k_tail[damaged, record.WORD_IDENTITY] ^= 1  # TAIL finds it in its last block, each time
    written = state.counters[TAIL_K.id, TagCounter.CONTENT_WRITTEN]
    for _ in range(20):
        before, found = int(written), state.summary[Header.VIOLATIONS].clone()
        graph.replay()
        assert torch.equal(group.k_tail[new], stored)
        assert int(written) == before + requests
        published = int(state.outbox[0])
        assert published & record.FORWARD_MASK == len(plans)
        assert published >> OUTBOX_BITS == int(state.summary[Header.VIOLATIONS]) > int(found)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
