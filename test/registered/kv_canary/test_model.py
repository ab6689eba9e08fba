"""Random histories: what a backend reports, stores and counts is exactly what the plain-Python oracle predicts.

One suite, three executions: the torch reference, and Triton's kernels, interpreted or, where there is a GPU, natively.
"""

from collections import Counter as Tally
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sglang.srt.kv_canary.config import ContentMode
from sglang.srt.kv_canary.record import RECORD_WORDS, WORD_WRITER, Reason
from sglang.srt.kv_canary.slot_event import SlotEventKind
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.kv_canary.backends import CUDA, INTERPRETER, REFERENCE, Backend, available_backends
from sglang.test.kv_canary.histories import (
    Alias,
    AllocatorEvent,
    Arm,
    Clear,
    Evict,
    FlipContent,
    FlipRecord,
    History,
    InputFault,
    Job,
    Move,
    Release,
    Remap,
    SetAnchor,
    Step,
    Sweep,
)
from sglang.test.kv_canary.world import CONTENT_SHAPES, WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of the space one backend explores."""

    examples: int
    operations: int  # per history


EFFORTS = {
    REFERENCE: Effort(80, 20),
    INTERPRETER: Effort(20, 10),  # a program takes milliseconds there
    CUDA: Effort(400, 24),
}

small = st.integers(0, 7)
number = st.integers(0, 255)


# -- worlds ----------------------------------------------------------------------------------------------------

shapes = st.sampled_from([name for name in CONTENT_SHAPES if name != "584 bytes"])
content_modes = st.sampled_from([ContentMode.ALL, ContentMode.PARTIAL])
index_dtypes = st.sampled_from([torch.int64, torch.int32])
specs = st.builds(
    WorldSpec,
    num_slots=st.sampled_from([64, 40, 96]),
    context_len=st.sampled_from([40, 24]),
    has_v=st.booleans(),
    k_shapes=shapes,
    v_shapes=shapes,
    content_mode=content_modes,
    swa_slots=st.sampled_from([0, 0, 32, 48]),
    has_draft=st.sampled_from([False, False, False, True]),
    window=st.sampled_from([1, 4, 9]),
    token_offset=st.sampled_from([0, 0, 1]),
    page_size=st.sampled_from([1, 1, 4]),
    verify_budget_slots=st.sampled_from([1 << 18, 512, 1]),
    content_budget_bytes=st.sampled_from([1 << 24, 256, 1]),
    index_dtype=index_dtypes,
    lut_dtype=index_dtypes,
)
# A prefix of more than one block of 256 slots, and a small budget: blocks rotate within a request.
long_specs = st.builds(
    WorldSpec,
    num_slots=st.just(1024),
    request_rows=st.just(4),
    context_len=st.just(700),
    k_shapes=st.just("584 bytes"),
    v_shapes=st.just("none"),
    content_mode=st.just(ContentMode.PARTIAL),
    swa_slots=st.sampled_from([0, 600]),
    window=st.sampled_from([260, 300]),
    verify_budget_slots=st.sampled_from([1 << 18, 768, 256]),
    content_budget_bytes=st.sampled_from([4096, 1 << 14]),
)


# -- operations ------------------------------------------------------------------------------------------------


def jobs(most_tokens: int = 9):
    job = st.builds(Job, row=small, count=st.integers(0, most_tokens), donor=small, share=number)
    return st.lists(job, min_size=1, max_size=4).map(tuple)


def steps(*, faulty: bool, most_tokens: int = 9):
    faults, during = st.just(()), st.just(())
    if faulty:
        what = st.sampled_from(["token", "position", "out_slot", "known", "row", "length"])
        fault = st.builds(InputFault, what=what, index=number, value=number, kind=small)
        faults = st.one_of(st.just(()), st.lists(fault, min_size=1, max_size=2).map(tuple))
        during = st.one_of(st.just(()), st.lists(damage, min_size=1, max_size=2).map(tuple))
    return st.builds(
        Step,
        jobs=jobs(most_tokens),
        style=st.sampled_from(["ragged", "ragged", "decode", "verify", "tree"]),
        tokens_each=st.integers(1, 4),
        parents=st.lists(small, max_size=4).map(tuple),
        already_verified=st.sampled_from([False] * 7 + [True]),
        padding=st.sampled_from([0, 0, 1, 3]),
        known=st.sampled_from(["none", "tail", "all"]),
        ending=st.sampled_from(["full"] * 8 + ["no content", "aborted"]),
        seed=number,
        faults=faults,
        during=during,
        before_content=during,
    )


flips = st.builds(
    FlipRecord,
    group=small,
    half=small,
    side=small,
    slot=number,
    word=st.integers(0, RECORD_WORDS - 1),
    bit=st.integers(0, 63),
)
state_flips = st.builds(
    FlipRecord,
    group=small,
    half=small,
    side=small,
    slot=number,
    word=st.just(WORD_WRITER),
    bit=st.integers(60, 63),
)
content_flips = st.builds(
    FlipContent, group=small, half=small, source=small, slot=number, byte=number, bit=small
)
aliases = st.builds(Alias, row=small, position=number, value=number, kind=small)
remaps = st.builds(Remap, slot=number, value=number, kind=small)
damage = st.one_of(flips, state_flips, content_flips, aliases, remaps)


def events(*kinds: SlotEventKind):
    slots = st.lists(st.integers(0, 110), min_size=1, max_size=6).map(tuple)
    return st.builds(AllocatorEvent, slots=slots, group=small, event=st.sampled_from(kinds))


odd_entries = st.lists(st.tuples(small, st.integers(1, 255)), max_size=3).map(tuple)


calm = {
    st.builds(Release, row=small): 2,
    st.builds(Evict, row=small): 2,
    st.builds(Move, row=small, position=number): 2,
    st.builds(Sweep, group=small): 2,
    events(SlotEventKind.UNFILL): 1,
    st.just(Clear()): 1,
}
trouble = {
    damage: 8,
    events(SlotEventKind.FREE, SlotEventKind.ALLOC): 2,
    st.builds(Release, row=small, careless=st.just(True)): 1,
    st.builds(Evict, row=small, careless=st.just(True)): 1,
    st.builds(Move, row=small, position=number, careless=st.just(True)): 1,
    st.builds(Sweep, group=small, odd=odd_entries): 2,
    st.builds(SetAnchor, row=small, value=st.integers(-(1 << 63), (1 << 63) - 1)): 1,
    st.just(Clear(careless=True)): 1,
    st.builds(Arm, armed=st.sampled_from([True, True, False])): 1,
}


@st.composite
def operations(draw, most: int, *, faulty: bool):
    """`most` operations or fewer: half of them forwards, with everything that happens in between."""
    weights = {
        None: 1,
        steps(faulty=False): 10,
        **calm,
        **({steps(faulty=True): 10, **trouble} if faulty else {}),
    }
    choices = [strategy for strategy, weight in weights.items() for _ in range(weight)]
    picks = draw(st.lists(st.sampled_from(choices), min_size=most, max_size=most))
    return [draw(pick) for pick in picks if pick is not None]


# -- the tests -------------------------------------------------------------------------------------------------


def effort_of(backend: Backend, share: float = 1.0) -> Effort:
    effort = EFFORTS[backend]
    return Effort(max(2, int(effort.examples * share)), effort.operations)


def explore(effort: Effort):
    """The same examples in every run; without a database, so that a checkout holds all that a run needs."""
    return settings(
        max_examples=effort.examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        print_blob=False,
    )


@pytest.fixture(params=available_backends(), ids=lambda b: b.name)
def backend(request) -> Backend:
    return request.param


def started(spec: WorldSpec, backend: Backend) -> History:
    """A history after warm-up: forwards that nothing checks, a flush, armed."""
    history = History(spec, backend)
    assert history.apply(Step(jobs=(Job(0, 3), Job(1, 2)))) == []
    assert history.apply(Step(jobs=(Job(0), Job(1)), style="decode", padding=1)) == []
    history.apply(Clear())
    history.apply(Arm(True))
    return history


def test_every_prediction_comes_true(backend):
    """Faults included: rows, records and counters equal the oracle's after each operation."""
    seen: Tally[Reason] = Tally()
    effort = effort_of(backend)

    @explore(effort)
    @given(spec=specs, ops=operations(effort.operations, faulty=True))
    def run(spec, ops):
        history = started(spec, backend)
        history.run(ops)
        seen.update(history.reasons_seen)

    run()
    if effort.examples >= 80:
        assert set(seen) == set(Reason), "the histories no longer reach every check"


