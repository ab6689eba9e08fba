"""Records in host memory, under SGLang's real controller and host pool: there, back, and what goes wrong between."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.host_code import HOST, compiled, twins
from sglang_kv_canary.host_tier.host_content import HostContent, sources_of
from sglang_kv_canary.host_tier.host_records import HostRecords, SlotRecords
from sglang_kv_canary.host_tier.host_tier import HOST_SECTOR_BYTES
from sglang_kv_canary.kernels.reference.content import content_of_records
from sglang_kv_canary.launch.launcher import launch_endpoints_sweep
from sglang_kv_canary.load_back import LoadBack
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.pool_patcher.errors import UnsupportedPoolError
from sglang_kv_canary.record import PREV_UNREACHABLE, Mode, State
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.sweep.staged_list import StagedList
from sglang_kv_canary.wiring.hicache import CopyStreams, copy_hooks, protect
from sglang_kv_canary.wiring.until_0_5_17.hicache import refuse_tree
from sglang_kv_canary_rigs.hicache_rig import HiCacheRig
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.overlap_rig import LONG
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

TOKENS = range(5, 25)
CODE = pytest.mark.parametrize("code", [twins, compiled.compile_module()], ids=["python", "c"])
CONTENT = [ContentMode.NONE, ContentMode.PARTIAL, ContentMode.ALL]


@pytest.fixture(params=CONTENT, ids=str)
def rig(request, monkeypatch: pytest.MonkeyPatch) -> HiCacheRig:
    return HiCacheRig(monkeypatch, content=request.param)


def _reasons(rig: HiCacheRig) -> set[str]:
    return {reason for v in rig.settle() for reason in v.reasons}


def test_a_loaded_prefix_is_read_in_silence_and_keeps_its_writers(rig: HiCacheRig) -> None:
    rig.extend(1, TOKENS)
    before = rig.manager.groups[0].k_tail[rig.rows.req_to_token[1, :20].long(), 3].clone()
    host = rig.write_back(1, 20)
    rig.extend(3, range(100, 140))  # its slots come back with other content
    device = rig.load(2, host)
    for _ in range(3):
        rig.decode([2])
    assert not rig.settle()
    assert torch.equal(rig.manager.groups[0].k_tail[device, 3], before)
    assert rig.manager.groups[0].k_head[device, 2].eq(0).all()
    assert (rig.tier.written_back, rig.tier.loaded) == (20, 20)


def test_records_arrive_after_the_frees_before_them(rig: HiCacheRig) -> None:
    """Slots are freed, handed to a load, and the forward that learns of all that reads them."""
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)  # its frees wait for the next forward
    rig.allocator.free_pages = rig.allocator.free_pages.flip(0)  # the load gets the same slots
    device = rig.load(2, host)
    assert set(device.tolist()) & set(rig.rows.req_to_token[1, :20].tolist())
    rig.decode([2])
    assert not rig.settle()


def test_bytes_are_on_their_way_before_records_are_read(
    rig: HiCacheRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the canary does then costs no time: the load takes longer."""
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    copy, read = rig.host_pool.load_to_device_per_layer, []

    def note(*args: object, **more: object) -> None:
        read.append(rig.tier.loaded)
        copy(*args, **more)

    monkeypatch.setattr(rig.host_pool, "load_to_device_per_layer", note)
    rig.load(2, host)
    assert (set(read), rig.tier.loaded) == ({0}, 20)
    rig.decode([2])
    assert not rig.settle()


def test_without_the_records_the_prefix_would_be_reported(rig: HiCacheRig) -> None:
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.tier.records.clear(host)
    rig.load(2, host)
    rig.decode([2])
    assert "NEVER_WRITTEN" in _reasons(rig)


