"""The cores of a server's ranks, which SGLang's CPU engine wants to know."""

from __future__ import annotations

from sglang_kv_canary.wiring.releases import release

__all__ = ["bind_each_rank"]


def bind_each_rank(ranks: int) -> dict[str, str]:
    """The variable for `ranks` pipeline stages or replicas without tensor parallelism.

    Releases from 0.5.22 on bind each of them. 0.5.12.post1 binds tensor-parallel ranks only, here one.
    """
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * (ranks if release().has_own_canary else 1))
    }
