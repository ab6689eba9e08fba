"""Brackets one forward: operations before and after it, outside and inside the CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..buffer_group import Side
from ..endpoint import Part
from ..launch.launcher import Launcher, invoke_plan, is_capturing, launch_endpoints_per_forward
from ..plan.expected_inputs import ExpectedLater, ExpectedTokens
from ..plan.kept_inputs import KeptInputs
from ..plan.plan_input import ForwardPlan, PlanInput
from .graph_branch import GraphBranch
from .late_work import LateWork
from .phases import Phase, PhaseTracker

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class SingleForwardManager:
    """Phases and launches of one forward (of one inner step, for draft models).

    `on_launch(mode)` is called once for each numbered forward whose launches really run, not for captures.
    `is_armed()` says whether forwards are checked yet. `late` may leave HEAD, or a part of TAIL, for later.
    `may_branch`: whether a part of TAIL runs on a second branch of captured graphs.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan_input: PlanInput,
        on_launch: Callable[[str], object],
        is_armed: Callable[[], bool],
        late: LateWork,
        may_branch: bool = True,
    ) -> None:
        self._launcher = launcher
        self._plan_input = plan_input
        self._is_numbered = plan_input.numbers_forwards
        self._on_launch = on_launch
        self._is_armed = is_armed
        self._late = late
        self._may_branch = may_branch
        self._phases = PhaseTracker()
        self._plan: ForwardPlan | None = None
        self._waiting: tuple[KeptInputs, str] | None = None  # HEAD's inputs and mode, if it waits
        self._expected: ExpectedTokens | ExpectedLater | None = None
        self._mode: str | None = None
        self._branch = GraphBranch()
        self._beside = Part(0)  # the part of TAIL that ran beside this forward's layers

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
        expected = None if capturing else self._known()
        self._plan = invoke_plan(self._plan_input, forward_batch, expected, capturing)
        if self._plan is not None:
            self._launch_head(self._plan, mode, capturing)

    def _known(self) -> ExpectedTokens | None:
        """What is expected, worked out once."""
        if callable(self._expected):
            self._expected = self._expected()
        return self._expected

    def _launch_head(self, plan: ForwardPlan, mode: str, capturing: bool = False) -> None:
        """And what of TAIL runs beside the layers."""
        if not capturing and Part.NUMBER in plan.parts(Side.HEAD):
            self._on_launch(mode)
        # Disarmed forwards run before a capture, and compile the kernels that it will hold.
        disarmed = not capturing and not self._is_armed()
        beside = self._may_branch and _can_verify_beside(plan) and (capturing or disarmed)
        self._beside = plan.tail_beside_the_layers if beside else Part(0)
        if disarmed:
            self._compile_ahead(plan)
        launch_endpoints_per_forward(self._launcher, plan, Side.HEAD)
        if self._beside:
            with self._branch.fork() if capturing else nullcontext():
                launch_endpoints_per_forward(self._launcher, plan, Side.TAIL, self._beside)

    def _compile_ahead(self, plan: ForwardPlan) -> None:
        """All launches of this forward at once, and for all smaller batches, of which a graph is captured next."""
        with self._launcher.backend.compiling_ahead(smaller_batches=True) as compiles:
            if compiles:
                launch_endpoints_per_forward(self._launcher, plan, Side.HEAD)
                for part in (self._beside, Part.ALL & ~self._beside):
                    launch_endpoints_per_forward(self._launcher, plan, Side.TAIL, part)
                self._launcher.publish()

    def post_ops_maybe_inside_graph(self) -> None:
        """Verify and write TAIL, after HEAD if that has waited. May be under stream capture."""
        self._phases.enter(Phase.POST_INSIDE)
        plan, self._plan = self._plan, None
        if self._waiting is not None:
            plan = self._launch_late_head(*self._waiting)
        if plan is None:
            return
        self._branch.join()
        part = Part.ALL & ~self._beside
        if not is_capturing() and self._late.take_content(plan):
            part &= ~Part.NEW_CONTENT
        launch_endpoints_per_forward(self._launcher, plan, Side.TAIL, part)
        if not plan.write.scratch:  # a draft's further steps belong to the same forward
            self._launcher.publish()

    def _launch_late_head(self, inputs: KeptInputs, mode: str) -> ForwardPlan | None:
        """Returns the plan, which TAIL shares."""
        self._waiting = None
        plan = invoke_plan(self._plan_input, inputs.batch(), self._known(), capturing=False)
        if plan is not None:
            self._launch_head(plan, mode)
        return plan

    def note_replay(self, mode: str) -> None:
        """A graph with this forward's launches is replayed."""
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
        self._branch.abandon()
        self._phases.reset()


def _can_verify_beside(plan: ForwardPlan) -> bool:
    """False for ragged batches (spec v1's draft-extend), and if there is nothing to verify."""
    return plan.write.ext_lens is None and not plan.verify.already_verified
