"""DeepSeek-V4's real pool and allocator under the real manager: written, verified, damaged, freed and used again.

On CPU with the NumPy reference, and where there is a GPU with the pool on it and the Triton kernels.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import CanaryLaunchTag
from sglang_kv_canary.errors import CanaryStartupError
from sglang_kv_canary.perturb.content import bytes_of
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher.adapters.dsv4 import STRIDES
from sglang_kv_canary.reports.violation import render
from sglang_kv_canary.runner.live_answers import LiveAnswers, Unanswerable
from sglang_kv_canary.state import TagCounter
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.sweep.walkers import walker_of
from sglang_kv_canary.testing.e2e import is_explained
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.surroundings import SchedulerSurroundings
from sglang_kv_canary_rigs.dsv4_rig import FULL_SLOTS, PAGE, Dsv4Rig, store_keys, store_rows
from sglang_kv_canary_rigs.hooked import cache_request, cache_under, hook_in, make_request
from sglang_kv_canary_rigs.pool_fixtures import make_dsv4_pool

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")
register_cuda_ci(est_time=120, suite="stage-b-test-1-gpu-small")

SWA, C4, C128, C4_INDEXER = PoolKind.SWA, PoolKind.C4, PoolKind.C128, PoolKind.C4_INDEXER
KINDS = (SWA, C4, C4_INDEXER, C128)
COMPRESSED = (C4, C4_INDEXER, C128)
# The last complete slot of each kind that ends before 300 tokens: inside of the window of 127, complete, verified.
LAST = {SWA: 290, C4: 287, C4_INDEXER: 287, C128: 255}


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def served(device: str, **settings: Any) -> Dsv4Rig:
    """Two requests of 300 and 140 tokens, prefilled and decoded a little."""
    rig = Dsv4Rig(device, **settings)
    rig.extend(1, range(1000, 1300))
    rig.extend(2, range(2000, 2140))
    for _ in range(3):
        rig.decode([1, 2])
    assert rig.settle() == []
    return rig


def written(rig: Dsv4Rig, kind: PoolKind, side: Side = Side.HEAD) -> int:
    return int(rig.manager.state.counters[CanaryLaunchTag(kind, "K", side).id, TagCounter.WRITTEN])


def found(rig: Dsv4Rig) -> dict[tuple[str, str], set[int]]:
    """(tag, reasons) -> positions of what is reported."""
    result: dict[tuple[str, str], set[int]] = {}
    for violation in rig.settle():
        key = violation.tag, "|".join(violation.reasons)
        result.setdefault(key, set()).add(violation.expected_position)
    return result


def both(kind: PoolKind) -> tuple[str, str]:
    return f"HEAD_K_{kind.value}", f"TAIL_K_{kind.value}"


@pytest.mark.skipif(
    release().has_own_canary,
    reason="SGLang has dropped SetK.slow, and then SetKAndS.torch; lifted by make test",
)
def test_rows_are_stored_as_sglang_stores_them() -> None:
    """What takes the place of SGLang's kernels where a release has no torch version of them."""
    from sglang.srt.layers.attention.dsv4.index_buf_accessor import NopeFp8RopeBf16Pack, SetKAndS
    from sglang.srt.layers.attention.nsa.index_buf_accessor import SetK, SetS

    pool = make_dsv4_pool().pool
    slots = torch.tensor([3, 64, 200, 63, 129])
    sizes = {"nope": 448, "rope": 128, "scales": 7, "keys": 128, "key_scales": 4}
    rows = {k: torch.randint(1, 120, (5, n), dtype=torch.uint8) for k, n in sizes.items()}
    pack = NopeFp8RopeBf16Pack(
        rows["nope"].view(torch.float8_e4m3fn), rows["rope"].view(torch.bfloat16), rows["scales"]
    )
    for part in (pool.swa_kv_pool, pool.c4_kv_pool):
        one, other = part.kv_buffer[0].clone(), part.kv_buffer[0].clone()
        SetKAndS.torch(part, one, slots, pack)
        store_rows(part, other, slots, pack)
        assert one.any()
        assert torch.equal(one, other)
    indexer = pool.c4_indexer_kv_pool
    one, other = (indexer.index_k_with_scale_buffer[0].clone() for _ in range(2))
    scales = rows["key_scales"].view(torch.float32)
    SetK.slow(indexer, one, slots, rows["keys"])
    SetS.slow(indexer, one, slots, scales)
    store_keys(indexer, other, slots, rows["keys"], scales)
    assert one.any()
    assert torch.equal(one, other)


