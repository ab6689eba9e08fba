"""The token oracle in speculative decoding."""

from __future__ import annotations

from ..hook_spec import HookSpec, HookType
from ..token_oracle import UNNAMED, after_draft, before_verify

_PACKAGE = "sglang.srt.speculative"
_VERIFIES = (
    f"{_PACKAGE}.eagle_info_v2.EagleVerifyInputV2Mixin.sample",
    f"{_PACKAGE}.eagle_info.EagleVerifyInput.verify",
    f"{_PACKAGE}.ngram_info.NgramVerifyInput.verify",
)
_DRAFTS = (
    f"{_PACKAGE}.eagle_worker_v2.EagleDraftWorker.draft",
    f"{_PACKAGE}.eagle_worker.EAGLEWorker.draft",
)
HOOKS = (
    *(HookSpec(target, before_verify, HookType.BEFORE, UNNAMED) for target in _VERIFIES),
    *(HookSpec(target, after_draft, HookType.AFTER, UNNAMED) for target in _DRAFTS),
)
