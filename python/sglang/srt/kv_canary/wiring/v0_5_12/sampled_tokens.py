"""What a verify of speculative decoding accepts."""

from __future__ import annotations

from ..hook_spec import HookSpec, HookType
from ..sampled_tokens import (
    SAMPLED,
    after_verify_v2,
    around_verify_dflash,
    around_verify_ngram,
    around_verify_v1,
)

_PACKAGE = "sglang.srt.speculative"
HOOKS = (
    HookSpec(
        f"{_PACKAGE}.eagle_info_v2.EagleVerifyInputV2Mixin.sample",
        after_verify_v2,
        HookType.AFTER,
        SAMPLED,
    ),
    HookSpec(
        f"{_PACKAGE}.eagle_info.EagleVerifyInput.verify",
        around_verify_v1,
        HookType.AROUND,
        SAMPLED,
    ),
    HookSpec(
        f"{_PACKAGE}.ngram_info.NgramVerifyInput.verify",
        around_verify_ngram,
        HookType.AROUND,
        SAMPLED,
    ),
    HookSpec(
        f"{_PACKAGE}.dflash_info.DFlashVerifyInput.verify",
        around_verify_dflash,
        HookType.AROUND,
        SAMPLED,
    ),
)
