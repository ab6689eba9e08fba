"""Public methods of the allocators of unified pools. All that free slots lead to hooked ones."""

from __future__ import annotations

from ...pool_kind import PoolKind
from ..allocator_parts import AllocatorParts
from ..from_0_5_21.allocator_methods import ALLOCATOR_METHODS, SWA_ALLOCATOR_METHODS

# What both kinds have beside other allocators.
_UNIFIED = frozenset(
    {
        "allocator_state_str",
        "flush_opportunistic",
        "is_slot_allocated",
        "prewarm_compaction",
        "set_inflight_forward",
        "set_latest_forward_done_event",
        "translate_kv_loc",
        "translate_write_loc",
    }
)
_PART_METHODS = (
    ALLOCATOR_METHODS
    | _UNIFIED
    | {
        "alloc_physical",
        "alloc_with_virtual",
        "allocated_count",
        "bind",
        "bind_high_peer",
        "bind_low_peer",
        "bind_peer",
        "cancel_physical_reservation",
        "clear_inverse_history",
        "flush_for_allocation",
        "free_physical",
        "live_page_count",
        "moves_blocked",
        "schedulable_available_size",
        "take_physical",
        "take_physical_pages",
        "watermark_physical",
    }
)
_HYBRID_METHODS = (
    ALLOCATOR_METHODS
    | _UNIFIED
    | {
        "draft_virtual_id_space",
        "flush_deferred_full_frees",
        "full_available_size",
        "full_p2v_page_table",
        "full_tokens_before_mamba_recheck",
        "full_v2p_page_table",
        "mamba_slot_full_token_cost",
        "prepare_mamba_allocation",
        "set_disagg_move_gate",
        "set_host_transfer_move_gate",
        "size",
        "size_mamba",
    }
)
_SWA_METHODS = (
    ALLOCATOR_METHODS
    | SWA_ALLOCATOR_METHODS
    | _UNIFIED
    | {
        "can_reserve",
        "conserve_full_available_size",
        "conserve_swa_available_size",
        "current_full_capacity",
        "current_swa_capacity",
        "draft_virtual_id_space",
        "ensure_capacity",
        "full_p2v_page_table",
        "full_v2p_page_table",
        "reclaim_plan",
        "schedulable_full_available_size",
        "schedulable_swa_available_size",
        "set_disagg_move_gate",
        "set_host_transfer_move_gate",
        "swa_v2p_page_table",
    }
)
_PART = "MultiEndedAllocator"

# Of three parts, one of them afloat (UnifiedMambaSWATokenToKVPoolAllocator): its part frees and moves in methods of its
# own, which are not followed. So it is refused by name.
UNIFIED_ALLOCATORS = {
    "UnifiedMambaTokenToKVPoolAllocator": AllocatorParts(
        methods=_HYBRID_METHODS,
        kinds={"full_attn_allocator": PoolKind.FULL},
        part=_PART,
        part_methods=_PART_METHODS,
    ),
    "UnifiedSWATokenToKVPoolAllocator": AllocatorParts(
        methods=_SWA_METHODS,
        kinds={"full_attn_allocator": PoolKind.FULL, "swa_attn_allocator": PoolKind.SWA},
        part=_PART,
        part_methods=_PART_METHODS,
    ),
}
