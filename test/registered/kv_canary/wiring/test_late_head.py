"""HEAD of a long prefill comes after the layers, on the inputs as they were before them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import ContentMode, TokenCheck
from sglang_kv_canary.launch.warm_up import warm_up_inputs
from sglang_kv_canary.load_back import LoadBack
from sglang_kv_canary.page_table import PageTable
from sglang_kv_canary.perturb.observer import _HeadDamage
from sglang_kv_canary.perturb.scene import Outcome
from sglang_kv_canary.plan.expected_inputs import ExpectedTokens
from sglang_kv_canary.pool_kind import PoolKind
from sglang_kv_canary.single_forward_manager import Phase, head_can_wait, late_work
from sglang_kv_canary.slot_event import RecordMove, SlotEventKind
from sglang_kv_canary.state import Header
from sglang_kv_canary.wiring import scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.model_runner import _around_forward, wrap_model_forward
from sglang_kv_canary_rigs.kernel_cases import make_group
from sglang_kv_canary_rigs.overlap_rig import DEVICE, LONG, SHORT, OverlapScheduler

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=20, suite="stage-b-test-1-gpu-small")

Start = Callable[..., OverlapScheduler]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def start(**arguments: Any) -> OverlapScheduler:
        scheduler = OverlapScheduler(**arguments)
        scheduler.install(monkeypatch)
        return scheduler

    return start


@pytest.fixture
def scheduler(start: Start) -> OverlapScheduler:
    return start()


def order_of(scheduler: OverlapScheduler, row: int, tokens: int) -> list[str]:
    """What the host does in a prefill, in order. HEAD is what gives the forward its number."""
    events: list[str] = []
    summary = scheduler.rig.manager.state.summary
    before = int(summary[Header.FORWARD_RUNNING])

    def in_model(_: Any) -> None:
        if int(summary[Header.FORWARD_RUNNING]) > before:
            events.append("head")
        events.append("model")

    scheduler.request(row).on_read = lambda: events.append("tokens")
    scheduler.rig.in_model = in_model
    scheduler.process(scheduler.run(row, tokens))
    if "head" not in events and int(summary[Header.FORWARD_RUNNING]) > before:
        events.append("head")
    return list(dict.fromkeys(events))


EARLY, LATE = ["tokens", "head", "model"], ["model", "tokens", "head"]


def test_a_long_prefill_has_its_head_after_the_layers(scheduler: OverlapScheduler) -> None:
    assert order_of(scheduler, 1, LONG) == LATE
    assert scheduler.rig.settle() == []


@pytest.mark.parametrize("content", ContentMode)
def test_it_does_not_matter_what_is_checked_of_content(start: Start, content: ContentMode) -> None:
    assert order_of(start(content=content), 1, LONG) == LATE


def test_a_short_prefill_has_it_before(scheduler: OverlapScheduler) -> None:
    assert order_of(scheduler, 1, SHORT) == EARLY


def test_the_last_chunk_behind_a_prefix_has_it_after_the_layers(
    scheduler: OverlapScheduler,
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    assert order_of(scheduler, 1, LONG) == LATE
    scheduler.process(scheduler.decode(1))
    assert scheduler.rig.settle() == []


def test_an_earlier_chunk_behind_a_prefix_has_it_before(scheduler: OverlapScheduler) -> None:
    """SGLang may re-point its row to equal slots of the prefix cache before its result is there."""
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.request(1).to_come = 1
    assert order_of(scheduler, 1, LONG) == EARLY


def test_an_earlier_chunk_of_a_request_that_was_retracted_has_it_before(
    scheduler: OverlapScheduler,
) -> None:
    """Its answer so far is computed again behind its prompt."""
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.request(1).output_ids = (7,)
    assert order_of(scheduler, 1, LONG) == EARLY


def test_decodes_that_run_as_a_prefill_have_it_before(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One may have ended. Its row is given away then, while the prefix cache keeps its slots."""
    monkeypatch.setattr(late_work, "MIN_TOKENS", 1)
    scheduler.process(scheduler.run(1, SHORT))
    assert order_of(scheduler, 1, 1) == EARLY
    assert order_of(scheduler, 1, 2) == LATE