def test_a_load_that_races_a_queued_write_is_reported(rig: HiCacheRig) -> None:
    """sgl-project/sglang#36738: a forward of a request that has ended writes to slots that were handed to a load.

    The load's stream does not wait for that forward. Here it begins when all bytes are there, so it replaces them.
    """
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.extend(3, TOKENS)
    ledger, apply = rig.manager.ledger, rig.manager.ledger.apply
    ended = rig.rows.req_to_token[3, :20].long().clone()
    rig.allocator.free(ended)
    rig.allocator.free_pages = rig.allocator.free_pages.flip(0)
    device = rig.load(2, host)
    raced = sorted(set(device.tolist()) & set(ended.tolist()))
    assert raced
    # The queued forward: launched before any of that, so it applies no event.
    object.__setattr__(ledger, "apply", lambda *_: 0)
    rig._alloc_extend = lambda row, count: torch.tensor(raced[:1])
    rig.extend(4, [7])
    del rig._alloc_extend, ledger.apply
    assert ledger.apply == apply
    for _ in range(3):
        rig.decode([2])
    found = rig.settle()
    assert {v.slot for v in found if v.reader.row == 2} >= {raced[0]}
    if rig.manager.config.content_mode is not ContentMode.NONE:
        assert "CONTENT" in found[0].reasons  # by the forward that reads it first
    lifetime = [v for v in found if "UNWRITTEN_SINCE_ALLOC" in v.reasons and v.slot == raced[0]]
    assert lifetime
    assert lifetime[0].writer.request_id == "req-4"


class LongPrefill:
    """Row 3's first chunk, whose HEAD comes after its layers. Its slots are given back before its result is there.

    SGLang does so if another request has cached the same tokens meanwhile, or if the request is aborted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = rig = HiCacheRig(monkeypatch, real=make_mha_pool(size=800), context_len=2 * LONG)
        self._patch = monkeypatch
        rig.extend(1, TOKENS)
        self._host = rig.write_back(1, 20)
        rig.extend(5, range(40))  # applies the frees
        rig.expected = lambda batch: functools.partial(ManagerRig._starts, rig, batch)
        self.loaded: set[int] = set()

    def load(self, slots: torch.Tensor) -> None:
        """A prefix of row 2 comes into the first of them."""
        rig = self.rig
        rig.allocator.free(slots[:20])
        rig.allocator.free_pages = rig.allocator.free_pages.flip(0)
        self.loaded = set(rig.load(2, self._host).tolist())
        assert self.loaded == set(slots[:20].tolist())

    def run(self) -> None:
        late = self.rig.manager.late
        with self._patch.context() as patch:
            patch.setattr(late, "open", True)
            self.rig.extend(3, range(LONG))

    def found(self) -> set[int]:
        """Slots of the loaded prefix that hold no record for its readers."""
        for _ in range(3):
            self.rig.decode([2])
        return {v.slot for v in self.rig.settle() if "UNWRITTEN_SINCE_ALLOC" in v.reasons}


def test_bytes_that_are_loaded_behind_the_stores_of_a_long_prefill_are_intact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill = LongPrefill(monkeypatch)
    rig, stores = prefill.rig, prefill.rig._model

    def layers(slots: torch.Tensor) -> None:
        assert rig.manager.forward_ct == 2  # HEAD waits
        stores(slots)
        prefill.load(slots)
        rig._model = stores

    rig._model = layers
    prefill.run()
    assert rig.manager.forward_ct == 3
    assert prefill.found() == set()
    assert rig.reported == []


def test_bytes_that_a_long_prefill_replaces_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were there when it began. It was launched before, so it applies no event."""
    prefill = LongPrefill(monkeypatch)
    rig, ledger = prefill.rig, prefill.rig.manager.ledger

    def before_it_begins(batch: Any) -> None:
        ledger.apply(at_once=True)
        prefill.load(batch.out_cache_loc)
        rig.on_batch = lambda _: None

    rig.on_batch = before_it_begins
    apply = type(ledger).apply
    with monkeypatch.context() as patch:
        patch.setattr(
            type(ledger), "apply", lambda self, at_once=False: at_once and apply(self, True)
        )
        prefill.run()
    assert prefill.found() == prefill.loaded


def test_no_sweep_runs_while_slots_wait_for_their_load(rig: HiCacheRig) -> None:
    """The prefix cache lists the slots at once, and the copy begins with the next prefill."""
    sweep = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    assert not rig.manager.ledger.awaits_load_back
    rig.controller.load(host)
    assert rig.manager.ledger.awaits_load_back
    assert not sweep.maybe_run_sweep(rig.manager)
    assert sweep._tick == 0
    rig.controller.start_loading()
    assert not rig.manager.ledger.awaits_load_back
    sweep.maybe_run_sweep(rig.manager)
    assert sweep._tick == 1


