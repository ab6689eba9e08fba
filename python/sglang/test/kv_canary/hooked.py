"""A rig as the canary of this process: SGLang's own calls reach it through the plugin's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang.srt.plugins import load_plugins
from sglang_kv_canary.wiring.context import context

from .manager_rig import ManagerRig

__all__ = ["cache_request", "cache_under", "hook_in", "make_request"]


def hook_in(rig: ManagerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in place and report to `rig` until the test ends. Its allocators are not watched."""
    load_plugins()
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "recorder", rig.recorder)


def make_request(tree: Any, row: int, tokens: Sequence[int]) -> Any:
    """SGLang's Req, which holds `row` and has found nothing in the prefix cache."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(f"req-{row}", "", list(tokens), SamplingParams(max_new_tokens=64))
    req.req_pool_idx, req.last_node = row, tree.root_node
    return req


def cache_request(tree: Any, req: Any, count: int) -> None:
    """The prefix cache takes the first `count` tokens of a request that goes on."""
    from sglang.srt.mem_cache.common import maybe_cache_unfinished_req

    req.fill_ids = req.origin_input_ids[:count]
    maybe_cache_unfinished_req(req, tree, chunked=count < len(req.origin_input_ids))


def cache_under(rig: ManagerRig, tree: Any, req: Any, count: int, launch: Callable[[], Any]) -> Any:
    """The cache takes `count` tokens while the forward of `launch` is queued, which runs before the row is written.

    As on a device whose schedule stream does not wait for the forward. Returns the forward's step.
    """
    write, writes = rig.rows.write, []

    def cache_now_and_write_later(_: Any) -> None:
        rig.rows.write = lambda *args: writes.append(args)
        cache_request(tree, req, count)

    rig.after_translation = cache_now_and_write_later  # launched, HEAD has not run
    step = launch()
    rig.after_translation, rig.rows.write = None, write
    for args in writes:
        write(*args)
    return step
