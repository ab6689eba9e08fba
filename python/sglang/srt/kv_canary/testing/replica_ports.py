"""The ports at which the ranks of each replica meet.

SGLang 0.5.12.post1 chooses one for each replica among those that any connection may take, and binds it seconds later.
Newer releases choose among others.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

__all__ = ["REPLICA_PORTS", "ports_of_replicas"]

REPLICA_PORTS = "KV_CANARY_TEST_REPLICA_PORTS"  # of replica 0, 1, ..., between commas


def ports_of_replicas() -> None:
    """A plugin: replicas get the ports that REPLICA_PORTS lists."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    signature = inspect.signature(Scheduler.__init__)
    if "dp_rank" not in signature.parameters:  # a newer release
        return
    hook = functools.partial(_choose, signature)
    target = "sglang.srt.managers.scheduler.Scheduler.__init__"
    HookRegistry.register(target, hook, HookType.BEFORE)


def _choose(signature: inspect.Signature, *args: Any, **more: Any) -> None:
    given = signature.bind(*args, **more).arguments
    port = os.environ[REPLICA_PORTS].split(",")[given["dp_rank"] or 0]
    given["port_args"].nccl_port = int(port)
