"""Speculation with data-parallel attention, for end-to-end tests: two ranks that draft and verify in step."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_kv_canary.testing.eagle_mode import V2
from sglang_kv_canary.testing.fault_cases import Case
from sglang_kv_canary.testing.fill_ins import dp_attention_on_torch_native
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.scripted_models import (
    write_scripted_deepseek,
    write_scripted_eagle3,
    write_scripted_nextn,
    write_scripted_qwen3,
)
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary.wiring.releases import release

from .eagle_serving import EagleE2EBase, scripted_answer
from .spec_fault_cases import flips

__all__ = ["MANY", "RANKS", "REQUESTS", "EagleDpE2EBase", "MtpDpE2EBase", "on_cpu"]

_EAGLE = MODES["eagle"]
_DP = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}


def speculation_in_step_on_cpu() -> None:
    """What SGLang lacks to draft and verify in step with other ranks without CUDA graphs.

    Triton attention has metadata for the requests of a draft only: none for an idle one, which attends to nothing, and
    none for padding. In 0.5.12.post1 the verify of an idle rank, and v1's copy of a batch that has finished, are on the
    device "cuda".
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    metadata = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.init_forward_metadata"
    HookRegistry.register(metadata, _unless_idle, HookType.AROUND)
    newer = find_spec("sglang.kernels") is not None
    package = "sglang.kernels.ops.attention" if newer else "sglang.srt.layers.attention.triton_ops"
    decode = import_module(f"{package}.decode_attention")
    decode.decode_attention_fwd = _for_requests(decode.decode_attention_fwd)
    if release().has_own_canary:  # from 0.5.22 on the CPU has a name of its own
        TritonAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    else:
        create = EagleVerifyInput.create_idle_input.__func__
        EagleVerifyInput.create_idle_input = classmethod(on_cpu(create))
        copied = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_idle"
        HookRegistry.register(copied, _name_the_device, HookType.BEFORE)


def on_cpu(create: Callable[..., Any]) -> Callable[..., Any]:
    """`create` with torch's default device, whatever it asks for."""

    def created(*args: Any, **kwargs: Any) -> Any:
        empty, full = torch.empty, torch.full
        torch.empty = lambda *a, device=None, **k: empty(*a, **k)
        torch.full = lambda *a, device=None, **k: full(*a, **k)
        try:
            return create(*args, **kwargs)
        finally:
            torch.empty, torch.full = empty, full

    return created


def _unless_idle(original: Callable[..., Any], backend: Any, forward_batch: Any) -> None:
    if not forward_batch.forward_mode.is_idle():
        original(backend, forward_batch)


def _name_the_device(batch: Any) -> None:
    batch.device = "cpu"


