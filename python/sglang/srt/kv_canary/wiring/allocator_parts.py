"""What is known of an allocator that consists of several, one for each slot space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..pool_kind import PoolKind


@dataclass(frozen=True, slots=True)
class AllocatorParts:
    """All public methods that free slots lead to hooked ones, of the allocator and of its parts."""

    methods: frozenset[str]  # public, of the allocator
    kinds: Mapping[str, PoolKind]  # attribute of each part -> whose slots it hands out
    part: str  # class of the parts
    part_methods: frozenset[str]  # public, of the parts
