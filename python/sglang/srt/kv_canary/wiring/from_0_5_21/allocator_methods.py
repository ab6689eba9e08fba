"""Public methods of the slot allocators. All that free slots lead to hooked ones."""

ALLOCATOR_METHODS = frozenset(
    {
        "alloc",
        "alloc_decode",
        "alloc_extend",
        "available_size",
        "check_decode_capacity",
        "clear",
        "create_prefill_budget",
        "debug_print",
        "evict_to_free_tokens",
        "free",
        "free_full",
        "free_full_segment",
        "free_full_segments",
        "free_group_begin",
        "free_group_end",
        "free_page_ids",
        "free_segment",
        "free_segments",
        "get_all_free_pages",
        "get_cpu_copy",
        "get_extend_allocation_demand",
        "get_kvcache",
        "load_cpu_copy",
        "mamba_full_cache_donor",
        "max_new_tokens_for_memory",
        "merge_and_sort_free",
        "prealloc_ceiling_fits",
        "prealloc_fits",
        "prealloc_fits_assumes_reclaim",
        "request_slot_reserve",
        "resize",
        "set_hicache_transfer_done_event",
        "size_full",
        "translate_kv_indices_for_transfer",
        "verify_byte_accounting",
    }
)

# Beside these, of the SWA allocator.
SWA_ALLOCATOR_METHODS = frozenset(
    {
        "alloc_extend_swa_tail",
        "clear_full_to_swa_mapping",
        "free_swa",
        "free_swa_segment",
        "full_available_size",
        "new_pages_available",
        "reclaim_for_prealloc",
        "set_full_to_swa_mapping",
        "size",
        "size_swa",
        "swa_available_size",
        "swa_capacity_and_available",
        "swa_req_ring",
        "swa_ring_cost_tokens",
        "translate_loc_from_full_to_swa",
        "translate_swa_indices_for_transfer",
    }
)
