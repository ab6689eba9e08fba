"""Steps of the overlap scheduler without an engine: the hooks are real, and so are SGLang's batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_kv_canary import record
from sglang_kv_canary.single_forward_manager.late_work import MIN_TOKENS
from sglang_kv_canary.wiring import model_runner, row_owners
from sglang_kv_canary.wiring import scheduler as hooks
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.request_names import RequestNames

from .kernel_cases import kernel_device
from .manager_rig import ManagerRig
from .pool_fixtures import RealPool, make_mha_pool

__all__ = ["LONG", "SHORT", "OverlapRig", "OverlapScheduler"]

LONG, SHORT = MIN_TOKENS, MIN_TOKENS - 1
DEVICE = str(kernel_device())


@dataclass(eq=False)
class _Request:
    """What hooks read of SGLang's Req. `on_read` is called whenever its tokens are asked for."""

    req_pool_idx: int
    rid: str
    tokens: list[int] = field(default_factory=list)
    to_come: int = 0  # tokens of its prompt in later chunks
    output_ids: tuple[int, ...] | None = ()  # all of it is prompt
    on_read: Callable[[], None] = lambda: None
    extra_key: None = None
    cache_salt: None = None
    lora_id: None = None
    session: None = None
    extend_end: None = None

    @property
    def kv(self) -> _Request:
        """Where newer releases keep the row."""
        return self

    @property
    def extend_range(self) -> Any:
        """Of 0.5.17 to 0.5.20: all of its tokens are computed."""
        return SimpleNamespace(end=len(self.tokens))

    @property
    def origin_input_ids(self) -> list[int]:
        return [*self.tokens, *range(self.to_come)]

    @property
    def fill_ids(self) -> list[int]:
        self.on_read()
        return self.tokens

    @property
    def full_untruncated_fill_ids(self) -> list[int]:
        return self.fill_ids


class OverlapRig(ManagerRig):
    """Its forwards come through the hook on `ModelRunner.forward`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.manager.late.content.min_tokens = LONG  # its slots are small
        # Instead of the model's layers, or before them
        self.in_model: Callable[[ForwardBatch], Any] = lambda batch: None

    def _forward(self, batch: ForwardBatch, slots: torch.Tensor, fail: bool) -> None:
        self.on_batch(batch)

        def run(_: Any, batch: ForwardBatch) -> None:
            with self._translated(batch), self.manager.bracket_model_forward(batch):
                self._model(slots)
                self.in_model(batch)
                if fail:
                    raise RuntimeError("the model failed")

        model_runner._around_forward(run, self, batch)


class OverlapScheduler:
    """What the hooks ask of SGLang's, around the rig's forwards; the batches are SGLang's."""

    enable_overlap = True

    def __init__(self, real: RealPool | None = None, **arguments: Any) -> None:
        real = real or make_mha_pool(size=5 * LONG, device=DEVICE)
        self.rig = OverlapRig(real=real, context_len=4 * LONG, device=DEVICE, **arguments)
        self.forward_stream = torch.cuda.Stream() if DEVICE.startswith("cuda") else None
        self._iterations = 0
        self.requests: dict[int, _Request] = {}  # by row
        # New slots whose content was unknown when SGLang's own part of the step ended
        self.unknown_in_step = -1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the scheduler of this process, until the test ends."""
        manager = self.rig.manager
        monkeypatch.setattr(context, "managers", [manager])
        monkeypatch.setattr(context, "by_runner", {id(self.rig): manager})
        monkeypatch.setattr(context, "recorder", self.rig.recorder)
        monkeypatch.setattr(context, "names", RequestNames())
        monkeypatch.setattr(context, "row_owners", row_owners.RowOwners())
        monkeypatch.setattr(context, "late_work", manager.late)

    def request(self, row: int) -> _Request:
        return self.requests.setdefault(row, _Request(row, f"request-{row}"))

    def run(self, row: int, tokens: int, fail: bool = False) -> ScheduleBatch:
        """Prefill that many tokens behind what the row holds. `fail`: after the forward."""
        request, first = self.request(row), self.rig.lengths[row]
        request.tokens = [*request.tokens[:first], *range(tokens)]

        def launch() -> None:
            self.rig.extend(row, range(tokens), begin_step=False)
            self.unknown_in_step = self.unknown(row, first)
            if fail:
                raise RuntimeError("sampling failed")

        return self._step([request], ForwardMode.EXTEND, launch)

    def decode(self, row: int) -> ScheduleBatch:
        request, token = self.request(row), 7
        request.tokens = [*request.tokens, token]
        return self._step(
            [request],
            ForwardMode.DECODE,
            lambda: self.rig.decode([row], [token], begin_step=False),
        )

    def _step(
        self, requests: Sequence[_Request], mode: ForwardMode, launch: Callable[[], Any]
    ) -> ScheduleBatch:
        batch = ScheduleBatch(reqs=list(requests), forward_mode=mode)

        def run_batch(*_: Any) -> None:
            self._iterations += 1
            batch.forward_iter = self._iterations
            launch()

        hooks._around_run_batch(run_batch, self, batch)
        if self.forward_stream is not None:
            torch.cuda.synchronize()
        return batch

    def process(self, batch: ScheduleBatch) -> None:
        hooks._around_process_result(lambda *_: None, self, batch, SimpleNamespace())

    def unknown(self, row: int, first: int = 0) -> int:
        """Slots of the row, from token `first` on, without a fingerprint."""
        return int((self.content_of(row)[first:] == 0).sum())

    def content_of(self, row: int) -> torch.Tensor:
        group = self.rig.manager.groups[0]
        return group.v_tail[self.slots_of(row), record.WORD_CONTENT]

    def slots_of(self, row: int) -> torch.Tensor:
        return self.rig.rows.req_to_token[row, : self.rig.lengths[row]].long()
