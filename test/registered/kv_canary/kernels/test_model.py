"""Random histories: what a backend reports, stores and counts is exactly what the plain-Python oracle predicts.

One suite, three executions: the NumPy reference, and Triton's kernels, interpreted or, where there is a GPU, natively.
"""

import sys
from collections import Counter as Tally
from dataclasses import dataclass, replace
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.record import RECORD_WORDS, WORD_WRITER, Reason
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary_rigs.backends import CUDA, INTERPRETER, REFERENCE, Backend, available_backends
from sglang_kv_canary_rigs.histories import (
    Alias,
    AllocatorEvent,
    AllocatorRuns,
    Arm,
    Clear,
    Evict,
    FlipContent,
    FlipRecord,
    History,
    InputFault,
    Job,
    Move,
    MovePage,
    Release,
    Remap,
    SetAnchor,
    Step,
    SwapRows,
    Sweep,
    UpdateWeights,
)
from sglang_kv_canary_rigs.volume import volume
from sglang_kv_canary_rigs.world import WorldSpec

# numpy's word on how Triton's interpreter turns its 0-d values into integers
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of the space one backend explores."""

    examples: int  # per kind of world
    operations: int  # per history


EFFORTS = {
    REFERENCE: Effort(volume(8, 30), 20),
    INTERPRETER: Effort(4, 10),  # a program takes milliseconds there
    CUDA: Effort(30, 40),
}

small = st.integers(0, 7)
number = st.integers(0, 255)


# -- worlds ----------------------------------------------------------------------------------------------------

# Of K and of V: with words of the same size and not, on pages and not, without content. Each pair costs a GPU a
# compilation of the content kernels, so that not all pairs are here.
SHAPES = [
    ("two layers", "two layers"),
    ("three sectors", "paged"),
    ("paged", "odd bytes"),
    ("odd bytes", "none"),
    ("none", "three sectors"),
    ("interleaved", "two layers"),
    ("moving", "moving"),
    ("odd bytes", "moving"),
]
content_modes = st.sampled_from([ContentMode.ALL, ContentMode.PARTIAL])
index_dtypes = st.sampled_from([torch.int64, torch.int32])


def worlds(**changes):
    """Worlds of one kind: `changes` fixed, the rest drawn."""
    fields = {
        "num_slots": st.sampled_from([64, 42, 96]),  # 42: the last page of 4 is not whole
        "context_len": st.sampled_from([40, 24, 12]),
        "has_v": st.booleans(),
        "content_mode": content_modes,
        "window": st.sampled_from([1, 4, 9]),
        "token_offset": st.sampled_from([0, 0, 1]),
        "verify_budget_slots": st.sampled_from([1 << 18, 512, 1]),
        "content_budget_bytes": st.sampled_from([1 << 24, 4096, 256, 1]),
        "index_dtype": index_dtypes,
        "lut_dtype": index_dtypes,
    }
    spec = st.builds(WorldSpec, **fields | {k: st.just(v) for k, v in changes.items()})
    return st.builds(_with_shapes, spec, st.sampled_from(SHAPES))


def _with_shapes(spec: WorldSpec, shapes: tuple[str, str]) -> WorldSpec:
    return replace(spec, k_shapes=shapes[0], v_shapes=shapes[1])


WORLDS = {
    "full": worlds(),
    "pages": worlds(page_size=4),
    "swa": worlds(swa_slots=48),
    "swa-pages": worlds(swa_slots=32, page_size=4),
    "draft": worlds(has_draft=True, token_offset=1),
    "strided": worlds(page_size=4, stride=4),
    "strided-swa": worlds(page_size=8, stride=4, swa_slots=48),
    "strided-by-two": worlds(page_size=4, stride=2, swa_slots=32),
}
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
    content_budget_bytes=st.sampled_from([4096, 1 << 16]),
)


# -- operations ------------------------------------------------------------------------------------------------


def jobs(most_tokens: int = 9):
    job = st.builds(Job, row=small, count=st.integers(0, most_tokens), donor=small, share=number)
    return st.lists(job, min_size=1, max_size=4).map(tuple)


def steps(*, faulty: bool, most_tokens: int = 9):
    faults, during = st.just(()), st.just(())
    if faulty:
        what = st.sampled_from(
            ["token", "position", "out_slot", "location", "known", "start", "row", "length"]
        )
        index = st.one_of(st.just(0), number)  # often several faults of one token
        fault = st.builds(InputFault, what=what, index=index, value=number, kind=small)
        faults = st.one_of(st.just(()), st.lists(fault, min_size=1, max_size=3).map(tuple))
        during = st.one_of(st.just(()), st.lists(damage, min_size=1, max_size=2).map(tuple))
    return st.builds(
        Step,
        jobs=jobs(most_tokens),
        style=st.sampled_from(["ragged", "ragged", "decode", "verify", "tree"]),
        tokens_each=st.integers(1, 4),
        parents=st.lists(small, max_size=4).map(tuple),
        already_verified=st.sampled_from([False] * 7 + [True]),
        padding=st.sampled_from([0, 0, 1, 3]),
        stale=st.booleans(),
        locates=st.sampled_from([True, True, False]),
        known=st.sampled_from(["none", "tail", "all"]),
        ending=st.sampled_from(["full"] * 8 + ["no content", "aborted"]),
        seed=number,
        samples=st.booleans(),
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
writer_flips = st.builds(
    FlipRecord,
    group=small,
    half=small,
    side=small,
    slot=number,
    word=st.just(WORD_WRITER),
    bit=st.one_of(st.integers(52, 63), st.integers(0, 63)),
)
content_flips = st.builds(
    FlipContent, group=small, half=small, source=small, slot=number, byte=number, bit=small
)
aliases = st.builds(Alias, row=small, position=number, value=number, kind=small)
remaps = st.builds(Remap, slot=number, value=number, kind=small)
swaps = st.builds(SwapRows, row=small, other=small)
damage = st.one_of(flips, writer_flips, content_flips, aliases, remaps, swaps)


def events(*kinds: SlotEventKind, careless: bool = False):
    slots = st.lists(number, min_size=1, max_size=6).map(tuple)
    event, how, calls = st.sampled_from(kinds), st.just(careless), st.integers(1, 3)
    return st.builds(
        AllocatorEvent, slots=slots, group=small, event=event, careless=how, calls=calls
    )


turns = events(SlotEventKind.FREE, SlotEventKind.ALLOC)  # more of them than one launch holds
allocator_runs = st.builds(AllocatorRuns, st.lists(turns, min_size=2, max_size=8).map(tuple), small)

odd_entries = st.lists(st.tuples(small, st.one_of(small, number)), max_size=3).map(tuple)


calm = {
    st.builds(Release, row=small): 2,
    st.builds(Evict, row=small): 2,
    st.builds(Move, row=small, position=number): 2,
    st.builds(MovePage, group=small, page=number, value=number): 2,
    st.builds(Sweep, group=small): 2,
    events(SlotEventKind.UNFILL): 1,
    st.just(Clear()): 1,
}
trouble = {
    damage: 8,
    events(SlotEventKind.FREE, SlotEventKind.ALLOC): 2,
    allocator_runs: 3,
    events(SlotEventKind.UNFILL, careless=True): 1,
    st.builds(Release, row=small, careless=st.just(True)): 1,
    st.builds(Evict, row=small, careless=st.just(True)): 1,
    st.builds(Move, row=small, position=number, careless=st.just(True)): 1,
    st.builds(MovePage, group=small, page=number, value=number, kind=small): 2,
    st.builds(Sweep, group=small, odd=odd_entries): 2,
    st.builds(SetAnchor, row=small, value=st.integers(-(1 << 63), (1 << 63) - 1)): 1,
    st.just(Clear(careless=True)): 1,
    st.just(UpdateWeights()): 2,
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


def explore(name: str, examples: int):
    """The same examples in every run, others for every name; a checkout holds all that a run needs."""
    chosen = settings(
        max_examples=max(2, examples),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        print_blob=False,
    )
    return lambda test: seed(crc32(name.encode()))(chosen(test))


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


SEEN: dict[Backend, Tally[Reason]] = {}
EXPLORED: dict[Backend, set[str]] = {}


@pytest.mark.parametrize("world", WORLDS)
def test_every_prediction_comes_true(backend, world):
    """Faults included: rows, records and counters equal the oracle's after each operation."""
    effort, seen = EFFORTS[backend], SEEN.setdefault(backend, Tally())

    @explore(world, effort.examples)
    @given(spec=WORLDS[world], ops=operations(effort.operations, faulty=True))
    def run(spec, ops):
        history = started(spec, backend)
        history.run(ops)
        seen.update(history.reasons_seen)

    run()
    EXPLORED.setdefault(backend, set()).add(world)


@pytest.mark.parametrize(
    "backend", [b for b in available_backends() if b is not INTERPRETER], ids=lambda b: b.name
)
def test_the_histories_reach_every_check(backend):
    if EXPLORED.get(backend) != set(WORLDS):
        pytest.skip("not all worlds were explored in this run")
    assert set(SEEN[backend]) == set(Reason)


@pytest.mark.parametrize("world", WORLDS)
def test_no_fault_no_violation(backend, world):
    """Sharing, chunks, decodes, padding, aborts, frees, evictions, moves, flushes and sweeps are silent."""
    effort = EFFORTS[backend]

    @explore(world, effort.examples // 2)
    @given(spec=WORLDS[world], ops=operations(effort.operations, faulty=False))
    def run(spec, ops):
        history = started(spec, backend)
        for op in ops:
            assert history.apply(op) == [], f"false alarm after {op}"

    run()


def test_long_prefixes_rotate_exactly(backend):
    """Prefixes of several blocks, budgets below them: the oracle knows which blocks each forward checks."""

    @explore("long", EFFORTS[backend].examples // 2)
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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
