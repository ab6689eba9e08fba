"""What a CUDA graph captures of a forward: what is in line, and what is on the second branch, and after what."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary import record
from sglang_kv_canary.config import CanaryMode, ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels.reference.hashing import state_of
from sglang_kv_canary.launch.launcher import Launcher
from sglang_kv_canary.plan.plan_input import ForwardPlan, VerifyPlan, WritePlan
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import State
from sglang_kv_canary.single_forward_manager import BesideLayers
from sglang_kv_canary.single_forward_manager import manager as captured
from sglang_kv_canary.single_forward_manager.graph_branch import GraphBranch
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=60, suite="stage-b-test-1-gpu-small")

BESIDE = Part.VERIFY
REST = Part.ALL & ~Part.VERIFY
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


class _Branch:
    """Stands in for GraphBranch: a CPU has no streams. Notes what would depend on what."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self._open = log, False

    def point(self) -> int:
        self.log.append("point")
        return len(self.log)

    @contextmanager
    def after(self, point: int) -> Iterator[None]:
        self.log.append(("branch", point))
        self._open = True
        yield  # after an error nothing more is noted
        self.log.append("main")

    def join(self) -> None:
        if self._open:
            self.log.append("join")
        self._open = False


class Rig:
    """A rig whose captures are noted in `log` instead of being run.

    `change`: what the model does to its batch. `lm_head`: what it does after the layers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.rig = rig = ManagerRig(content=ContentMode.ALL, **settings)
        self.log: list[Any] = []
        self.change = lambda batch: None
        self.lm_head = lambda: None
        self.ends = True  # the model says where its layers end
        self.single = rig.manager._single_forwards[0]
        self.single._branch = _Branch(self.log)
        self._capturing, self._batch, self._patch = False, None, monkeypatch
        rig.result(rig.extend(1, range(20)))
        rig.on_batch = self._note_batch
        self._layers = rig._model
        rig._model = self._model

    def _note_batch(self, batch: Any) -> None:
        self._batch = batch

    def _model(self, slots: torch.Tensor) -> None:
        if self._capturing:
            self.log.append("layers")
        else:
            self._layers(slots)
        self.change(self._batch)
        if self.ends:
            self.rig.manager.layers_have_run()
        self.lm_head()
        if self._capturing:
            self.log.append("LM head")

    def warm_up(self) -> None:
        """A forward as SGLang runs it before it captures."""
        with self.rig.manager.disarmed():
            self.rig.decode([1])
        self.rig.lengths[1] -= 1

    def capture(self, mode: str = "decode") -> list[Any]:
        """What is captured of a forward, in order."""
        self.log.clear()
        self._capturing = True
        try:
            with self._patch.context() as patch, self.rig.manager.disarmed():
                patch.setattr(captured, "is_capturing", lambda: True)
                patch.setattr(Launcher, "launch", self._launch)
                patch.setattr(Launcher, "publish", lambda _: self.log.append("publish"))
                if mode == "decode":
                    self.rig.decode([1])
                elif mode == "verify":
                    self.rig.verify(1, [7, 8])
                else:
                    self.rig.extend(2, range(5))
        finally:
            self._capturing = False
        return list(self.log)

    def _launch(self, plan: ForwardPlan, side: Side, part: Part = Part.ALL) -> None:
        if plan.parts(side, part):
            self.log.append((side.value, part))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    return functools.partial(Rig, monkeypatch)


WHOLE = [
    "point",
    "layers",
    "point",
    "LM head",
    ("branch", 1),
    ("HEAD", Part.ALL),
    ("TAIL", BESIDE),
    "main",
    ("branch", 3),
    ("TAIL", REST),
    "publish",
    "main",
    "join",
]


END_UNKNOWN = [
    *("point", "layers", "LM head"),
    *(("branch", 1), ("HEAD", Part.ALL), ("TAIL", BESIDE), "main", "join"),
    *(("TAIL", REST), "publish"),
]


@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_nothing_is_in_line(rig: Any, mode: str) -> None:
    """HEAD and TAIL's check begin with the layers, the rest once these have run. All of it is captured at the end."""
    of = rig()
    of.warm_up()
    assert of.capture(mode) == WHOLE


def test_where_the_end_of_the_layers_is_unknown_tail_comes_after_the_forward(rig: Any) -> None:
    of = rig()
    of.ends = False
    of.warm_up()
    assert of.capture() == END_UNKNOWN


