"""LMCache's connector in memory, for tests: the package is made for GPUs. SGLang's own prefix cache for it runs.

As LMCache's, it keeps KV of whole chunks by the tokens before their end. It loads the first layer when it is asked for
a prefix, and each other one when the model has read the layer before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch

__all__ = ["LOADED", "lmcache_in_memory"]

LOADED = "fill-in: LMCache has loaded tokens"  # said on stderr each time
_CHUNK = 16


def lmcache_in_memory() -> None:
    """`--enable-lmcache` without the package and without a GPU."""
    adapter = ModuleType("lmcache.integration.sglang.sglang_adapter")
    adapter.LMCacheLayerwiseConnector = _Connector
    adapter.LoadMetadata, adapter.StoreMetadata = _Load, _Store
    parts = adapter.__name__.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        sys.modules[name] = ModuleType(name)
    sys.modules[adapter.__name__] = adapter
    if not torch.cuda.is_available():
        torch.cuda.Stream, torch.cuda.stream = _Stream, lambda stream: stream


class _Stream:
    """Work is done when it is queued."""

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class _Load:
    token_ids: Sequence[int]
    slot_mapping: torch.Tensor  # int64[tokens], -1: in the prefix cache already
    offset: int  # whole chunks of it


@dataclass(frozen=True, slots=True)
class _Store:
    last_node: Any
    token_ids: Sequence[int]
    kv_indices: torch.Tensor
    offset: int


class _Connector:
    def __init__(
        self, k_pool: Sequence[torch.Tensor], v_pool: Sequence[torch.Tensor], **_: Any
    ) -> None:
        self._pools = [k_pool, v_pool]
        # All tokens up to a chunk's end -> its K and V, [layers][2][_CHUNK, heads, size]
        self._chunks: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}
        self._loads: list[tuple[torch.Tensor, list[list[list[torch.Tensor]]]]] = []

    def chunk_size(self) -> int:
        return _CHUNK

    def store_kv(self, what: _Store) -> None:
        for end in range(_CHUNK, len(what.token_ids) + 1, _CHUNK):
            slots = what.kv_indices[end - _CHUNK : end].long()
            layers = zip(*self._pools, strict=True)
            self._chunks.setdefault(
                tuple(what.token_ids[:end]), [[k[slots], v[slots]] for k, v in layers]
            )

    def start_load_kv(self, what: _Load) -> int:
        ends = range(what.offset + _CHUNK, len(what.token_ids) + 1, _CHUNK)
        chunks = []
        for end in ends:
            if (chunk := self._chunks.get(tuple(what.token_ids[:end]))) is None:
                break
            chunks.append(chunk)
        if not chunks:
            return 0
        count = _CHUNK * len(chunks)
        self._loads.append((what.slot_mapping[what.offset : what.offset + count], chunks))
        self._load_layer(0)
        print(LOADED, count, file=sys.stderr, flush=True)
        return count

    def load_kv_layerwise(self, layer: int) -> None:
        """The model reads `layer`."""
        if layer + 1 < len(self._pools[0]):
            self._load_layer(layer + 1)
        else:
            self._loads.clear()

    def _load_layer(self, layer: int) -> None:
        for slots, chunks in self._loads:
            missing = slots >= 0
            for pool, half in ((self._pools[0], 0), (self._pools[1], 1)):
                loaded = torch.cat([chunk[layer][half] for chunk in chunks])
                pool[layer][slots[missing]] = loaded[missing]
