"""Where the layers of a captured forward end: at the call of the model's LogitsProcessor."""

from __future__ import annotations

import ast
import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.single_forward_manager import BesideLayers
from sglang_kv_canary.wiring import after_layers
from sglang_kv_canary.wiring.after_layers import logits_processor_of
from sglang_kv_canary.wiring.cuda_graph import beside_layers
from sglang_kv_canary.wiring.releases import release

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

# What models do with logits: nothing of it stores K or V.
HARMLESS = {"self.pooler", "logits.index_fill_", "self._set_hc_logits_hidden_states"}


class Model(torch.nn.Module):
    """Layers, then SGLang's LogitsProcessor, whose own work is replaced: a vocabulary takes a process group."""

    def __init__(self, processors: int = 1) -> None:
        super().__init__()
        config = SimpleNamespace(vocab_size=8)
        made = [LogitsProcessor(config, skip_all_gather=True) for _ in range(processors)]
        self.processors = torch.nn.ModuleList(made)
        for processor in made:
            processor.forward = lambda hidden, log: log.append("logits")

    def forward(self, log: list[str]) -> None:
        log.append("layers")
        self.processors[0](torch.zeros(1), log)


class Manager:
    """What `bracket` asks of a CanaryManager: a fake, because captures need a GPU."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def bracket_model_forward(self, batch: Any) -> Any:
        return nullcontext()

    def layers_have_run(self) -> None:
        self.log.append("told")


@pytest.fixture(autouse=True)
def _server_args() -> None:
    load_plugins()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


@pytest.mark.parametrize("capturing", [True, False])
def test_the_manager_is_told_between_the_layers_and_the_lm_head(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_layers, "is_capturing", lambda: capturing)
    model, log = Model(), []
    processor = logits_processor_of(model)
    for _ in range(2):
        with after_layers.bracket(Manager(log), None, processor):
            model(log)
    model(log)  # outside of the bracket
    once = ["layers", "told", "logits"] if capturing else ["layers", "logits"]
    assert log == [*once, *once, "layers", "logits"]


def test_a_forward_that_fails_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(after_layers, "is_capturing", lambda: True)
    model, log = Model(), []
    with (
        pytest.raises(RuntimeError, match="the model failed"),
        after_layers.bracket(Manager(log), None, logits_processor_of(model)),
    ):
        raise RuntimeError("the model failed")
    model(log)
    assert log == ["layers", "logits"]


@pytest.mark.parametrize("processors", [0, 2])
def test_the_end_is_unknown_without_exactly_one_logits_processor(processors: int) -> None:
    assert logits_processor_of(Model(processors)) is None


@pytest.mark.parametrize(
    ("settings", "backend", "expected"),
    [
        ({}, "full", BesideLayers.HEAD_AND_CHECK),
        ({"tp_size": 2}, "full", BesideLayers.NOTHING),
        ({"enable_hierarchical_cache": True}, "full", BesideLayers.CHECK),
        ({"enable_hierarchical_cache": True, "tp_size": 2}, "full", BesideLayers.NOTHING),
        ({}, "breakable", BesideLayers.NOTHING),
    ],
)
def test_what_runs_beside_the_layers(
    settings: dict[str, Any], backend: str, expected: BesideLayers
) -> None:
    decode = SimpleNamespace(backend=backend)
    args = {"tp_size": 1, "enable_hierarchical_cache": False, **settings}
    args = SimpleNamespace(**args, cuda_graph_config=SimpleNamespace(decode=decode))
    if backend != "full" and not release().has_own_canary:
        expected = BesideLayers.HEAD_AND_CHECK  # this release does not cut graphs of decode
    assert beside_layers(args) is expected


def test_no_model_of_sglang_has_layers_after_its_logits_processor() -> None:
    """Else TAIL would take fingerprints before all of K and V is stored. Reads the source of every model."""
    folder = Path(importlib.util.find_spec("sglang.srt.models").submodule_search_locations[0])
    seen, later = 0, {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                ends = [call.end_lineno for call in _calls(function) if _is_logits(call)]
                seen += len(ends)
                after = {
                    ast.unparse(c.func) for c in _calls(function) if ends and c.lineno > min(ends)
                }
                if len(ends) > 1 or after - HARMLESS:
                    later[f"{path.name}:{function.name}"] = after
    assert seen > 100
    assert later == {}


def _calls(function: ast.FunctionDef) -> list[ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Call)]


def _is_logits(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "logits_processor"