def _staged_list(rig: HiCacheRig, row: int, count: int) -> StagedList:
    """As a tree lists the row's slots."""
    slots = rig.rows.req_to_token[row, :count].long().clone()
    before = torch.cat([torch.tensor([PREV_UNREACHABLE]), slots[:-1]])
    plan = SweepVerifyPlan(slots, torch.arange(count), before)
    return StagedList(((rig.manager.groups[0], plan),), count)


@pytest.mark.parametrize("order", ["the same", "shifted", "reversed"])
def test_a_prefix_that_is_loaded_back_to_other_slots_in_the_middle_of_a_sweep(
    rig: HiCacheRig, order: str
) -> None:
    """All of its slots have one writer, before and after. So that does not say what a slot holds."""
    rig.extend(3, range(100, 104))
    rig.extend(1, TOKENS)
    staged = _staged_list(rig, 1, 20)
    host = rig.write_back(1, 20)
    rig.decode([3])  # applies the frees
    free = rig.allocator.free_pages
    own = rig.rows.req_to_token[1, :20].to(free.dtype)
    first = {"the same": own, "shifted": own[1:], "reversed": own.flip(0)}[order]
    rig.allocator.free_pages = torch.cat([first, free[~torch.isin(free, own)]])
    rig.load(2, host)
    rig.decode([2])
    ((group, plan),) = staged.next(20)
    launch_endpoints_sweep(rig.manager.launcher, plan, group)
    assert rig.settle() == []
    assert bool((plan.slots == 0).all()) == (order != "the same")


class _CopyStream:
    """Stands in for HiCache's stream of copies to the device, which a CPU does not have."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait_event(self, event: str) -> None:
        self._log.append(f"wait for {event}")


def _start_loading(rig: HiCacheRig, log: list[str], host: torch.Tensor) -> None:
    stream = _CopyStream(log)
    streams = CopyStreams(to_host=lambda _: stream, to_device=lambda _: stream)
    hooks = copy_hooks(streams, loads=["HiCacheController.load"], pool="HostKVCache")
    (hook,) = [hook for hook in hooks if hook.target.endswith(".start_loading")]
    rig.controller.load(host)
    hook.fn(lambda _: log.append("copy") or 0, rig.controller)
    rig.controller.load_queue.clear()


def test_a_load_waits_for_the_sweep_that_may_still_read_its_slots(
    rig: HiCacheRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were cached when the sweep listed them. Its launches wait for a forward, the copies do not."""
    rig.extend(1, TOKENS)
    host, log = rig.write_back(1, 20), []
    monkeypatch.setattr(rig.controller, "device", "cuda:0")
    _start_loading(rig, log, host[:10])
    rig.manager.swept = "sweep"
    _start_loading(rig, log, host[10:])
    assert log == ["copy", "wait for sweep", "copy"]


class _Copies:
    """An event of a device whose copies take until `over` is set."""

    over = False

    def query(self) -> bool:
        return self.over


