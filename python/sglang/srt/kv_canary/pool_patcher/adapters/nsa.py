"""NSA pools (DeepSeek-V3.2), which are DSA pools from 0.5.17 on: an MLA pool plus the indexer's keys.

The keys have records of their own.
"""

from __future__ import annotations

from typing import Any

from ...pool_kind import PoolKind
from ..attachment import STATE_BUF_INFOS, AttachOptions, PoolAttachment
from ..errors import UnsupportedPoolError
from ..group_builder import build_group, splice_halves
from .indexer_layout import indexer_content
from .mla import attach_mla


def attach_nsa(pool: Any, options: AttachOptions) -> PoolAttachment:
    """FULL as for MLA, and an INDEXER group in the same slot space, added to the state buffer lists.

    Layers that share the indexer of another one keep no keys. A pool of such layers alone has no INDEXER group.
    """
    _refuse_pooled_keys(pool)
    latent = attach_mla(pool, options)
    if not latent.groups:
        return latent
    num_slots, content = indexer_content(pool)
    if not num_slots:
        return latent
    if num_slots != latent.groups[0].num_slots:
        raise UnsupportedPoolError(
            f"{type(pool).__name__}: expected indexer keys of {latent.groups[0].num_slots} slots, got {num_slots}"
        )
    indexer = build_group(PoolKind.INDEXER, num_slots, pool.device, options, content)
    splices = {STATE_BUF_INFOS: splice_halves(indexer, pool.layer_num, pool.page_size)}
    return PoolAttachment((*latent.groups, indexer), {**latent.splices, **splices})


def _refuse_pooled_keys(pool: Any) -> None:
    tokens = getattr(pool, "index_kpool", 1)
    if tokens != 1:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} pools the indexer keys of {tokens} tokens: later tokens change a key in place"
        )
