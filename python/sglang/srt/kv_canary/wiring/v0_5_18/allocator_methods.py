"""Public methods of the slot allocators. All that free slots lead to hooked ones."""

from ..v0_5_17.allocator_methods import ALLOCATOR_METHODS as OF_0_5_17
from ..v0_5_17.allocator_methods import SWA_ALLOCATOR_METHODS

__all__ = ["ALLOCATOR_METHODS", "SWA_ALLOCATOR_METHODS"]

ALLOCATOR_METHODS = OF_0_5_17 | {"translate_kv_indices_for_transfer"}
