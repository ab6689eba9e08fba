"""Setups that are refused on 0.5.21 and newer alike."""

from __future__ import annotations

from typing import Any

from ..refusals import Refusal

__all__ = ["EXTERNAL_LINKER", "FROM_0_5_21", "MINICPM", "PAGE_MAJOR_LAYOUT"]

_MINICPM = {"minicpm_flashattn", "minicpm_flashinfer"}

# 0.5.19 and 0.5.20 have these two as well.
PAGE_MAJOR_LAYOUT = Refusal(
    "page-major KV layout",
    lambda args: args.enable_page_major_kv_layout and not args.enable_unified_memory,
    "SGLang itself cannot build such a pool on this release.",
    "Remove --enable-page-major-kv-layout.",
)
MINICPM = Refusal(
    "MiniCPM sparse attention",
    lambda args: not _MINICPM.isdisjoint(_attention_backends(args)),
    "compressed keys in slots of the pool that no page table lists: they choose what attention reads.",
    "Use another --attention-backend.",
)
# 0.5.20 has it as well.
EXTERNAL_LINKER = Refusal(
    "external cache linker",
    lambda args: args.enable_unified_cache_external_linker,
    "KV that is loaded from another server's cache arrives without records.",
    "Remove --enable-unified-cache-external-linker.",
)

FROM_0_5_21: tuple[Refusal, ...] = (
    PAGE_MAJOR_LAYOUT,
    EXTERNAL_LINKER,
    MINICPM,
    Refusal(
        "bounded replay of sliding windows",
        lambda args: bool(
            args.enable_encoder_swa_bounded_replay or args.enable_decoder_swa_bounded_replay
        ),
        "tokens are computed again in slots that other requests may share.",
        "Remove the bounded-replay flags.",
    ),
)


def _attention_backends(args: Any) -> set[str | None]:
    return {
        args.attention_backend,
        args.prefill_attention_backend,
        args.decode_attention_backend,
    }
