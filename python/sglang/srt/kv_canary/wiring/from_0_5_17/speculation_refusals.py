"""Speculative decoding that is refused on all releases with SGLang's seam."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ...environ import TOKEN_ORACLE, read_settings
from ...errors import startup_error
from ...pool_patcher.registry import qualified_name
from ..refusals import Refusal
from ..releases import release
from .speculative import FOLLOWED

__all__ = ["SPECULATION", "refuse_uncovered_runner"]

# SGLang resolves NEXTN to EAGLE.
_COVERED = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN", "DFLASH")
_REMOVE = "Remove --speculative-algorithm"
_RELAYS_DRAFTS = "SGLANG_ENABLE_PP_SPEC"


def _speculates(args: Any) -> bool:
    return args.speculative_algorithm is not None


def _relays_drafts() -> bool:
    """Whether SGLang hands drafts of the last stage to the others. It refuses that together with disaggregation."""
    variable = getattr(envs, _RELAYS_DRAFTS, None)  # from 0.5.22 on
    return variable is not None and variable.get()


def _sends_drafts(args: Any) -> bool:
    """A prefill server whose last stage sends the draft's KV. What its pools must be is seen when they are there."""
    return args.disaggregation_mode == "prefill" and release().transfers is not None


SPECULATION: tuple[Refusal, ...] = (
    Refusal(
        "another speculative algorithm than EAGLE, EAGLE3, STANDALONE and DFLASH",
        lambda args: _speculates(args) and args.speculative_algorithm not in _COVERED,
        "drafts of workers that no hook of the canary follows on this release.",
        "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or DFLASH, or remove it.",
    ),
    Refusal(
        "draft trees (top-k above 1) of multi-layer EAGLE",
        lambda args: (
            _speculates(args)
            and bool(args.enable_multi_layer_eagle)
            and (args.speculative_eagle_topk or 1) > 1
        ),
        "SGLang itself: MultiLayerEagleWorkerV2 leaves the accepted tokens' KV in the slots that the tree gave them "
        "(run_eagle_verify with finalize_tree_path=False). Requests then read the KV of rejected tokens.",
        "Set --speculative-eagle-topk to 1.",
    ),
    Refusal(
        "speculative decoding over pipeline stages",
        lambda args: (
            _speculates(args) and args.pp_size > 1 and not (_relays_drafts() or _sends_drafts(args))
        ),
        f'without {_RELAYS_DRAFTS} SGLang itself ends any server but a prefill server: "only supported on prefill '
        'nodes" (check_pipeline_parallel_compat).',
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


def refuse_uncovered_runner(server_args: Any, model_runner: Any) -> None:
    """Raises CanaryStartupError for what only a model runner tells. `server_args`: after all defaults."""
    speculates = server_args.speculative_algorithm is not None
    if speculates and model_runner.draft_model_idx is not None:  # a layer of multi-layer EAGLE
        raise startup_error(
            f"SGLang runs multi-layer EAGLE, and its arguments do not say so. {_REMOVE}.",
            "the draft model's KV",
        )
    if speculates and (server_args.speculative_eagle_topk or 1) > 1:
        _refuse_unless_records_move(type(model_runner.token_to_kv_pool))


def _refuse_unless_records_move(pool: type) -> None:
    name = qualified_name(pool)
    if name not in FOLLOWED:
        known = ", ".join(known.rpartition(".")[2] for known in FOLLOWED)
        raise startup_error(
            f"draft trees (top-k above 1) with the KV pool {name}: records follow the moves of {known} only. Others "
            "move by methods of their own, of which MLATokenToKVPoolFP4's leaves scales behind and "
            "MiniMaxSparseKVPool's is not implemented. Set --speculative-eagle-topk to 1.",
            "KV of accepted tokens",
        )
