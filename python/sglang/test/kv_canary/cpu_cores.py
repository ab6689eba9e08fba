"""The cores of a server's ranks, which SGLang's CPU engine wants to know."""

from __future__ import annotations

from inspect import signature

from sglang.srt.utils import numa_utils

__all__ = ["bind_each_rank"]


def bind_each_rank(ranks: int) -> dict[str, str]:
    """The variable for `ranks` pipeline stages or replicas without tensor parallelism.

    Releases from 0.5.22 on bind each of them. Earlier ones bind tensor-parallel ranks only, here one.
    """
    bind = getattr(numa_utils, "init_threads_binding", bind_each_rank)
    binds_all = "world_size" in signature(bind).parameters
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * (ranks if binds_all else 1))}
