"""Brackets one forward: operations before and after it, outside and inside the CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..endpoint import Part
from ..errors import CanaryUnseenForwardError
from ..launch.launcher import Launcher, invoke_plan, is_capturing, launch_endpoints_per_forward
from ..plan.expected_inputs import ExpectedLater, ExpectedTokens
from ..plan.kept_inputs import KeptInputs
from ..plan.plan_input import ForwardPlan, PlanInput
from ..pool_kind import Side
from .beside import BesideLayers
from .graph_branch import GraphBranch
from .input_watch import InputWatch
from .late_work import LateWork
from .phases import Phase, PhaseTracker

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_ALL_BUT_NEW_CONTENT = Part.ALL & ~Part.NEW_CONTENT


class SingleForwardManager:
    """Phases and launches of one forward (of one inner step, for draft models).

    `on_launch(mode)` is called once for each numbered forward whose launches really run, not for captures.
    `is_armed()` says whether forwards are checked yet. `late` may leave HEAD, or a part of TAIL, for later.
    `beside_layers`: what of captured graphs runs on a second branch while the layers run. The rest of TAIL runs on that
    branch beside what follows the layers, if their end is known.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan_input: PlanInput,
        on_launch: Callable[[str], object],
        is_armed: Callable[[], bool],
        late: LateWork,
        beside_layers: BesideLayers = BesideLayers.HEAD_AND_CHECK,
    ) -> None:
        self._launcher = launcher
        self._plan_input = plan_input
        self._is_numbered = plan_input.numbers_forwards
        self._on_launch = on_launch
        self._is_armed = is_armed
        self._late = late
        self._beside_layers = beside_layers
        self._phases = PhaseTracker()
        self._plan: ForwardPlan | None = None
        self._waiting: tuple[KeptInputs, str] | None = None  # HEAD's inputs and mode, if it waits
        self._expected: ExpectedTokens | ExpectedLater | None = None
        self._mode: str | None = None
        self._branch = GraphBranch()
        self._watch = InputWatch()
        self._tail_parts: tuple[Part, ...] = (Part.ALL,)  # launches of this forward's TAIL
        # Of a captured forward: where its branch begins, whether HEAD is on it, and where its layers end
        self._beginning: torch.cuda.Event | None = None
        self._head_is_beside = False
        self._end_of_layers: torch.cuda.Event | None = None
        self._disarmed = False

    @property
    def phase(self) -> Phase:
        return self._phases.phase

    def pre_ops_outside_graph(
        self, expected: ExpectedTokens | ExpectedLater | None = None, mode: str | None = None
    ) -> None:
        """Before the forward. `expected`: the host's own tokens for it; `mode`: the scheduler's mode; if known.

        `expected` may be a function that works them out. Then HEAD may run after the layers.
        """
        self._phases.enter(Phase.PRE_OUTSIDE)
        self._expected, self._mode = expected, mode

    def pre_ops_maybe_inside_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan, then verify and write HEAD, or keep what HEAD needs later. May be under stream capture."""
        if self._phases.phase is Phase.IDLE:
            self._refuse_unseen("model.forward ran")
        self._phases.enter(Phase.PRE_INSIDE)
        self._waiting = None
        capturing = is_capturing()
        # A piecewise graph runs a mixed batch as an EXTEND.
        mode = self._mode or forward_batch.forward_mode.name
        if callable(self._expected) and not capturing and self._is_armed():
            inputs = self._late.take_head(forward_batch)
            if inputs is not None:
                self._waiting = inputs, mode
                return
        # The host's tokens are of one forward, and a graph serves all.
        expected = None if capturing else self._known()
        self._plan = invoke_plan(self._plan_input, forward_batch, expected)
        if self._plan is not None:
            self._plan = self._launch_head(self._plan, mode, capturing)

    def _refuse_unseen(self, what: str) -> None:
        """Raises CanaryUnseenForwardError if the forward is checked: nobody has applied the allocators' events."""
        if self._is_armed():
            raise CanaryUnseenForwardError(f"{what} outside of a forward that the canary has seen")

    def _known(self) -> ExpectedTokens | None:
        """What is expected, worked out once."""
        if callable(self._expected):
            self._expected = self._expected()
        return self._expected

    def _launch_head(self, plan: ForwardPlan, mode: str, capturing: bool = False) -> ForwardPlan:
        """Or leave it for the branch. Returns the plan for what follows."""
        if self._late.events is not None and not capturing:  # a graph would apply them each time
            self._late.apply_events()
        if not capturing and plan.parts(Side.HEAD, Part.NUMBER):
            self._on_launch(mode)
        # Disarmed forwards run before a capture, and compile the kernels that it will hold.
        disarmed = self._disarmed = not capturing and not self._is_armed()
        self._tail_parts = (Part.ALL,)
        may_branch = (capturing or disarmed) and self._beside_layers is not BesideLayers.NOTHING
        if may_branch and _can_branch(plan):
            beside = plan.tail_beside_the_layers
            self._tail_parts = beside, Part.ALL & ~beside
        branches = capturing and len(self._tail_parts) > 1
        may_wait = self._beside_layers is BesideLayers.HEAD_AND_CHECK and self._watch.inputs_stay
        self._head_is_beside = branches and may_wait
        if disarmed:
            self._compile_ahead(plan)
        if disarmed or self._head_is_beside:
            self._watch.begin(plan, values=disarmed)
        if capturing:
            plan = plan.dense()  # the branch must not allocate memory
        if not self._head_is_beside:
            launch_endpoints_per_forward(self._launcher, plan, Side.HEAD)
        if branches:
            self._beginning = self._branch.point()
        return plan

    def _compile_ahead(self, plan: ForwardPlan) -> None:
        """All launches of this forward at once, and for all smaller batches, of which a graph is captured next."""
        with self._launcher.backend.compiling_ahead(smaller_batches=True) as compiles:
            if compiles:
                launch_endpoints_per_forward(self._launcher, plan, Side.HEAD)
                self._launch_tail(plan, self._tail_parts)

    def layers_have_run(self) -> None:
        """The layers have been captured. What follows them has not, such as the LM head: TAIL runs beside it."""
        if self._plan is not None and _can_branch(self._plan) and is_capturing():
            self._end_of_layers = self._branch.point()

    def post_ops_maybe_inside_graph(self) -> None:
        """Verify and write TAIL, after HEAD if that has waited. May be under stream capture."""
        self._phases.enter(Phase.POST_INSIDE)
        plan, self._plan = self._plan, None
        if self._waiting is not None:
            plan = self._launch_late_head(*self._waiting)
        if plan is None:
            return
        if is_capturing():
            self._capture_tail(plan)
            return
        if self._disarmed:
            self._watch.end()
        now = _ALL_BUT_NEW_CONTENT if self._late.take_content(plan) else Part.ALL
        self._launch_tail(plan, self._tail_parts, now)

    def _capture_tail(self, plan: ForwardPlan) -> None:
        """On the branch as far as may be, and HEAD before it where it has been left for the branch."""
        beginning, end = self._beginning, self._end_of_layers
        self._beginning = self._end_of_layers = None
        rest = self._tail_parts[-1]
        if not plan.parts(Side.TAIL, rest):
            end = None
        try:
            if beginning is not None:
                with self._branch.after(beginning):
                    self._capture_beside_layers(plan)
            if end is not None:
                with self._branch.after(end):
                    self._launch_tail(plan, (rest,))
        finally:
            self._branch.join()  # even after an error: an open branch would end the server
        if end is None:
            self._launch_tail(plan, (rest,))

    def _capture_beside_layers(self, plan: ForwardPlan) -> None:
        if self._head_is_beside:
            self._watch.end()
            if not self._watch.inputs_stay:
                raise RuntimeError(
                    "kv-canary: the model has changed its inputs in place in a captured forward, and not in the "
                    "forwards before it; expected input ids, positions and slots that stay. Report this model"
                )
            launch_endpoints_per_forward(self._launcher, plan, Side.HEAD)
        launch_endpoints_per_forward(self._launcher, plan, Side.TAIL, self._tail_parts[0])

    def _launch_tail(self, plan: ForwardPlan, parts: tuple[Part, ...], of: Part = Part.ALL) -> None:
        """Launch each of `parts`, as far as it is `of` these."""
        for part in parts:
            launch_endpoints_per_forward(self._launcher, plan, Side.TAIL, part & of)
        if not plan.write.scratch:  # a draft's further steps belong to the same forward
            self._launcher.publish()

    def _launch_late_head(self, inputs: KeptInputs, mode: str) -> ForwardPlan | None:
        """Returns the plan, which TAIL shares."""
        self._waiting = None
        plan = invoke_plan(self._plan_input, inputs, self._known())
        if plan is not None:
            plan = self._launch_head(plan, mode)
        return plan

    def note_replay(self, mode: str) -> None:
        """A graph with this forward's launches is replayed."""
        if self._phases.phase is Phase.IDLE:
            self._refuse_unseen("a graph was replayed")
        if self._late.events is not None:
            self._late.apply_events()
        if self._is_numbered:
            self._on_launch(mode)
        self._phases.replayed()

    def post_ops_outside_graph(self) -> None:
        """After the forward. Raises CanaryPhaseError if it was not bracketed."""
        self._expected = self._mode = None
        self._phases.leave()

    def abandon(self) -> None:
        """The forward raised: back to IDLE, ready for the next one."""
        self._plan = self._waiting = self._expected = self._mode = None
        self._beginning = self._end_of_layers = None
        self._phases.reset()


def _can_branch(plan: ForwardPlan) -> bool:
    """False for ragged batches (spec v1's draft-extend), and if there is nothing to verify."""
    return plan.write.ext_lens is None and not plan.verify.already_verified
