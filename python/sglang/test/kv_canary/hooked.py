"""A rig as the canary of this process: SGLang's own calls reach it through the plugin's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang.srt.plugins import load_plugins
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release

from .manager_rig import ManagerRig
from .tree_requests import kv_of, new_request

__all__ = ["cache_request", "cache_under", "extend_to", "hook_in", "make_request"]


def hook_in(rig: ManagerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are in place and report to `rig` until the test ends. Its allocators are watched by a Dsv4Rig alone."""
    load_plugins()
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "recorder", rig.recorder)


def make_request(tree: Any, row: int, tokens: Sequence[int]) -> Any:
    """SGLang's Req, which holds `row` and has found nothing in the prefix cache."""
    req = new_request(f"req-{row}", tokens)
    newer = release().has_own_canary
    req.last_node = tree.root_node_handle() if newer else tree.root_node
    kv_of(req).req_pool_idx = row
    return req


def extend_to(req: Any, end: int) -> None:
    """The next forward computes the request's tokens up to `end`, which may be one that the host does not have yet."""
    if hasattr(req, "refresh_fill_ids"):  # from 0.5.22 on
        req.refresh_fill_ids()
        req.extend_end = end
    elif release().has_own_canary:
        req._refresh_fill_ids()
        req.set_extend_range(0, end)
    else:
        req.fill_ids = (req.origin_input_ids + req.output_ids)[:end]


def cache_request(tree: Any, req: Any, count: int) -> None:
    """The prefix cache takes the first `count` tokens of a request that goes on, by the call that a server makes."""
    from sglang.srt.mem_cache import common  # its hooked functions

    extend_to(req, count)
    if hasattr(common, "checkpoint_kv_cache"):  # from 0.5.22 on
        common.checkpoint_kv_cache(req, tree)
        return
    common.maybe_cache_unfinished_req(req, tree, chunked=count < len(req.origin_input_ids))


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
