"""Public methods of the slot allocators. All that free slots lead to hooked ones."""

from ..v0_5_18.allocator_methods import ALLOCATOR_METHODS as OF_0_5_18
from ..v0_5_18.allocator_methods import SWA_ALLOCATOR_METHODS as SWA_OF_0_5_18

__all__ = ["ALLOCATOR_METHODS", "SWA_ALLOCATOR_METHODS"]

ALLOCATOR_METHODS = OF_0_5_18 | {
    "check_decode_capacity",
    "evict_to_free_tokens",
    "free_full",
    "verify_byte_accounting",
}

SWA_ALLOCATOR_METHODS = SWA_OF_0_5_18 | {"clear_full_to_swa_mapping"}