@pytest.mark.parametrize("in_background", [False, True])
def test_no_sweep_runs_while_bytes_come_in_the_background(
    monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """A decode server runs forwards of other requests meanwhile. Other servers wait with the next forward."""
    monkeypatch.setattr(torch.cpu.Stream, "wait_event", lambda *_: None, raising=False)
    rig, copies = HiCacheRig(monkeypatch), _Copies()
    sweep = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.extend(3, range(100, 140))
    rig.extend(1, TOKENS)
    ledger, record_load = rig.manager.ledger, rig.manager.ledger.record_load_back

    def on_the_way(load: LoadBack) -> None:
        record_load(replace(load, complete=copies, in_background=in_background))

    monkeypatch.setattr(type(ledger), "record_load_back", lambda _, load: on_the_way(load))
    rig.load(2, rig.write_back(1, 20))
    for _ in range(3):
        rig.decode([3])
        assert ledger.awaits_records is in_background
        assert sweep.maybe_run_sweep(rig.manager) is False
        assert bool(sweep._tick) is not in_background
    copies.over = True
    assert not ledger.awaits_records
    rig.decode([2])
    rig.decode([2])
    assert ledger._landed == []
    assert not rig.settle()


@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
def test_bytes_overwritten_during_the_load_are_reported(mode, monkeypatch) -> None:
    """The write came before the end of the copy, so only the bytes tell."""
    rig = HiCacheRig(monkeypatch, content=mode)
    rig.extend(1, TOKENS)
    device = rig.load(2, rig.write_back(1, 20))
    rig.pool.v_buffer[1][device[4]] += 1
    rig.decode([2])
    assert [(v.reasons, v.tag, v.slot) for v in rig.settle()] == [
        (("CONTENT",), "TAIL_V_FULL", int(device[4]))
    ]


@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
def test_damage_that_was_not_compared_in_host_memory_is_reported_by_its_reader(
    mode, monkeypatch
) -> None:
    """What is loaded keeps its fingerprints, so a load hashes nothing on the host."""
    rig = HiCacheRig(monkeypatch, content=mode)
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.host_pool.k_buffer[0, host[3]] += 1
    with monkeypatch.context() as patch:
        patch.setattr(HOST, "fingerprint_rows", None)
        device = rig.load(2, host)
    rig.decode([2])
    assert [(v.reasons, v.tag, v.slot) for v in rig.settle()] == [
        (("CONTENT",), "TAIL_K_FULL", int(device[3]))
    ]


def test_a_freed_host_slot_has_no_record(rig: HiCacheRig) -> None:
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    assert rig.tier.usable(host) == 20
    rig.controller.evict_host(host[:5])
    assert rig.tier.records.get(host).present.tolist() == [False] * 5 + [True] * 15
    assert rig.tier.usable(host) == 0
    assert rig.tier.usable(host[5:]) == 15
    rig.host_pool.clear()
    assert not rig.tier.records.get(host).present.any()
    assert not rig.settle()


def test_records_and_bytes_become_visible_together(rig: HiCacheRig) -> None:
    class Later:
        happened = False

        def query(self) -> bool:
            return self.happened

        def synchronize(self) -> None:
            self.happened = True

    rig.extend(1, TOKENS)
    device = rig.rows.req_to_token[1, :20].long()
    rig.tier.copy_back(torch.arange(20), device)()
    records, slots, event = rig.tier.records.get(torch.arange(20)), torch.arange(100, 120), Later()
    rig.tier.records.put(slots, records, event)
    assert not rig.tier.records.part(100, 120).present.any()
    assert rig.tier.records.get(slots).present.all()
    assert event.happened


@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
def test_damage_in_host_memory_is_found_once_and_named(mode, monkeypatch) -> None:
    rig = HiCacheRig(monkeypatch, content=mode)
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.host_pool.v_buffer[1, host[7]] += 1
    found = []
    rig.tier.report = found.append
    assert rig.tier.usable(host) == 7
    assert [(f.tier, f.half, f.slot, f.position, f.token) for f in found] == [
        ("host", "V", int(host[7]), 7, 12)
    ]
    assert rig.tier.usable(host) == 7  # it has no record any more
    assert len(found) == 1


def test_a_finding_becomes_a_violation_of_its_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = HiCacheRig(monkeypatch)
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.host_pool.k_buffer[0, host[3]] += 1
    rig.tier.compare(0, 1024)
    events = []
    monkeypatch.setattr(rig.manager.sink, "emit", events.append)
    rig.settle()
    (event,) = (e for e in events if e["event"] == "violation")
    assert (event["tier"], event["tag"], event["slot"]) == ("host", "HOST_K_FULL", int(host[3]))
    assert event["writer"]["request_id"] == "req-1"
    (cause,) = (e for e in events if e["event"] == "cause")
    assert (
        f"host slot {int(host[3])} at position 3, whose K bytes have changed" in cause["sentence"]
    )


@pytest.mark.parametrize(
    ("mode", "each"), [(ContentMode.ALL, None), (ContentMode.PARTIAL, HOST_SECTOR_BYTES)]
)
def test_a_slot_takes_from_the_budget_what_is_fetched_of_it(
    monkeypatch: pytest.MonkeyPatch, mode: ContentMode, each: int | None
) -> None:
    rig = HiCacheRig(monkeypatch, content=mode)
    sources = [s for group, half in rig.tier.parts for s in group.content(half)]
    assert rig.tier.bytes_per_slot == sum(s.row_bytes if each is None else each for s in sources)


def test_of_a_large_load_some_slots_are_compared_each_time(monkeypatch) -> None:
    rig = HiCacheRig(monkeypatch)
    rig.tier._check_budget_bytes = 5 * rig.tier.bytes_per_slot
    rig.extend(1, TOKENS)
    host = rig.write_back(1, 20)
    rig.host_pool.k_buffer[0, host] += 1
    found = []
    rig.tier.report = found.append
    rig.tier.usable(host)
    assert 1 <= len(found) <= 7
    for _ in range(12):
        rig.tier.usable(host)
    assert len({f.slot for f in found}) == 20


def _words_at(positions: torch.Tensor) -> torch.Tensor:
    """int64[n, 1, RECORD_WORDS]: records of some token at each of `positions` int64[n]."""
    words = torch.full((len(positions), 1, record.RECORD_WORDS), 5)
    words[:, 0, record.WORD_IDENTITY] |= positions << 32
    return words


@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("page", [1, 16])
@CODE
def test_fingerprints_are_the_devices_in_every_layout(
    layout, page, mode, code, monkeypatch
) -> None:
    monkeypatch.setattr(HOST, "fingerprint_rows", code.fingerprint_rows)
    rig = HiCacheRig(monkeypatch, layout=layout, real=make_mha_pool(size=512, page_size=page))
    pool, group, layers = rig.host_pool, rig.manager.groups[0], 2
    device = torch.arange(16, 64)
    host = torch.arange(32, 80)
    for half, name in enumerate("kv"):
        for layer in range(layers):
            buffer = getattr(rig.pool, f"{name}_buffer")[layer]
            buffer[:] = torch.randn(buffer.shape)
            ours = pool.kv_buffer[half].select(0 if layout == "layer_first" else 1, layer)
            ours.reshape(-1, *buffer.shape[1:])[host] = buffer[device]
            if layout == "page_first_direct":
                for h, d in zip(host.tolist(), device.tolist(), strict=True):
                    ours[h // page, h % page] = buffer[d]
        sources = sources_of(pool.kv_buffer[half], layout, layers, pool.size, page)
        words = _words_at(device)
        expected = content_of_records(group.content(name.upper()), device, mode, words[:, 0])
        (found,) = HostContent((sources,), mode).fingerprints(host.numpy(), words.numpy())
        assert found.tolist() == expected.tolist()
        assert len(expected.unique()) == len(expected)


@st.composite
def _host_halves(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[Any, ...], int]:
    """One half of a host pool with random bytes, as `sources_of` takes it, and its slots."""
    layout = draw(st.sampled_from(["layer_first", "page_first", "page_first_direct"]))
    layers, page = draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 16]))
    slots, row = page * draw(st.integers(1, 5)), draw(st.integers(1, 300))
    row = draw(st.sampled_from([row, 4 * row]))  # of other rows only the reference knows
    shape = {
        "layer_first": (layers, slots, row),
        "page_first": (slots, layers, row),
        "page_first_direct": (slots // page, layers, page, row),
    }[layout]
    torch.manual_seed(draw(st.integers(0, 2**32)))
    half = torch.randint(0, 256, shape, dtype=torch.uint8)
    return half, (layout, layers, slots, page), slots


@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
@CODE
@given(half=_host_halves(), data=st.data())
def test_fingerprints_of_any_host_pool_are_those_of_the_reference(mode, code, half, data) -> None:
    """Rows of MLA and of MHA, whatever their size: sectors beyond a row's end, rows of odd bytes."""
    memory, described, count = half
    sources = sources_of(memory, *described)
    slots = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), max_size=40)), dtype=int)
    words = _words_at(torch.randint(0, 1 << 30, slots.shape))
    expected = content_of_records(sources, slots, mode, words[:, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HOST, "fingerprint_rows", code.fingerprint_rows)
        (found,) = HostContent((sources,), mode).fingerprints(slots.numpy(), words.numpy())
    assert found.tolist() == expected.tolist()


@CODE
@pytest.mark.parametrize("mode", [ContentMode.PARTIAL, ContentMode.ALL], ids=str)
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("page", [1, 16])
def test_all_slots_of_a_pool_have_fingerprints_and_no_others(
    layout, page, mode, code, monkeypatch
) -> None:
    """C and NumPy's views check no bounds of their own."""
    monkeypatch.setattr(HOST, "fingerprint_rows", code.fingerprint_rows)
    rig = HiCacheRig(monkeypatch, layout=layout, real=make_mha_pool(size=512, page_size=page))
    size, slots = rig.host_pool.size, np.arange(rig.host_pool.size)
    content = HostContent(rig.tier.content, mode)
    words = np.zeros((size, 2, record.RECORD_WORDS), np.int64)
    assert content.fingerprints(slots, words).shape == (2, size)
    for beyond in (-1, size):
        with pytest.raises(IndexError, match=f"expected slots below {size}, got {beyond}"):
            content.fingerprints(np.array([1, beyond]), words[:2])


@CODE
def test_the_prefix_with_records_follows_what_is_put_and_cleared(code, monkeypatch) -> None:
    monkeypatch.setattr(HOST, "leading", code.leading)
    records, rng = HostRecords(64, 2), np.random.default_rng(5)
    for _ in range(300):
        slots = torch.from_numpy(rng.choice(64, rng.integers(1, 40), replace=False))
        words = torch.from_numpy(rng.integers(0, 2, (len(slots), 2, record.RECORD_WORDS)))
        action = rng.integers(0, 20)
        if action == 0:
            records.clear()
        elif action < 5:
            records.clear(slots)
        else:
            records.put(slots, SlotRecords(words))
        asked = rng.choice(64, 20)
        present = records.get(torch.from_numpy(asked)).present.tolist()
        count, read = records.look_up(asked, slice(3, None, 4))
        assert count == (present.index(False) if False in present else 20)
        expected = records.get(torch.from_numpy(asked[3::4].copy()))
        assert read.tolist() == expected.words.tolist()


def test_a_host_pool_of_another_kind_is_refused(rig: HiCacheRig) -> None:
    """As those of hybrid models."""

    class HostPoolGroup:
        pass

    with pytest.raises(CanaryStartupError, match="HostPoolGroup; the canary knows MHAToken"):
        protect(rig.manager, HostPoolGroup())
    with pytest.raises(
        CanaryStartupError, match=r"prefix cache HostPoolGroup .* Remove --enable-hi"
    ):
        refuse_tree(HostPoolGroup())


def test_a_record_is_read_whole_while_another_thread_sets_it() -> None:
    """As a sweep does while a prefetch from storage goes on."""
    count = 512
    slots, records, is_over = torch.arange(count), HostRecords(count, 2), threading.Event()

    def set_again_and_again() -> None:
        for value in itertools.count(1):
            if is_over.is_set():
                return
            words = torch.full((count, 2, record.RECORD_WORDS), value)
            records.put(slots, SlotRecords(words))

    thread = threading.Thread(target=set_again_and_again)
    thread.start()
    try:
        torn = 0
        for _ in range(1500):
            for read in (records.part(0, count), records.get(slots)):
                torn += int((read.words != read.words[:, :1, :1]).any())
    finally:
        is_over.set()
        thread.join()
    assert torn == 0
    assert int(records.get(slots).words.min()) > 1, "the thread was at work"


def test_a_layout_that_scatters_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedPoolError, match="layout page_head"):
        sources_of(torch.zeros(4, 2, 16, 2, 8), "page_head", 2, 64, 16)


def test_mode_of_loaded_records_is_known() -> None:
    assert record.is_writer_intact(record.pack_writer(1, 0, Mode.LOADED, State.LIVE))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
