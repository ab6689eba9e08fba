"""Speculative decoding that is refused on all releases with SGLang's seam."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ...environ import TOKEN_ORACLE, read_settings
from ...errors import startup_error
from ...pool_patcher.registry import qualified_name
from ..refusals import Refusal
from ..releases import release
from .pools import SERVED_WITH_EAGLE, SERVED_WITH_SPECULATION

__all__ = ["SPECULATION", "refuse_uncovered_runner"]

# SGLang resolves NEXTN to EAGLE.
_COVERED = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN", "DFLASH")
_UNTESTED = "no test of the canary has run it on this release yet."
_REMOVE = "Remove --speculative-algorithm"
_BUT_EAGLE = ("", ", other than EAGLE without pipeline stages, adaptive steps and draft windows")
_RELAYS_DRAFTS = "SGLANG_ENABLE_PP_SPEC"


def _speculates(args: Any) -> bool:
    return args.speculative_algorithm is not None


def _relays_drafts() -> bool:
    """Whether SGLang hands drafts of the last stage to the others. It refuses that together with disaggregation."""
    variable = getattr(envs, _RELAYS_DRAFTS, None)  # from 0.5.22 on
    return variable is not None and variable.get()


def _sends_drafts(args: Any) -> bool:
    """A prefill server whose last stage sends the draft's KV. What its pools must be is seen when they are there."""
    sends = args.disaggregation_mode == "prefill" and release().transfers is not None
    return sends and args.disaggregation_transfer_backend == "mooncake"


SPECULATION: tuple[Refusal, ...] = (
    Refusal(
        "another speculative algorithm than EAGLE, EAGLE3, STANDALONE and DFLASH",
        lambda args: _speculates(args) and args.speculative_algorithm not in _COVERED,
        "drafts of workers that no hook of the canary follows on this release.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or DFLASH, or remove it.",
    ),
    Refusal(
        "draft trees (top-k above 1)",
        lambda args: _speculates(args) and (args.speculative_eagle_topk or 1) > 1,
        "accepted tokens move to other slots, and records do not follow them on this release yet.",
        "Set --speculative-eagle-topk to 1.",
    ),
    Refusal(
        "speculative decoding over pipeline stages",
        lambda args: (
            _speculates(args) and args.pp_size > 1 and not (_relays_drafts() or _sends_drafts(args))
        ),
        f'without {_RELAYS_DRAFTS} SGLang itself ends any server but a prefill server: "only supported on prefill '
        'nodes" (check_pipeline_parallel_compat). From 0.5.22 on such a server may send its KV over Mooncake. No run '
        "has checked other transports.",
        f"{_REMOVE} or --pp-size. From 0.5.22 on, set {_RELAYS_DRAFTS}=1: SGLang takes EAGLE of one layer with it, "
        "without disaggregation, adaptive speculation and DP attention.",
    ),
    Refusal(
        "speculative decoding with the token oracle",
        lambda args: _speculates(args) and read_settings()["token_oracle"],
        "the oracle's tokens, which this release's verify is not given.",
        f"Unset {TOKEN_ORACLE.name}.",
    ),
)


def _is_eagle_by_default(args: Any) -> bool:
    """EAGLE of one layer, with nothing that changes how many tokens are drafted, where, or what they attend to."""
    is_eagle = args.speculative_algorithm in ("EAGLE", "NEXTN") and args.pp_size == 1
    window = getattr(args, "speculative_draft_window_size", None)  # from 0.5.22 on
    return is_eagle and not args.speculative_adaptive and not window


def refuse_uncovered_runner(server_args: Any, model_runner: Any) -> None:
    """Raises CanaryStartupError for what only a model runner tells. `server_args`: after all defaults."""
    if server_args.speculative_algorithm is None:
        return
    if model_runner.draft_model_idx is not None:  # a layer of multi-layer EAGLE
        raise startup_error(
            f"SGLang runs multi-layer EAGLE, and its arguments do not say so. {_REMOVE}.",
            "the draft model's KV",
        )
    pool = model_runner.token_to_kv_pool
    parts = (getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool"))
    for written in (pool, *(part for part in parts if part is not None)):
        name = qualified_name(type(written))
        if name in SERVED_WITH_EAGLE and _is_eagle_by_default(server_args):
            continue
        if name not in SERVED_WITH_SPECULATION:
            raise startup_error(
                f"speculative decoding with the KV pool {name}{_BUT_EAGLE[name in SERVED_WITH_EAGLE]}: {_UNTESTED} "
                f"{_REMOVE}.",
                "KV that drafts and verifies write",
            )
