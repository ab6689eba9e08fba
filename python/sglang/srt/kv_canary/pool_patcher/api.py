"""The pool patcher's entry points: attach canary buffers to a pool, and register new pool classes."""

from __future__ import annotations

from typing import Any

from ..buffer_group import CanaryBufferGroup
from ..pool_kind import PoolKind
from ..record import RECORD_BYTES
from . import registry
from .attachment import AttachOptions, PoolAttacher, PoolAttachment
from .buf_info_splice import patch_buf_info_method
from .errors import UnsupportedPoolError
from .registry import PoolSupport

SIDES = 2  # HEAD and TAIL
_ATTACHED = "_kv_canary_groups"


def register_pool_attacher(
    pool_class: type | str,
    attacher: PoolAttacher,
    covers: str = "registered from outside",
    halves: dict[PoolKind, int] | None = None,
) -> None:
    """Use `attacher` for `pool_class` (a class, or its qualified name) and its subclasses.

    `attacher(pool, options: AttachOptions) -> PoolAttachment` must not change the pool. The most derived registered
    class wins, and a later registration replaces an earlier one. The coverage table shows `covers` and `halves` (per
    group). The memory budget uses `halves` of the pool class that SGLang selects for the model.
    """
    name = pool_class if isinstance(pool_class, str) else registry.qualified_name(pool_class)
    registry.add(name, PoolSupport(attacher, dict(halves or {}), covers))


def attach_canary_buffers(
    pool: Any,
    *,
    allocator: Any = None,
    is_draft: bool = False,
    content: bool,
    sliding_window_size: int | None = None,
    kv_token_id_vs_position_offset: int | None = None,
) -> tuple[CanaryBufferGroup, ...]:
    """Allocate records beside `pool`, add them to its buffer lists, and return its groups (at least one).

    `allocator` is the pool's token_to_kv_pool_allocator. `sliding_window_size` is `ModelRunner.sliding_window_size`,
    which SWA pools need. With `is_draft` an EAGLE-style draft pool gets token offset 1, unless
    `kv_token_id_vs_position_offset` says otherwise (step i of a multi-layer draft has i + 1).

    Raises UnsupportedPoolError if no attacher covers the pool, RuntimeError if it is attached already. The pool is
    then unchanged.
    """
    if getattr(pool, _ATTACHED, None):
        raise RuntimeError(
            f"{type(pool).__name__} has canary buffers already; attach a pool only once"
        )
    if kv_token_id_vs_position_offset is None:
        kv_token_id_vs_position_offset = int(is_draft)
    options = AttachOptions(
        content=content,
        allocator=allocator,
        token_offset=kv_token_id_vs_position_offset,
        sliding_window_size=sliding_window_size,
    )
    attachment = build_attachment(pool, options)
    if not attachment.groups:
        raise UnsupportedPoolError(
            f"{type(pool).__name__} has no layers or no slots on this rank, so there is nothing to check"
        )
    for method_name, splices in attachment.splices.items():
        patch_buf_info_method(pool, method_name, splices)
    setattr(pool, _ATTACHED, attachment.groups)
    return attachment.groups


def attached_groups(pool: Any) -> tuple[CanaryBufferGroup, ...]:
    """The groups of `pool`; () when it has no canary buffers."""
    return getattr(pool, _ATTACHED, None) or ()


def build_attachment(pool: Any, options: AttachOptions) -> PoolAttachment:
    """The attachment of `pool` by its class's attacher. Changes nothing in the pool."""
    name, support = _support_of(type(pool))
    if support.attacher is None:
        raise UnsupportedPoolError(
            f"KV pool {type(pool).__name__} ({name}) is refused: {support.refused}"
        )
    return support.load()(pool, options)


def record_bytes_per_slot(pool_class: type | str) -> dict[PoolKind, int]:
    """Maximum record bytes per slot for each group of a pool of this class.

    This reserves memory before the pool exists: 128 for MHA, 64 for MLA, twice 64 for NSA; 128 per full and per SWA
    slot for SWA pools. A c4 slot stands for 4 tokens, a c128 slot for 128. `pool_class` may also be a qualified or
    bare class name. Raises UnsupportedPoolError for a refused or unknown class.
    """
    name, support = _support_of(pool_class)
    if support.attacher is None:
        raise UnsupportedPoolError(f"KV pool {name} is refused: {support.refused}")
    return {kind: SIDES * RECORD_BYTES * halves for kind, halves in support.halves.items()}


def _support_of(pool_class: type | str) -> tuple[str, PoolSupport]:
    if isinstance(pool_class, str):
        known = registry.known().items()
        found = next((e for e in known if pool_class in (e[0], e[0].rpartition(".")[2])), None)
    else:
        found = registry.find(pool_class)
    if found is None:
        raise UnsupportedPoolError(_unknown(pool_class))
    return found


def _unknown(pool_class: type | str) -> str:
    name = pool_class if isinstance(pool_class, str) else registry.qualified_name(pool_class)
    known = sorted(
        n.rpartition(".")[2] for n, s in registry.known().items() if s.attacher is not None
    )
    return (
        f"no attacher knows the KV pool {name}; known pools: {', '.join(known)}. "
        "Teach the canary this class with "
        f"{__package__}.register_pool_attacher(pool_class, attacher)"
    )