def test_beside_collectives_only_the_lm_head_has_a_branch(rig: Any) -> None:
    of = rig(beside_layers=BesideLayers.NOTHING)
    of.warm_up()
    assert of.capture() == [
        *(("HEAD", Part.ALL), "layers", "point", "LM head"),
        *(("branch", 3), ("TAIL", Part.ALL), "publish", "main", "join"),
    ]
    of.ends = False
    assert of.capture() == [
        *(("HEAD", Part.ALL), "layers", "LM head"),
        *(("TAIL", Part.ALL), "publish"),
    ]


IN_LINE = [
    ("HEAD", Part.ALL),
    *[
        (entry[0], entry[1] + 1) if entry[0] == "branch" else entry
        for entry in WHOLE
        if entry != ("HEAD", Part.ALL)
    ],
]


@pytest.mark.parametrize("name", ["positions", "input_ids", "out_cache_loc", "seq_lens"])
def test_a_model_that_changes_its_inputs_gets_head_before_the_layers(rig: Any, name: str) -> None:
    of = rig()
    of.warm_up()
    of.change = lambda batch: getattr(batch, name).add_(0)
    of.warm_up()
    of.change = lambda batch: None
    of.warm_up()  # one change is enough
    assert of.capture() == IN_LINE


def test_loads_of_hicache_must_know_that_a_forward_has_begun(rig: Any) -> None:
    """HEAD says it, so it is in line there."""
    of = rig(beside_layers=BesideLayers.CHECK)
    of.warm_up()
    assert of.capture() == IN_LINE


def test_a_change_that_torch_does_not_count_shows_in_the_values(rig: Any) -> None:
    of = rig()
    of.change = lambda batch: np.add(batch.positions.numpy(), 1, out=batch.positions.numpy())
    of.warm_up()
    assert of.capture() == IN_LINE


def test_until_a_forward_has_been_watched_head_is_before_the_layers(rig: Any) -> None:
    """Torch counts no changes of tensors that were made in inference mode."""
    of = rig()
    assert of.capture() == IN_LINE
    with torch.inference_mode():
        of.warm_up()
    assert of.capture() == IN_LINE
    of.warm_up()
    assert of.capture() == WHOLE


def test_a_change_that_only_the_captured_forward_makes_ends_the_capture(rig: Any) -> None:
    of = rig(mode=CanaryMode.RAISE)
    of.warm_up()
    of.change = lambda batch: batch.positions.add_(1)
    with pytest.raises(RuntimeError, match="changed its inputs in place"):
        of.capture()
    of.change = lambda batch: None
    assert of.capture() == IN_LINE


