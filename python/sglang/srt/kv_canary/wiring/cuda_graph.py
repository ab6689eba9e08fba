"""Around graph runners: a replay runs the captured launches, a capture after start-up must not check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..runner.manager import CanaryManager
from ..single_forward_manager import BesideLayers
from .context import context
from .guard import attempt_aside, guarded
from .hook_spec import HookSpec, HookType
from .model_forward import around_patch_model
from .releases import release


@guarded
def before_replay(graph_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    manager = context.by_runner.get(id(graph_runner.model_runner))
    if manager is not None:
        manager.note_replay(forward_batch.forward_mode._name_)  # `name` is two calls


def around_capture(
    original: Callable[..., Any], graph_runner: Any, *args: Any, **kwargs: Any
) -> Any:
    manager = context.manager_of(graph_runner.model_runner)
    if manager is None:
        return original(graph_runner, *args, **kwargs)
    attempt_aside(_compile_beside, manager, graph_runner.model_runner)
    with manager.disarmed():
        return original(graph_runner, *args, **kwargs)


def _compile_beside(manager: CanaryManager, model_runner: Any) -> None:
    from .warm_up import compile_beside_capture

    compile_beside_capture(manager, model_runner)


def beside_layers(server_args: Any) -> BesideLayers:
    """What decode graphs may run beside the layers. `server_args`: settled.

    Nothing where layers hold collectives: beside a branch, each of NCCL's kernels starts 4 us later
    (docs/performance.md#tensor-parallelism). Nothing where graphs are cut: a branch ends with its graph. HEAD says
    which forward has begun, and loads of HiCache must know it before the layers store anything.
    """
    if server_args.tp_size > 1 or release().cuts_decode_graphs(server_args):
        return BesideLayers.NOTHING
    if server_args.enable_hierarchical_cache:
        return BesideLayers.CHECK
    return BesideLayers.HEAD_AND_CHECK


def graph_hooks(runner: str, replay: str) -> tuple[HookSpec, ...]:
    """The hooks on the class `runner`, whose method `replay` replays a graph."""
    lost = "decode CUDA graphs"
    return (
        HookSpec(f"{runner}.{replay}", before_replay, HookType.BEFORE, lost),
        HookSpec(f"{runner}.capture", around_capture, HookType.AROUND, lost),
    )


def compile_hooks(decode: str) -> tuple[HookSpec, ...]:
    """The hooks on what compiles the model. `decode`: the module whose `patch_model` decode graphs are captured with.

    The CPU has a graph runner of its own. Its graphs are compiled functions, which run again each time.
    """
    cpu = "sglang.srt.model_executor.cpu_graph_runner"
    lost = "forwards of a compiled model"
    return (
        HookSpec(f"{decode}.patch_model", around_patch_model, HookType.AROUND, lost),
        HookSpec(f"{cpu}.patch_model", around_patch_model, HookType.AROUND, lost),
        HookSpec(f"{cpu}.CPUGraphRunner.capture", around_capture, HookType.AROUND, lost),
    )
