"""Speculative decoding that is refused on all releases with SGLang's seam."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from ...environ import TOKEN_ORACLE, read_settings
from ...errors import startup_error
from ...pool_patcher.registry import qualified_name
from ..refusals import (
    Refusal,
    accepts_no_path,
    decodes_beside_prefills,
    pads_to_other_ranks,
)
from ..releases import release
from .pools import FOLLOWED_MOVES, UNMOVED

__all__ = ["SPECULATION", "refuse_uncovered_runner"]

# SGLang resolves NEXTN to EAGLE.
_COVERED = ("EAGLE", "EAGLE3", "STANDALONE", "NEXTN", "DFLASH", "NGRAM", "FROZEN_KV_MTP")
_READ = ("UNO", "DSPARK")  # SGLang's others
_USE_ANOTHER = (
    "Use --speculative-algorithm EAGLE, EAGLE3, STANDALONE, NGRAM or DFLASH, or remove it."
)
_REMOVE = "Remove --speculative-algorithm"
# Variables of SGLang's, from 0.5.22 on
_RELAYS_DRAFTS = "SGLANG_ENABLE_PP_SPEC"
_COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"


def _speculates(args: Any) -> bool:
    return args.speculative_algorithm is not None


def _is_set(name: str) -> bool:
    variable = getattr(envs, name, None)
    return variable is not None and variable.get()


def _sends_drafts(args: Any) -> bool:
    """A prefill server whose last stage sends the draft's KV. What its pools must be is seen when they are there."""
    return args.disaggregation_mode == "prefill" and release().transfers is not None


SPECULATION: tuple[Refusal, ...] = (
    Refusal(
        "UNO",
        lambda args: args.speculative_algorithm == "UNO",
        "it drafts with the target: UnoWorkerV2._run_draft_block stores random tokens, computed with an adapter, in "
        "slots of the request. They are tokens of nobody, and the verify writes all of them again but the first. "
        "SGLang serves it on CUDA alone.",
        _USE_ANOTHER,
    ),
    Refusal(
        "DSPARK",
        lambda args: args.speculative_algorithm == "DSPARK",
        "its TargetHiddenKvInjector stores the draft's K and V outside any forward, after prefills and verifies. With "
        "SGLANG_RAGGED_VERIFY_MODE=compact, requests of a verify have different numbers of tokens, where a plan has "
        "one for all. SGLang serves it on no CPU.",
        _USE_ANOTHER,
    ),
    Refusal(
        "a speculative algorithm registered by a plugin",
        lambda args: _speculates(args) and args.speculative_algorithm not in (*_COVERED, *_READ),
        "forwards of a worker that is not SGLang's own: the slots that they read and write are unknown.",
        _USE_ANOTHER,
    ),
    Refusal(
        "draft trees (top-k above 1) of multi-layer EAGLE",
        lambda args: (
            args.speculative_algorithm in ("EAGLE", "EAGLE3", "NEXTN")
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
            _speculates(args)
            and args.pp_size > 1
            # SGLang hands drafts of the last stage to the others. It refuses that together with disaggregation.
            and not (_is_set(_RELAYS_DRAFTS) or _sends_drafts(args))
        ),
        f'without {_RELAYS_DRAFTS} SGLang itself ends any server but a prefill server: "only supported on prefill '
        'nodes" (check_pipeline_parallel_compat).',
        f"{_REMOVE} or --pp-size. From 0.5.22 on, set {_RELAYS_DRAFTS}=1: SGLang takes EAGLE of one layer with it, "
        "without disaggregation, adaptive speculation and DP attention.",
    ),
    Refusal(
        "speculative decoding beside prefills of other ranks",
        lambda args: decodes_beside_prefills(args) and not _is_set(_COORDINATION),
        "SGLang itself: beside a prefill, EAGLEWorkerV2.forward_batch_generation runs a decode as a prefill without "
        "tokens. The scheduler ends.",
        f"Remove --speculative-skip-dp-mlp-sync. From 0.5.22 on, {_COORDINATION}=1 mends it as well.",
    ),
    Refusal(
        "frozen-KV MTP in step with other ranks",
        lambda args: args.speculative_algorithm == "FROZEN_KV_MTP" and pads_to_other_ranks(args),
        "SGLang itself: FrozenKVMTPDraftWorker.draft gives its batch no slots (out_cache_loc), and "
        "ForwardBatch._pad_inputs_to_size pads them. The scheduler ends with the first draft that no draft graph "
        "replays.",
        "Use --speculative-algorithm EAGLE or EAGLE3, or remove it.",
    ),
    accepts_no_path("NGRAM"),
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
    if server_args.speculative_algorithm == "NGRAM":
        _refuse_unless_records_move("NGRAM", model_runner, f"{_REMOVE}.")
    elif speculates and (server_args.speculative_eagle_topk or 1) > 1:
        trees = "draft trees (top-k above 1)"
        _refuse_unless_records_move(trees, model_runner, "Set --speculative-eagle-topk to 1.")


def _refuse_unless_records_move(drafts: str, model_runner: Any, how_to_go_on: str) -> None:
    name = qualified_name(type(model_runner.token_to_kv_pool))
    if name in FOLLOWED_MOVES:
        return
    why = UNMOVED.get(name, "")
    raise startup_error(
        f"{drafts} with the KV pool {name}: accepted tokens move after each verify. "
        f"{f'SGLang itself: {why}.' if why else 'No hook follows them there.'} {how_to_go_on}",
        "KV of accepted tokens",
    )