def _for_requests(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` of the requests that metadata has, without the padded ones."""

    def for_requests(q: Any, k: Any, v: Any, out: Any, kv_indptr: Any, *args: Any, **named: Any):
        count = kv_indptr.shape[0] - 1
        out[count:] = 0
        attend(q[:count], k, v, out[:count], kv_indptr, *args, **named)

    return for_requests


MODES["eagle3_dp"] = replace(
    _EAGLE,
    name="eagle3_dp",
    write_model=write_scripted_qwen3,
    server_args={**_EAGLE.server_args, **_DP},
    env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    cpu_fill_ins=(*_EAGLE.cpu_fill_ins, dp_attention_on_torch_native, speculation_in_step_on_cpu),
)


MODES["mtp_dp"] = replace(
    MODES["eagle3_dp"], name="mtp_dp", write_model=write_scripted_deepseek, halves=("K",)
)

# Requests of mixed traffic. Set, the servers are in mode `raise`, and faults are left out.
MANY = "KV_CANARY_TEST_IN_STEP_REQUESTS"
REQUESTS = int(os.environ.get(MANY, "8"))
RANKS = (0, 1)
ANSWERED_WITHIN_S = 120.0  # on busy machines; a rank that waits for another one waits forever


class EagleDpE2EBase(EagleE2EBase):
    """EAGLE3: each rank has a draft model of its own."""

    mode_name = "eagle3_dp"
    speculation: ClassVar[Mapping[str, Any]] = {**V2, "speculative_algorithm": "EAGLE3"}
    flags: ClassVar[Mapping[str, Any]] = {
        **EagleE2EBase.flags,
        "kv_canary": "raise" if MANY in os.environ else "log",
    }

    @classmethod
    def write_draft(cls, folder: Path) -> str | None:
        return write_scripted_eagle3(folder)

    def serve_in_waves(self, name: str, requests: int) -> None:
        """Mixed traffic in waves of one to five requests: ranks idle, pad and have equally many."""
        self.run(_waves(self.serving, name, requests))

    def run_within(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work`. Raises TimeoutError where a rank waits for another one."""
        return self.run(asyncio.wait_for(work, ANSWERED_WITHIN_S))

    def counters_of(self, rank: int, role: str) -> dict[str, Any]:
        return self.serving.send("counters", rank, role).answer()["counters"]

    def assert_all_checked(self) -> None:
        """No slot was left out, on any rank, by any runner."""
        for rank in RANKS:
            for role in self.runners:
                counters = self.counters_of(rank, role)
                for tag in self.mode.tags("HEAD") + self.mode.tags("TAIL"):
                    assert counters[tag]["checked"] == counters[tag]["eligible"] > 50, (rank, role)

    def of_this_pool(self, case: Case) -> Case:
        """An MLA pool has no V."""
        if "V" in self.mode.halves or case.args.get("half") != "V":
            return case
        return flips("", case.args)[0][1]

    def assert_found_on(self, rank: int, role: str, case: Case) -> list[dict[str, Any]]:
        """One rank and runner alone report `case`, in forwards at exactly its endpoints. Returns the findings."""
        found = [e for e in self.violations() if case.reason in e["reasons"]]
        in_forwards = {e["tag"] for e in found if not e["tag"].startswith("SWEEP")}
        assert in_forwards == {*case.tags}
        assert {(e["runner"], e["rank"], e["dp_rank"]) for e in found} == {(role, rank, rank)}
        return found


class MtpDpE2EBase(EagleDpE2EBase):
    """EAGLE with the MTP layer of DeepSeek: an MLA pool, and a draft model whose experts are spread over the ranks."""

    mode_name = "mtp_dp"
    speculation: ClassVar[Mapping[str, Any]] = V2

    @classmethod
    def write_draft(cls, folder: Path) -> str | None:
        return write_scripted_nextn(folder)


async def _waves(serving: Serving, name: str, requests: int) -> None:
    rng = random.Random(name)
    shared, sent = random_tokens(rng, 20), 0
    while sent < requests:
        count = min(rng.choice((1, 1, 2, 3, 5)), requests - sent)
        prompts = [shared[: rng.randrange(20)] + random_tokens(rng, 5) for _ in range(count)]
        await asyncio.gather(
            *(
                _ask(
                    serving,
                    f"{name}-{sent + i}",
                    prompt,
                    rng.randrange(2, 14),
                    rng.uniform(0.1, 0.5) if rng.random() < 0.1 else None,
                )
                for i, prompt in enumerate(prompts)
            )
        )
        sent += count


async def _ask(
    serving: Serving, name: str, prompt: list[int], count: int, abort_after_s: float | None
) -> None:
    # An aborted request asks for more, so that the abort finds it running.
    count = count if abort_after_s is None else 8 * count
    answer = asyncio.ensure_future(serving.generate(name, prompt, count))
    if abort_after_s is not None:
        await asyncio.sleep(abort_after_s)
        await serving.abort(name)
    tokens = await answer
    assert tokens == scripted_answer(prompt, len(tokens)), "the model answers something else"
    assert abort_after_s is not None or len(tokens) == count
