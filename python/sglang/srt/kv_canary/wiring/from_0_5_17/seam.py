"""The seam: SGLang asks `install_canary` for a canary, and calls what it returns.

Everything that our canary does hangs on the hooks. So the calls of the seam have little to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...config import is_asked_for
from ...errors import startup_error
from ...plan.speculation import checks_draft
from ...pool_patcher.registry import qualified_name
from ...seam_guard import SEAM
from ..context import context
from ..hook_spec import HookSpec, HookType
from ..prefix_caches import attach_prefix_cache
from ..releases import release
from ..startup_check import verify_scheduler_begun
from .pools import PARTS
from .speculation_refusals import refuse_uncovered_runner

# Where a pool keeps other pools.
_PARTS = (
    *("full_kv_pool", "swa_kv_pool"),
    *("main_pool", "dense_pool", "index_kv_pool", "index_k_pool"),  # MiniMaxSparseKVPool
    *("c4_kv_pool", "c128_kv_pool", "c4_indexer_kv_pool"),  # DeepSeekV4TokenToKVPool
)


class Seam:
    """What SGLang's call sites expect of a canary's manager."""

    def with_ops_outside_graph(
        self, single_forward_indices: Sequence[int], maybe_inaccurate_forward_batch: Any
    ) -> AbstractContextManager[None]:
        """`ModelRunner.forward` is hooked."""
        return nullcontext()

    def with_active_single_forward_manager(self, index: int) -> AbstractContextManager[None]:
        """`model.forward` is bracketed. Only drafts have other forwards than the first."""
        return nullcontext()

    def mark_init_finished(self) -> None:
        """The canary is armed at the end of `Scheduler.__init__`, when nothing is captured any more."""

    def attach_radix_cache(self, tree_cache: Any) -> None:
        attach_prefix_cache(tree_cache)

    def per_forward_workspace_bytes(self) -> int:
        """Workspace beyond what is allocated before the pools are sized: none."""
        return 0


def install(
    *, server_args: Any, model_runner: Any, token_oracle_manager: Any = None
) -> Seam | None:
    """In place of SGLang's `install_canary`. None with `--kv-canary none`."""
    if not is_asked_for(server_args):
        return None
    if not _is_unchecked_draft(server_args, model_runner):
        _refuse_what_is_not_covered(server_args, model_runner)
    verify_scheduler_begun()
    manager = context.install(
        server_args=release().settled(server_args),
        model_runner=model_runner,
        token_oracle_manager=token_oracle_manager,
    )
    return None if manager is None else Seam()


def _is_unchecked_draft(server_args: Any, model_runner: Any) -> bool:
    return model_runner.is_draft_worker and not checks_draft(release().settled(server_args))


def _refuse_what_is_not_covered(server_args: Any, model_runner: Any) -> None:
    _refuse_unknown_pool(model_runner)
    if model_runner.model_config.is_encoder_decoder:
        raise startup_error(
            "slots of the encoder's cross-attention hold no token of the request.",
            "an encoder-decoder model",
        )
    refuse_uncovered_runner(release().settled(server_args), model_runner)


def _refuse_unknown_pool(model_runner: Any) -> None:
    pool = model_runner.token_to_kv_pool
    known = [name for name, support in release().known_pools().items() if support.attacher]
    _refuse_unless_in(known, pool, "the KV pool")
    parts = PARTS.get(qualified_name(type(pool)), ())
    for part in _PARTS:
        if (sub_pool := getattr(pool, part, None)) is not None:
            _refuse_unless_in(parts, sub_pool, f"{type(pool).__name__}.{part}")


def _refuse_unless_in(pools: Collection[str], pool: Any, what: str) -> None:
    name = qualified_name(type(pool))
    if name in pools:
        return
    known = release().known_pools()
    refused = known[name].refused if name in known else ""
    known = ", ".join(pool.rpartition(".")[2] for pool in pools)
    raise startup_error(
        f"the canary does not know {what} {name} of this release (known: {known})."
        + (f" The reason: {refused}." if refused else ""),
        f"{what} {type(pool).__qualname__}",
    )


HOOKS = (HookSpec(SEAM, install, HookType.REPLACE, "any KV slot"),)