def test_no_fault_no_violation(backend):
    """Sharing, chunks, decodes, padding, aborts, frees, evictions, moves, flushes and sweeps are silent."""
    effort = effort_of(backend, 0.5)

    @explore(effort)
    @given(spec=specs, ops=operations(effort.operations, faulty=False))
    def run(spec, ops):
        history = started(spec, backend)
        for op in ops:
            assert history.apply(op) == [], f"false alarm after {op}"

    run()


def test_long_prefixes_rotate_exactly(backend):
    """Prefixes of several blocks, budgets below them: the oracle knows which blocks each forward checks."""
    effort = effort_of(backend, 0.1)

    @explore(effort)
    @given(
        spec=long_specs,
        first=st.integers(250, 600),
        damages=st.lists(flips, min_size=1, max_size=4),
        decodes=st.integers(1, 4),
    )
    def run(spec, first, damages, decodes):
        history = started(spec, backend)
        history.apply(Step(jobs=(Job(0, first), Job(1, 40))))
        for op in damages:
            history.apply(op)
        for _ in range(decodes):
            history.apply(Step(jobs=(Job(0), Job(1)), style="decode"))

    run()


def test_a_full_ring_keeps_the_newest_rows_and_counts_all(backend):
    history = started(WorldSpec(ring_capacity=8), backend)
    history.apply(Step(jobs=(Job(0, 12), Job(1, 3))))
    for position in range(12):
        history.apply(Alias(row=0, position=position, value=0, kind=1))
    rows = history.apply(Step(jobs=(Job(0),), style="decode"))
    assert len(rows) == 12 * 4  # HEAD and TAIL of K and V
    assert history.world.take_rows() == []
    assert len({row[0] for row in history.world.state.violations.rows.tolist()}) == 8