def test_an_error_on_the_branch_joins_it(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the capture would end with an open branch, and with it a server in mode `log`."""
    of = rig()
    of.warm_up()

    def fail(*_: Any) -> None:
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(of, "_launch", fail)
    of.capture()
    assert of.log[-2:] == [("branch", 1), "join"]
    assert not of.rig.manager.checking


def test_a_capture_that_failed_leaves_nothing_for_the_next_one(rig: Any) -> None:
    of = rig()
    of.warm_up()

    def fail() -> None:
        raise RuntimeError("the model failed")

    of.lm_head = fail
    with pytest.raises(RuntimeError, match="the model failed"):
        of.capture()
    of.ends, of.lm_head = False, lambda: None
    assert of.capture() == END_UNKNOWN
    of.ends = True
    assert of.capture() == WHOLE


def test_prefills_have_no_branch(rig: Any) -> None:
    of = rig()
    of.warm_up()
    assert of.capture("extend") == [
        *(("HEAD", Part.ALL), "layers", "LM head"),
        *(("TAIL", Part.ALL), "publish"),
    ]


def test_outside_of_forwards_the_end_of_layers_means_nothing(rig: Any) -> None:
    of = rig()
    of.warm_up()
    of.rig.manager.layers_have_run()
    of.ends = False
    assert of.capture() == END_UNKNOWN


def test_inner_steps_of_drafts(rig: Any) -> None:
    """The first one verifies, and writes scratch that has no TAIL. Further ones only write. None is published."""
    of = rig()
    target = of.single._plan_input
    of.single._plan_input = replace(target, is_draft=True)
    of.warm_up()
    assert of.capture() == [
        *("point", "layers", "point", "LM head"),
        *(("branch", 1), ("HEAD", Part.ALL), ("TAIL", Part.VERIFY | Part.NUMBER), "main", "join"),
    ]
    of.single._plan_input = replace(target, is_draft=True, inner_step=1)
    assert of.capture() == [("HEAD", Part.ALL), "layers", "LM head"]


def test_slots_of_a_draft_step_are_copied_before_the_branch() -> None:
    """They lie apart. The branch must not allocate: the memory could be that of a side stream of the model."""
    slots = torch.arange(12).view(3, 4)[:, 0]
    positions = torch.arange(3)
    write = WritePlan(positions, positions, slots, None, None)
    verify = VerifyPlan(positions, positions, 0)
    plan = ForwardPlan(verify, write, torch.zeros((4, 8), dtype=torch.int32), row_growth=2)
    dense = plan.dense()
    assert dense.write.out_cache_loc.is_contiguous()
    assert dense.write.out_cache_loc.tolist() == slots.tolist()
    assert dense.write.positions is positions
    assert (dense.row_growth, dense.req_to_token) == (2, plan.req_to_token)


# On a GPU


class _Graph:
    """A decode of rows 1 and 2, captured as SGLang does, with a model that counts its positions up if `changes`."""

    def __init__(self, changes: bool = False) -> None:
        self.rig = rig = ManagerRig(device="cuda", content=ContentMode.ALL)
        self._changes = changes
        for row in (1, 2):
            rig.result(rig.extend(row, range(20)))
        self.slots = rig.allocator.alloc(2)
        rig.rows.req_to_token[[1, 2], 20] = self.slots.int()
        self.batch = rig._batch(ForwardMode.DECODE, [1, 2], [27, 27], [20, 20], self.slots)
        self.batch.seq_lens = torch.tensor([21, 21], device="cuda")
        shape = (len(self.slots), rig.pool.head_num, rig.pool.head_dim)
        self._bytes = torch.randn(shape, device="cuda", dtype=rig.pool.dtype)
        self.graph = torch.cuda.CUDAGraph()
        with rig.manager.disarmed():
            for _ in range(2):
                self._forward()
            with torch.cuda.graph(self.graph):
                self._forward()
        self.batch.positions.fill_(20)

    def _forward(self) -> None:
        pool = self.rig.pool
        with self.rig.manager.bracket_model_forward(self.batch):
            if self._changes:
                self.batch.positions += 1
            for layer in range(pool.layer_num):
                pool.k_buffer[layer][self.slots] = self._bytes
                pool.v_buffer[layer][self.slots] = self._bytes
            self.rig.manager.layers_have_run()
            self._bytes.mul_(1)  # an LM head

    def replay(self) -> list[Any]:
        """What is reported."""
        manager = self.rig.manager
        step = self.rig.recorder.begin_step((r, f"req-{r}") for r in (1, 2))
        with manager.with_ops_outside_graph(maybe_inaccurate_forward_batch=self.batch):
            manager.note_replay("DECODE")
            self.graph.replay()
        self.rig.recorder.end_step()
        self.rig.result(step)
        return self.rig.settle()


@needs_gpu
@pytest.mark.parametrize("changes", [False, True])
def test_a_replay_writes_and_finds_nothing(changes: bool) -> None:
    of = _Graph(changes)
    before = of.rig.manager.forward_ct
    assert of.replay() == []
    assert of.rig.manager.forward_ct == before + 1
    (group,) = of.rig.manager.groups
    for records in (group.k_head, group.k_tail, group.v_tail):
        assert (state_of(records[of.slots, record.WORD_WRITER].cpu()) == State.LIVE).all()
    assert (group.v_tail[of.slots, record.WORD_CONTENT] != 0).all()


@needs_gpu
@pytest.mark.parametrize("what", ["record", "byte"])
def test_a_replay_finds_damage(what: str) -> None:
    of = _Graph()
    slot = of.rig.slot(1, 3)
    (group,) = of.rig.manager.groups
    if what == "record":
        group.k_head[slot, 0] ^= 1
        group.k_tail[slot, 0] ^= 1
    else:
        of.rig.pool.k_buffer[0][slot] += 1
    found = {(v.tag, reason) for v in of.replay() for reason in v.reasons}
    sides = {tag.split("_")[0] for tag, _ in found}
    assert sides == ({"HEAD", "TAIL"} if what == "record" else {"TAIL"})
    assert what == "record" or {reason for _, reason in found} == {"CONTENT"}


@needs_gpu
def test_a_branch_begins_at_its_point_and_ends_at_the_join() -> None:
    clocks = 20_000_000
    branch, graph = GraphBranch(), torch.cuda.CUDAGraph()
    source, copy, after, late = torch.zeros(4, 1, device="cuda").unbind()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(clocks)
        source.fill_(1)
        point = branch.point()
        late.fill_(5)
        with branch.after(point):
            copy.copy_(source)
            torch.cuda._sleep(clocks)
            copy.add_(1)
        branch.join()
        after.copy_(copy)
    graph.replay()
    torch.cuda.synchronize()
    assert (float(copy), float(after), float(late)) == (2, 2, 5)
