"""Hooks on speculative decoding: EAGLE, EAGLE3, STANDALONE, FROZEN_KV_MTP and NGRAM, all of them v2."""

from __future__ import annotations

from ..hook_spec import HookSpec, HookType
from ..sampled_tokens import SAMPLED, after_verify_v2
from ..speculative import draft_hooks
from .pools import HOOKED_MOVES

HOOKS = (
    *draft_hooks("execute", HOOKED_MOVES),
    HookSpec(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        after_verify_v2,
        HookType.AFTER,
        SAMPLED,
    ),
)
