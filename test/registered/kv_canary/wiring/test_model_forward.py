"""What surrounds `model.forward` stays outside of what torch.compile compiles. SGLang's own `patch_model` compiles."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.model_executor import cpu_graph_runner
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.model_forward import around_patch_model, surrounded, wrap_forward

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

BATCH = object.__new__(ForwardBatch)
IDS, POSITIONS = torch.tensor([3, 4]), torch.tensor([0, 1])


class Model(torch.nn.Module):
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        return input_ids * 2 + positions


class Rig:
    """A model with two wrappers, of which each notes that it has run."""

    def __init__(self) -> None:
        self.model = Model()
        self.bare = self.model.forward
        self.noted: list[str] = []
        self.compiled: list[Any] = []  # what the compiler was given
        self.graphs = 0
        for name in ("inner", "outer"):
            wrap_forward(self.model, self._noting(name))

    def _noting(self, name: str) -> Callable[[Any], Any]:
        @contextmanager
        def note(batch: Any) -> Iterator[None]:
            assert batch is BATCH
            self.noted.append(name)
            yield

        return note

    def backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def patched(self, compiles: bool, hooked: bool = True) -> Any:
        group = SimpleNamespace(ca_comm=None)
        # Other tests of the process may have loaded the plugin, which hooks it.
        patch_model = contextmanager(inspect.unwrap(cpu_graph_runner.patch_model))
        if not hooked:
            return patch_model(self.model, compiles, num_tokens=2, tp_group=group)
        return around_patch_model(patch_model, self.model, compiles, num_tokens=2, tp_group=group)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig, compiler = Rig(), torch.compile
    torch._dynamo.reset()

    def compile_here(forward: Any, **named: Any) -> Any:
        rig.compiled.append(forward.__wrapped__)  # SGLang puts no_grad around it
        return compiler(forward, **{**named, "backend": rig.backend})

    monkeypatch.setattr(torch, "compile", compile_here)
    yield rig
    torch._dynamo.reset()


BOTH = ["outer", "inner"]


def test_the_bare_forward_is_compiled_once_and_surrounded_each_time(rig: Rig) -> None:
    with rig.patched(compiles=True) as forward:
        for _ in range(3):
            assert forward(IDS, POSITIONS, BATCH).tolist() == [6, 9]
    assert rig.noted == BOTH * 3
    assert rig.graphs == 1
    assert rig.compiled == [rig.bare]


def test_without_the_hook_the_compiler_gets_what_surrounds(rig: Rig) -> None:
    with rig.patched(compiles=True, hooked=False):
        assert rig.compiled == [rig.model.forward] != [rig.bare]


def test_a_forward_that_is_not_compiled_is_the_wrapped_one(rig: Rig) -> None:
    with rig.patched(compiles=False) as forward:
        assert forward == rig.model.forward
        forward(IDS, POSITIONS, BATCH)
    assert rig.noted == BOTH
    assert rig.graphs == 0


def test_a_model_without_wrappers_is_compiled_as_it_is(rig: Rig) -> None:
    rig.model = Model()
    with rig.patched(compiles=True) as forward:
        assert forward(IDS, POSITIONS, BATCH).tolist() == [6, 9]
    assert "forward" not in vars(rig.model)


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "capture_fails"])
def test_the_model_keeps_its_wrappers(rig: Rig, fails: bool) -> None:
    wrapped = rig.model.forward
    try:
        with rig.patched(compiles=True):
            assert rig.model.forward is wrapped  # SGLang runs it once, before it captures
            if fails:
                raise RuntimeError("capture")
    except RuntimeError:
        pass
    assert rig.model.forward is wrapped


def test_layers_that_run_without_model_forward_are_surrounded_too(rig: Rig) -> None:
    with surrounded(rig.model, BATCH):
        assert rig.noted == BOTH
    rig.noted.clear()
    with surrounded(Model(), BATCH):
        assert rig.noted == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