# Clean


@pytest.mark.parametrize("content", list(ContentMode))
def test_clean_traffic_is_silent_and_each_slot_is_written_once(device, content) -> None:
    rig = served(device, mode=CanaryMode.RAISE, content=content)
    rig.extend(2, range(2200, 2450))  # a chunk that starts and ends inside of slots
    for _ in range(6):
        rig.decode([2, 1])
    assert rig.settle() == []
    lengths = rig.lengths[1], rig.lengths[2]
    assert written(rig, SWA) == sum(lengths)
    for kind, stride in ((C4, 4), (C4_INDEXER, 4), (C128, 128)):
        expected = sum(length // stride for length in lengths)
        assert written(rig, kind) == written(rig, kind, Side.TAIL) == expected


def test_the_window_slides_and_swa_pages_go_to_others_while_compressed_slots_stay(device) -> None:
    rig = served(device, mode=CanaryMode.RAISE)
    rig.extend(1, range(3000, 3300))
    rig.evict_swa(1, 256)
    rig.extend(3, range(5000, 5400))
    rig.extend(4, range(6000, 6200))
    for _ in range(4):
        rig.decode([1, 2, 3, 4])
    assert rig.settle() == []
    tag = CanaryLaunchTag(C128, "K", Side.HEAD).id
    assert int(rig.manager.state.counters[tag, TagCounter.CHECKED]) > 0


def test_freed_pages_serve_another_request(device) -> None:
    rig = served(device, mode=CanaryMode.RAISE)
    for row in (1, 2, 3, 1, 2, 3):
        if rig.lengths[row]:
            rig.free(row)
        rig.extend(row, range(row * 900, row * 900 + 450))
        rig.decode([r for r in (1, 2, 3) if rig.lengths[r]])
    assert rig.settle() == []


def test_a_completed_slot_may_be_written_again_with_other_tokens(device) -> None:
    """As a target verify does with positions whose draft tokens were rejected."""
    rig = served(device, mode=CanaryMode.RAISE)
    for _ in range(2):
        start = rig.lengths[1]
        rig.verify(1, range(7000, 7008))
        rig.lengths[1] = start + 3  # five are rejected; their slots go back
        sampled = torch.tensor([[7001, 7002, 7 + start + 3]], device=device)
        count = torch.tensor([3], device=device)
        rig.manager.note_next_tokens(torch.tensor([1], device=device), sampled, count)
        rejected = rig.rows.req_to_token[1, start + 3 : start + 8].long()
        assert (
            len(set((rejected // PAGE).tolist())) == 1
        )  # v2 keeps them: same page, nothing is freed
        rig.decode([1, 2])
    assert rig.settle() == []


@pytest.mark.parametrize("accepted", [(1,), (4,), (1, 2, 3, 4)], ids=str)
def test_verifies_with_rejected_drafts_are_silent_over_c128_boundaries_and_pages(
    device, accepted
) -> None:
    """Rejected tokens complete c4 and c128 slots, which the next verify completes again with other tokens."""
    rig = Dsv4Rig(device, mode=CanaryMode.RAISE)
    rig.extend(1, range(1000, 1000 + PAGE - 8))
    rig.extend(2, range(2000, 2000 + 120))
    for i in range(16):
        for row in (1, 2):
            rig.draft(row, accepted[i % len(accepted)])
    assert rig.settle() == []
    assert written(rig, C4) == written(rig, C4, Side.TAIL) > 0
    # Rows 1 and 2 had one complete c128 slot and none. Drafts completed their next ones, with the page of row 1.
    assert written(rig, C128) >= 3


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_flipped_byte_of_a_slot_that_drafts_completed(device, kind) -> None:
    rig = Dsv4Rig(device)
    rig.extend(1, range(1000, 1250))
    for _ in range(4):
        rig.draft(1, 3)
    assert rig.settle() == []
    slot = rig.slot_of(kind, 1, 255)
    bytes_of(rig.group(kind).k_content[-1], slot)[0] ^= 1
    rig.draft(1, 1)
    (violation,) = rig.settle()
    assert (violation.tag, violation.reasons) == (f"TAIL_K_{kind.value}", ("CONTENT",))
    assert (violation.slot, violation.stored_position) == (slot, 255)


def test_a_chain_that_had_nothing_to_start_from_does_not_reach_compressed_slots(
    device, monkeypatch
) -> None:
    """The host unmaps a duplicate page before it re-points the row (see test_moot_swa): the fold takes that in."""
    rig = Dsv4Rig(device, mode=CanaryMode.RAISE)
    hook_in(rig, monkeypatch)
    tree, tokens = rig.make_tree(), range(1000, 1000 + PAGE)
    rig.result(rig.extend(1, tokens))
    cache_request(tree, make_request(tree, 1, tokens), PAGE)
    rig.result(rig.extend(2, tokens))
    request = make_request(tree, 2, tokens)
    rig.result(cache_under(rig, tree, request, PAGE, lambda: rig.decode([2])))
    assert rig.slot(2, 0) == rig.slot(1, 0)
    for _ in range(9):
        rig.decode([2])
    assert rig.settle() == []
    assert rig.manager.violations.moot > 0
    assert written(rig, C4) == 2 * PAGE // 4 + 2


# Faults, one group at a time


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_a_flipped_byte(device, kind) -> None:
    rig = served(device)
    slot = rig.slot_of(kind, 1, LAST[kind])
    bytes_of(rig.group(kind).k_content[-1], slot)[0] ^= 1
    rig.decode([1, 2])
    (violation,) = rig.settle()
    assert (violation.tag, violation.reasons) == (f"TAIL_K_{kind.value}", ("CONTENT",))
    assert (violation.slot, violation.stored_position) == (slot, LAST[kind])
    assert (violation.reader.row, violation.writer.row, violation.writer.forward) == (1, 1, 1)


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind.value)
def test_the_entry_of_a_compressed_slot_is_not_another_one(device, kind, caplog) -> None:
    """It is found at its last token's position, through the entry of its first token."""
    rig = served(device)
    bytes_of(rig.group(kind).k_content[0], rig.slot_of(kind, 1, LAST[kind]))[0] ^= 1
    rig.decode([1, 2])
    rig.settle()
    assert f"CONTENT at TAIL_K_{kind.value}" in caplog.text
    assert "also in" not in caplog.text


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind.value)
def test_clean_twin_bytes_of_a_slot_that_is_not_complete_yet(device, kind) -> None:
    rig = served(device)  # 303 tokens: the slot of the last ones is open
    assert rig.lengths[1] % rig.group(kind).stride
    slot = rig.slot_of(kind, 1, rig.lengths[1] - 1)
    bytes_of(rig.group(kind).k_content[0], slot)[0] ^= 1
    rig.decode([2])
    rig.extend(1, [9])
    assert rig.settle() == []


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind.value)
@pytest.mark.parametrize("side", ["HEAD", "TAIL"])
def test_a_damaged_record(device, kind, side) -> None:
    rig = served(device)
    group, last = rig.group(kind), 127 if kind is C128 else 127 - 4
    stride = group.stride
    records = group.records("K", side)
    slot, tag = rig.slot_of(kind, 1, last), f"{side}_K_{kind.value}"
    cases = {
        (record.WORD_IDENTITY, 3): {(tag, "CHAIN"): {last}},
        (record.WORD_IDENTITY, 35): {(tag, "POSITION"): {last}},
        (record.WORD_CHAIN, 17): {(tag, "CHAIN"): {last, last + stride}},
        (record.WORD_WRITER, 62): {(tag, "BAD_STATE"): {last}},
    }
    for (word, bit), expected in cases.items():
        rig.reported.clear()
        records[slot, word] ^= 1 << bit
        rig.decode([1, 2])
        records[slot, word] ^= 1 << bit
        assert found(rig) == expected, (word, bit)
    rig.reported.clear()
    rig.decode([1, 2])
    assert rig.settle() == []


@pytest.mark.parametrize("stale_pages", [False, True], ids=["another-request", "never-used"])
def test_a_page_of_the_row_points_elsewhere(device, stale_pages) -> None:
    """The backend reads a page's compressed slots through the row's entry at the page's first token."""
    rig = served(device)
    other = 9 * PAGE if stale_pages else rig.slot(2, 0)
    rig.rows.req_to_token[1, 0] = other
    rig.decode([1, 2])
    seen = found(rig)
    for kind in COMPRESSED:
        stride = rig.group(kind).stride
        reasons = "NEVER_WRITTEN" if stale_pages else "CHAIN"
        # Another request's first slot continues the anchor just as well: the next slot tells.
        positions = {stride - 1} if stale_pages else {2 * stride - 1}
        for tag in both(kind):
            assert seen.pop((tag, reasons)) == positions, tag
    assert not seen


def test_a_page_of_a_row_whose_chunk_was_cached_in_flight_points_elsewhere(
    device, monkeypatch
) -> None:
    """SGLang caches every chunk but the last in flight; where nobody has its tokens, no row is re-pointed."""
    rig = Dsv4Rig(device, content=ContentMode.NONE)
    hook_in(rig, monkeypatch)
    tree = rig.make_tree()
    for row in (1, 2):
        tokens = range(1000 * row, 1000 * row + 2 * PAGE + 48)
        step = rig.extend(row, tokens[: 2 * PAGE])
        cache_request(tree, make_request(tree, row, tokens), 2 * PAGE)
        rig.result(step)
        rig.result(rig.extend(row, tokens[2 * PAGE :]))
    assert rig.settle() == []
    rig.rows.req_to_token[2, :PAGE] = rig.rows.req_to_token[1, :PAGE]
    rig.result(rig.decode([2]))
    seen = found(rig)
    for kind in COMPRESSED:  # the foreign page is consistent in itself: the slot behind it tells
        for tag in both(kind):
            assert seen.pop((tag, "CHAIN")) == {PAGE + rig.group(kind).stride - 1}, tag
    assert not seen


def test_the_report_says_that_the_field_is_no_token(device) -> None:
    rig = served(device)
    rig.rows.req_to_token[1, 128] = rig.slot(2, 0)
    rig.decode([1])
    violations = [v for v in rig.settle() if v.tag == "HEAD_K_C128" and v.expected_position == 255]
    (violation,) = violations
    assert set(violation.reasons) == {"POSITION", "CHAIN"}
    assert violation.as_event()["token_field"] == "fold"
    text = render(violation)
    assert f"fold       expected {violation.expected_token}, found {violation.stored_token}" in text
    assert "no token id" in text
    assert "  token " not in text


def test_no_question_is_answered_about_slots_that_the_allocator_does_not_have(device) -> None:
    """Compressed sub-pools of newer releases have room for them."""
    rig = served(device)
    answers = LiveAnswers([rig.manager], SchedulerSurroundings(None), rig.history)
    last = PAGE + FULL_SLOTS - 1  # page 0 is padding
    next(answers.slot(last, "FULL"))
    with pytest.raises(
        Unanswerable, match=f"expected a FULL slot from 1 to {last}, got {last + 1}"
    ):
        next(answers.slot(last + 1, "FULL"))


# Frees


def test_read_after_the_pages_were_freed_is_reported_by_every_group(device) -> None:
    rig = served(device)
    length = rig.lengths[1]
    rig.free(1)
    rig.lengths[1] = length
    rig.pool.full_to_swa_index_mapping[rig.rows.req_to_token[1, :length].long()] = 0
    rig.manager.ledger.apply()
    rig.decode_without_slots(1)
    seen = found(rig)
    for kind in COMPRESSED:
        stride = rig.group(kind).stride
        expected = set(range(stride - 1, length, stride))
        for tag in both(kind):
            assert seen[tag, "USE_AFTER_FREE"] == expected
    freed = [v for v in rig.reported if v.tag in both(C128)]
    assert all(v.writer.row == 1 and v.freed.forward == 5 for v in freed)


def test_a_freed_page_that_is_handed_out_is_not_readable_before_it_is_written(device) -> None:
    rig = served(device)
    freed_page = rig.slot(1, 0) // PAGE
    rig.free(1)
    rig.extend(3, range(4000, 4003))  # three tokens in the page that was freed last, none complete
    assert rig.slot(3, 0) // PAGE == freed_page
    rig.extend(4, range(12))
    rig.rows.req_to_token[4, 8] = rig.slot(3, 0)
    rig.decode([4])
    seen = {key: value for key, value in found(rig).items() if "_C4" in key[0]}
    assert seen == {(t, "UNWRITTEN_SINCE_ALLOC"): {11} for k in (C4, C4_INDEXER) for t in both(k)}


def test_clean_twin_of_the_page_that_is_handed_out(device) -> None:
    rig = served(device, mode=CanaryMode.RAISE)
    rig.free(1)
    rig.extend(3, range(4000, 4003))
    rig.extend(4, range(12))
    rig.decode([4, 3])
    assert rig.settle() == []


def test_freeing_full_slots_frees_each_compressed_slot_once(device) -> None:
    rig = served(device)
    slots = rig.rows.req_to_token[1, : rig.lengths[1]].long()
    rig.free(1)
    rig.decode([2])
    assert rig.settle() == []
    for kind in COMPRESSED:
        group = rig.group(kind)
        for side in (Side.HEAD, Side.TAIL):
            words = group.records("K", side)[(slots // group.stride).unique(), record.WORD_WRITER]
            states = (words >> record.WRITER_STATE_SHIFT) & 15
            assert set(states.tolist()) <= {record.State.FREED, record.State.NEVER_WRITTEN}


def test_a_double_free_is_one_finding_for_each_slot_and_group(device) -> None:
    rig = served(device)
    slots = rig.rows.req_to_token[1, :PAGE].long()
    rig.free(1)
    rig.decode([2])
    rig.note_free(slots)
    rig.decode([2])
    violations = rig.settle()
    assert {v.reasons for v in violations} == {("DOUBLE_FREE",)}
    for kind in COMPRESSED:
        stride = rig.group(kind).stride
        mine = [v for v in violations if v.tag == f"FREE_{kind.value}"]
        assert sorted(v.slot for v in mine) == (slots // stride).unique().tolist()
        assert all(v.full_slot == v.slot * stride for v in mine)


# The sweep, over SGLang's own prefix cache


def swept(device: str, **settings: Any) -> tuple[Dsv4Rig, SweepOrchestrator]:
    """Two pages of a request in the prefix cache, the first of which has lost its SWA slots; a manager that sweeps."""
    rig = Dsv4Rig(device, sweep_interval=1, **settings)
    rig.extend(1, range(1000, 1600))
    rig.decode([1])
    rig.evict_swa(1, PAGE)
    tree = rig.make_tree()
    rig.insert(tree, 1, range(1000, 1000 + 2 * PAGE))
    sweep = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(sweep)
    rig.manager.attach_radix_cache(tree)
    one_pass(rig, sweep)
    assert rig.settle() == []
    return rig, sweep


def one_pass(rig: Dsv4Rig, sweep: SweepOrchestrator) -> None:
    target = sweep.sweep_passes + 1
    for _ in range(400):
        sweep._rests_until = 0.0  # the tree lists its slots at once
        rig.manager.on_idle()
        if sweep.sweep_passes >= target:
            return
    raise AssertionError("the pass was not completed")


def test_pages_that_would_cut_a_compressed_slot_are_refused(device) -> None:
    walker = walker_of(Dsv4Rig(device).make_tree())
    walker.refuse_pages_not_of(128)
    with pytest.raises(CanaryStartupError, match=f"stand for 512 tokens, and its pages of {PAGE}"):
        walker.refuse_pages_not_of(512)


@pytest.mark.parametrize("budget", [65536, 100], ids=["whole", "cut"])
def test_a_pass_covers_compressed_slots_also_where_swa_slots_are_gone(device, budget) -> None:
    rig, sweep = swept(device, mode=CanaryMode.RAISE, sweep_budget_slots=budget)
    counters = rig.manager.state.counters
    before = counters.clone()
    one_pass(rig, sweep)
    one_pass(rig, sweep)
    tags = {kind: CanaryLaunchTag(kind, "K", Side.SWEEP).id for kind in KINDS}
    grown = {kind: int((counters - before)[tag, TagCounter.CHECKED]) for kind, tag in tags.items()}
    # The first of them may have begun before; another one may be under way.
    assert all(grown[kind] >= 2 * PAGE // stride for kind, stride in STRIDES.items())
    assert grown[SWA] >= PAGE
    assert grown[C4] == grown[C4_INDEXER]


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind.value)
def test_damage_in_a_cached_prefix_is_found_with_no_request(device, kind) -> None:
    rig, sweep = swept(device)
    slot = rig.slot_of(kind, 1, 383)
    bytes_of(rig.group(kind).k_content[0], slot)[0] ^= 1
    rig.group(kind).k_tail[rig.slot_of(kind, 1, 255), record.WORD_CHAIN] ^= 1 << 40
    one_pass(rig, sweep)
    rig.settle()
    tag, stride = f"SWEEP_K_{kind.value}", STRIDES[kind]
    seen = {(v.tag, *v.reasons, v.stored_position) for v in rig.reported}
    assert seen == {(tag, "CONTENT", 383), (tag, "CHAIN", 255), (tag, "CHAIN", 255 + stride)}
    for v in rig.reported:  # the first of the full slots, as a forward reports it
        assert v.full_slot == rig.slot(1, v.stored_position - stride + 1)


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind.value)
def test_a_forward_and_the_sweep_that_find_the_same_damage_name_one_place(device, kind) -> None:
    rig, sweep = swept(device)
    full = rig.slot(1, 384 - STRIDES[kind])
    bytes_of(rig.group(kind).k_content[0], rig.slot_of(kind, 1, 383))[0] ^= 1
    rig.decode([1])
    one_pass(rig, sweep)
    rig.settle()
    sides = {v.tag.split("_")[0]: (v.slot, v.full_slot, v.reasons) for v in rig.reported}
    slot = full // STRIDES[kind]
    assert sides == dict.fromkeys(("TAIL", "SWEEP"), (slot, full, ("CONTENT",)))
    assert rig.manager.violations._reporter.causes == 1
    done = {"slots": [full + 1], "request_ids": [], "rows": []}
    events = [v.as_event() for v in rig.reported]
    assert all(is_explained(event, done) for event in events)
    others = {"slots": [slot, full + STRIDES[kind]], "request_ids": [], "rows": []}
    assert not any(is_explained(event, others) for event in events)


def test_the_sweep_does_not_take_swa_slots_for_full_slots(device, caplog) -> None:
    rig, sweep = swept(device)
    tokens = range(3000, 3000 + 4 * PAGE)  # the last of the four gets the evicted SWA page
    rig.extend(2, tokens)
    rig.insert(rig.manager.radix_cache, 2, tokens)
    slot = rig.slot_of(SWA, 2, 900)
    assert slot != rig.slot(2, 900)
    bytes_of(rig.group(SWA).k_content[0], slot)[0] ^= 1
    one_pass(rig, sweep)
    one_pass(rig, sweep)  # the pass before may have been past it
    assert {(v.tag, v.slot, v.full_slot) for v in rig.settle()} == {("SWEEP_K_SWA", slot, None)}
    assert f"SWA slot {slot} is that of full slot {rig.slot(2, 900)}" in caplog.text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
