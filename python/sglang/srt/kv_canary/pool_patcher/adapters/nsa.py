"""NSA pools (DeepSeek-V3.2): an MLA pool plus the indexer's keys, which have their own records."""

from __future__ import annotations

from typing import Any

from ...buffer_group import PoolKind
from ..attachment import STATE_BUF_INFOS, AttachOptions, PoolAttachment
from ..group_builder import build_group, splice_halves
from .indexer_layout import indexer_content
from .mla import attach_mla


def attach_nsa(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL as for MLA, and an INDEXER group in the same slot space, added to the state buffer lists."""
    latent = attach_mla(pool, options)
    if not latent.groups:
        return latent
    num_slots, content = indexer_content(pool)
    indexer = build_group(PoolKind.INDEXER, num_slots, pool.device, options, content)
    splices = {STATE_BUF_INFOS: splice_halves(indexer, pool.layer_num, pool.page_size)}
    return PoolAttachment((*latent.groups, indexer), {**latent.splices, **splices})