def test_a_request_whose_length_cannot_be_read_has_it_before(scheduler: OverlapScheduler) -> None:
    """The row is known to have a new owner all the same."""
    scheduler.process(scheduler.run(1, LONG))
    scheduler.requests.clear()  # another request gets the row, with a cached prefix
    scheduler.rig.lengths[1] = SHORT
    context.row_owners.forget(1)
    scheduler.request(1).tokens, scheduler.request(1).output_ids = list(range(SHORT)), None
    assert order_of(scheduler, 1, LONG) == EARLY
    assert scheduler.rig.settle() == []
    assert scheduler.rig.manager.errors.total == 1


def test_the_first_chunk_of_several_has_it_after_the_layers(scheduler: OverlapScheduler) -> None:
    scheduler.request(1).to_come = 1
    assert order_of(scheduler, 1, LONG) == LATE


def test_requests_that_do_not_match_the_batch_have_it_before(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose prefix it is, and whether more is to come, is not known."""
    scheduler.process(scheduler.run(1, SHORT))
    begin_step = hooks._begin_step

    def begin(batch: Any) -> Any:
        step = begin_step(batch)
        context.requests = []
        return step

    monkeypatch.setattr(hooks, "_begin_step", begin)
    assert order_of(scheduler, 1, LONG) == ["head", "model"]
    assert scheduler.rig.manager.errors.total == 0


def test_where_no_work_may_wait_it_comes_before(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under speculation, for example, see `checks_may_wait`."""
    monkeypatch.setattr(context, "late_work", None)
    assert order_of(scheduler, 1, LONG) == EARLY


def test_where_slots_are_looked_up_nothing_waits() -> None:
    """A slot that is given back meanwhile is 0 in SGLang's table at once. Attention has written elsewhere, then."""
    group = make_group(64)
    assert head_can_wait(SimpleNamespace(groups=(group,)))
    translated = make_group(64, swa_index_lut=torch.zeros(65, dtype=torch.int64))
    named = replace(group, slot_names=PageTable(torch.zeros(8, dtype=torch.int64), 8, 8))
    for looked_up in (translated, named):
        assert not head_can_wait(SimpleNamespace(groups=(group, looked_up)))


def test_a_batch_that_is_larger_than_usual_has_it_before(
    scheduler: OverlapScheduler,
) -> None:
    scheduler.rig.manager.state.inputs.capacity = LONG
    assert order_of(scheduler, 1, LONG) == LATE
    assert order_of(scheduler, 2, LONG + 1)[-1] == "model"


# Events of the allocators


def applied_in(scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in later prefills, in order."""
    order: list[str] = []
    ledger = scheduler.rig.manager.ledger
    apply = ledger.apply

    def noted(*arguments: Any) -> int:
        if ledger.due:
            order.append("events")
        return apply(*arguments)

    monkeypatch.setattr(ledger, "apply", noted)
    scheduler.rig.in_model = lambda _: order.append("model")
    return order


def free_a_request(scheduler: OverlapScheduler, row: int) -> torch.Tensor:
    """Its slots and its row are given back. Returns the slots."""
    rig = scheduler.rig
    slots = scheduler.slots_of(row)
    rig.allocator.free(slots)
    note(rig, SlotEventKind.FREE, slots)
    context.row_released(row)
    rig.lengths[row] = 0
    scheduler.requests.pop(row)
    return slots


def note(rig: Any, kind: SlotEventKind, slots: torch.Tensor) -> None:
    rig.manager.ledger.record(kind, PoolKind.FULL, slots.clone(), 1)


def test_events_come_with_head(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in (1, 2):
        scheduler.process(scheduler.run(row, SHORT))
    order = applied_in(scheduler, monkeypatch)
    free_a_request(scheduler, 1)
    scheduler.process(scheduler.run(2, LONG))
    free_a_request(scheduler, 2)
    scheduler.process(scheduler.run(3, SHORT))
    assert order == ["model", "events", "events", "model"]
    scheduler.process(scheduler.decode(3))
    assert scheduler.rig.settle() == []


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_a_prefix_that_was_freed_is_found(scheduler: OverlapScheduler, tokens: int) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    note(scheduler.rig, SlotEventKind.FREE, scheduler.slots_of(1)[5:6])
    scheduler.process(scheduler.run(1, tokens))
    found = scheduler.rig.settle()
    assert {(v.reasons, v.expected_position) for v in found} == {(("USE_AFTER_FREE",), 5)}
    assert {v.tag for v in found} >= {"HEAD_K_FULL", "HEAD_V_FULL"}


@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_slots_that_go_from_one_request_to_the_next_are_no_fault(
    scheduler: OverlapScheduler, tokens: int
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.process(scheduler.run(2, SHORT))
    freed = free_a_request(scheduler, 1)
    rig = scheduler.rig
    rig._alloc_extend = lambda row, count: torch.cat(
        [freed, rig.allocator.alloc(count - len(freed))] if count > len(freed) else [freed[:count]]
    )
    note(rig, SlotEventKind.ALLOC, freed)
    scheduler.process(scheduler.run(2, tokens))
    scheduler.process(scheduler.decode(2))
    assert rig.settle() == []


def test_records_that_are_loaded_come_before_the_layers(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiCache asks which forward has begun, and its loads must know it then."""
    scheduler.process(scheduler.run(1, SHORT))
    group, slots = scheduler.rig.manager.groups[0], scheduler.slots_of(1)
    words = torch.stack([records[slots] for records in (group.k_tail, group.v_tail)], dim=1)
    complete_after = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    order = applied_in(scheduler, monkeypatch)
    ledger = scheduler.rig.manager.ledger
    ledger.record_load_back(LoadBack(group, slots, words, complete_after))
    scheduler.process(scheduler.run(1, LONG))
    assert order == ["events", "model"]
    free_a_request(scheduler, 1)
    scheduler.process(scheduler.run(2, LONG))  # what has landed is exposed before its layers
    assert order == ["events", "model", "events", "model"]
    assert scheduler.rig.settle() == []


def pages_have_moved(scheduler: OverlapScheduler) -> None:
    moved = torch.tensor([int(scheduler.slots_of(1)[-1])], device=DEVICE)
    scheduler.rig.manager.ledger.record_move(RecordMove(PoolKind.FULL, moved, moved))


def inputs_do_not_fit(scheduler: OverlapScheduler) -> None:
    scheduler.rig.manager.state.inputs.capacity = LONG - 1
    free_a_request(scheduler, 1)


def weights_are_new(scheduler: OverlapScheduler) -> None:
    """They are told after what was freed under the old ones."""
    scheduler.rig.manager._has_new_weights = True
    free_a_request(scheduler, 1)


@pytest.mark.parametrize("reason", [pages_have_moved, inputs_do_not_fit, weights_are_new])
def test_events_come_before_the_layers_where_there_is_a_reason(
    reason: Callable[[OverlapScheduler], None],
    scheduler: OverlapScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    order = applied_in(scheduler, monkeypatch)
    reason(scheduler)
    scheduler.process(scheduler.run(2, LONG))
    assert order == ["events", "model"]
    assert scheduler.rig.settle() == []


def test_a_graph_that_is_replayed_instead_comes_after_the_events(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    order = applied_in(scheduler, monkeypatch)
    free_a_request(scheduler, 1)
    rig, manager = scheduler.rig, scheduler.rig.manager

    def replay(*_: Any) -> None:
        manager.note_replay("EXTEND")
        order.append("replay")

    rig._forward = lambda batch, *_: _around_forward(replay, rig, batch)
    scheduler.run(2, LONG)
    assert order == ["events", "replay"]


def test_events_of_a_forward_that_raises_come_with_the_next_one(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    order = applied_in(scheduler, monkeypatch)
    free_a_request(scheduler, 1)

    def fail(_: Any) -> None:
        raise RuntimeError("the model failed")

    scheduler.rig.in_model = fail
    with pytest.raises(RuntimeError, match="the model failed"):
        scheduler.run(2, LONG)
    assert order == []
    scheduler.rig.in_model = lambda _: order.append("model")
    scheduler.process(scheduler.run(3, SHORT))
    scheduler.process(scheduler.decode(3))
    assert order[:2] == ["events", "model"]
    assert scheduler.rig.settle() == []


def test_events_that_cannot_be_applied_end_the_checks_before_head(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.process(scheduler.run(1, SHORT))
    free_a_request(scheduler, 1)
    monkeypatch.setattr(scheduler.rig.manager.ledger, "_apply_in_order", broken)
    assert order_of(scheduler, 2, LONG) == ["model", "tokens"]
    manager = scheduler.rig.manager
    assert (manager.checking, manager.errors.total) == (False, 1)
    assert scheduler.rig.settle() == []


# What it finds


def changed(name: str, index: int, by: int) -> Callable[[Any], None]:
    def change(batch: Any) -> None:
        getattr(batch, name)[index] += by

    return change


@pytest.mark.parametrize(
    ("name", "reason"),
    [("input_ids", "WRITE_TOKEN"), ("positions", "WRITE_POSITION")],
)
@pytest.mark.parametrize("check", [TokenCheck.TAIL, TokenCheck.ALL])
def test_a_wrong_input_is_found(start: Start, name: str, reason: str, check: TokenCheck) -> None:
    scheduler = start(token_check=check)
    scheduler.rig.on_batch = changed(name, 7, 1)
    scheduler.process(scheduler.run(1, LONG))
    found = scheduler.rig.settle()
    assert {(v.tag, v.reasons, v.expected_position) for v in found} == {
        (f"HEAD_{half}_FULL", (reason,), 7) for half in "KV"
    }
    assert {v.reader.request_id for v in found} == {"request-1"}


def test_a_wrong_row_is_found(scheduler: OverlapScheduler) -> None:
    scheduler.rig.on_batch = changed("req_pool_indices", 0, 1000)
    scheduler.process(scheduler.run(1, LONG))
    assert {v.reasons for v in scheduler.rig.settle()} == {("ROW_OUT_OF_RANGE",)}


class Model(torch.nn.Module):
    def __init__(self, scheduler: OverlapScheduler) -> None:
        super().__init__()
        self.layer = torch.nn.Identity()
        self._rig = scheduler.rig

    def forward(self, batch: ForwardBatch) -> None:
        self.layer(batch.input_ids)
        self._rig._model(batch.out_cache_loc)


def test_an_injected_fault_that_the_layers_must_not_see_is_found(
    scheduler: OverlapScheduler,
) -> None:
    """It is undone before them, so that HEAD does not wait."""
    model, rig = Model(scheduler), scheduler.rig
    wrap_model_forward(model, rig.manager)
    fault = Outcome(
        around_head=(
            changed("req_pool_indices", 0, 1000),
            changed("req_pool_indices", 0, -1000),
        )
    )

    def forward(batch: ForwardBatch, *_: Any) -> None:
        with _HeadDamage(rig.manager, model, [fault]):
            _around_forward(lambda _, batch: model.forward(batch), rig, batch)

    rig._forward = forward
    scheduler.process(scheduler.run(1, LONG))
    assert {v.reasons for v in rig.settle()} == {("ROW_OUT_OF_RANGE",)}


def test_a_wrong_row_entry_is_found_by_the_next_forward(scheduler: OverlapScheduler) -> None:
    """As of every prefill: what is new in the row is not read through it."""

    def other_slot(_: Any) -> None:
        scheduler.rig.rows.req_to_token[1, 7] = scheduler.rig.rows.req_to_token[1, 8]

    scheduler.rig.on_batch = other_slot
    scheduler.process(scheduler.run(1, LONG))
    assert scheduler.rig.settle() == []
    scheduler.rig.on_batch = lambda batch: None
    scheduler.process(scheduler.decode(1))
    assert 7 in {v.expected_position for v in scheduler.rig.settle()}


def test_its_records_are_those_that_later_forwards_expect(scheduler: OverlapScheduler) -> None:
    for row in (1, 2):
        scheduler.process(scheduler.run(row, LONG))
        scheduler.process(scheduler.decode(row))
        scheduler.process(scheduler.run(row, LONG))
    assert scheduler.rig.settle() == []
    manager = scheduler.rig.manager
    assert manager.forward_ct == int(manager.state.summary[Header.FORWARD_DONE]) == 6


# What changes while the layers run


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.input_ids.clamp_(max=3),  # images, as in LLaVA
        lambda batch: batch.positions.add_(1),  # as in Gemma
        lambda batch: batch.out_cache_loc.zero_(),
        lambda batch: setattr(batch, "input_ids", batch.input_ids[:3]),
        lambda batch: setattr(batch, "out_cache_loc", batch.out_cache_loc[:3]),
        lambda batch: setattr(batch, "extend_seq_lens", batch.extend_seq_lens + 1),
        lambda batch: setattr(batch, "extend_prefix_lens_cpu", [7]),
    ],
    ids=["input_ids", "positions", "slots", "new ids", "new slots", "new lengths", "new prefixes"],
)
def test_what_a_model_changes_is_no_fault(scheduler: OverlapScheduler, change: Any) -> None:
    scheduler.rig.in_model = change
    scheduler.process(scheduler.run(1, LONG))
    scheduler.rig.in_model = lambda batch: None
    scheduler.process(scheduler.decode(1))
    assert scheduler.rig.settle() == []


def test_slots_and_row_that_are_given_back_meanwhile_are_the_next_ones(
    scheduler: OverlapScheduler,
) -> None:
    """The request is aborted while its prefill runs. On the schedule stream, another one gets all of it."""
    rig = scheduler.rig

    def give_back(_: Any) -> None:
        slots = rig.rows.req_to_token[1, :LONG].long()
        rig.allocator.free(slots)
        rig.rows.req_to_token[1, :LONG] = 0
        context.row_released(1)

    rig.in_model = give_back
    first = scheduler.run(1, LONG)
    rig.in_model, rig.lengths[1] = (lambda batch: None), 0
    scheduler.requests.clear()
    scheduler.process(first)
    for _ in range(2):
        scheduler.process(scheduler.run(1, LONG))
        scheduler.process(scheduler.decode(1))
    assert rig.settle() == []


def test_what_is_found_of_a_request_that_is_preempted_meanwhile_is_moot(
    scheduler: OverlapScheduler,
) -> None:
    """Behind a prefix HEAD reads the row, which another request has by then."""
    rig = scheduler.rig
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.process(scheduler.run(2, SHORT))

    def preempt(_: Any) -> None:
        new = rig.rows.req_to_token[1, SHORT : SHORT + LONG].long()
        rig.allocator.free(new)  # the prefix cache keeps the rest
        note(rig, SlotEventKind.FREE, new)
        rig.rows.req_to_token[1, :SHORT] = rig.rows.req_to_token[2, :SHORT].flip(0)
        rig.rows.req_to_token[1, SHORT:] = 0
        context.row_released(1)

    rig.in_model = preempt
    preempted = scheduler.run(1, LONG)
    rig.in_model, rig.lengths[1] = (lambda batch: None), 0
    scheduler.requests.pop(1)
    scheduler.process(preempted)
    assert rig.settle() == []
    assert rig.manager.violations.moot > 0  # HEAD was late, and has seen the other request's slots
    for row in (1, 2):
        scheduler.process(scheduler.run(row, LONG))
        scheduler.process(scheduler.decode(row))
    assert rig.settle() == []


# What goes wrong


def test_after_a_forward_that_raises_the_next_one_is_right(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(1, LONG))

    def fail(_: Any) -> None:
        raise RuntimeError("the model failed")

    scheduler.rig.in_model = fail
    with pytest.raises(RuntimeError, match="the model failed"):
        scheduler.run(2, LONG)
    scheduler.rig.in_model = lambda batch: None
    assert order_of(scheduler, 3, LONG) == LATE
    for row in (1, 3):
        scheduler.process(scheduler.decode(row))
    assert scheduler.rig.settle() == []
    manager = scheduler.rig.manager
    assert manager.forward_ct == int(manager.state.summary[Header.FORWARD_DONE]) == 4


def test_the_requests_are_noted_once_also_if_the_forward_raises(
    scheduler: OverlapScheduler,
) -> None:
    """The row's owner is not new in it when the forward is tried again behind what is there."""

    def fail(_: Any) -> None:
        raise RuntimeError("the model failed")

    scheduler.rig.in_model = fail
    with pytest.raises(RuntimeError):
        scheduler.run(1, LONG)
    owner = context.row_owners.of(1)
    assert (owner.prefix, owner.length) == (0, LONG)


def test_a_graph_that_is_replayed_instead_has_noted_the_requests(
    scheduler: OverlapScheduler,
) -> None:
    """Its launches are in the graph, so that nothing waits."""
    reads: list[str] = []
    scheduler.request(1).on_read = lambda: reads.append("tokens")
    rig, manager = scheduler.rig, scheduler.rig.manager
    rig._forward = lambda batch, *_: _around_forward(
        lambda *_: manager.note_replay("EXTEND"), rig, batch
    )
    scheduler.run(1, LONG)
    assert context.row_owners.of(1).length == LONG
    assert reads == []
    assert manager._single_forwards[0].phase is Phase.IDLE


def test_without_checking_nothing_waits(scheduler: OverlapScheduler) -> None:
    scheduler.rig.manager.lose_track()
    reads: list[str] = []
    scheduler.request(1).on_read = lambda: reads.append("tokens")
    scheduler.process(scheduler.run(1, LONG))
    assert (reads, scheduler.rig.settle()) == ([], [])


def test_checking_that_stops_within_the_forward_leaves_nothing(scheduler: OverlapScheduler) -> None:
    scheduler.rig.in_model = lambda batch: scheduler.rig.manager.lose_track()
    scheduler.process(scheduler.run(1, LONG))
    single = scheduler.rig.manager._single_forwards[0]
    assert (single.phase, single._waiting, single._plan) == (Phase.IDLE, None, None)


def broken(*_: Any) -> Any:
    raise RuntimeError("cannot be read")


def test_lists_that_cannot_be_read_cost_their_check_only(scheduler: OverlapScheduler) -> None:
    scheduler.process(scheduler.run(2, LONG))
    scheduler.request(1).on_read = broken
    scheduler.process(scheduler.run(1, LONG))
    scheduler.process(scheduler.decode(1))
    assert scheduler.rig.settle() == []
    manager = scheduler.rig.manager
    assert (manager.errors.total, manager.armed) == (1, True)


def test_lists_that_do_not_reach_the_device_raise_no_false_alarm(
    scheduler: OverlapScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is not told that the row has another owner, so it must not compare it with the one before."""
    scheduler.process(scheduler.run(1, SHORT))
    scheduler.rig.lengths[1] = 0
    scheduler.requests.clear()
    with monkeypatch.context() as patch:
        patch.setattr(ExpectedTokens, "from_lists", broken)
        scheduler.process(scheduler.run(1, LONG))
    scheduler.process(scheduler.decode(1))
    assert scheduler.rig.settle() == []
    assert scheduler.rig.manager.errors.total == 1


# The memory


def test_a_prefill_has_begun_when_its_inputs_are_kept(scheduler: OverlapScheduler) -> None:
    """What is loaded into slots meanwhile asks for it, see `LoadBack`."""
    state = scheduler.rig.manager.state
    warm_up_inputs(scheduler.rig.manager.launcher)
    begun = [state.last_begun()]
    scheduler.rig.in_model = lambda _: begun.append(state.last_begun())
    for row, tokens in ((1, LONG), (2, SHORT), (3, LONG)):
        scheduler.process(scheduler.run(row, tokens))
        begun.append(state.last_begun())
    assert [int(forward) for forward in begun] == [0, 1, 1, 2, 2, 3, 3]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
