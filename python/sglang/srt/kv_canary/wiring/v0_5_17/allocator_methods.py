"""Public methods of the slot allocators. All that free slots lead to hooked ones."""

ALLOCATOR_METHODS = frozenset(
    {
        "alloc",
        "alloc_decode",
        "alloc_extend",
        "available_size",
        "clear",
        "debug_print",
        "free",
        "free_group_begin",
        "free_group_end",
        "free_segment",
        "free_segments",
        "get_cpu_copy",
        "get_kvcache",
        "load_cpu_copy",
        "merge_and_sort_free",
        "resize",
        "size_full",
    }
)

# Beside these, of the SWA allocator.
SWA_ALLOCATOR_METHODS = frozenset(
    {
        "alloc_extend_swa_tail",
        "free_swa",
        "full_available_size",
        "new_pages_available",
        "set_full_to_swa_mapping",
        "size",
        "size_swa",
        "swa_available_size",
        "translate_loc_from_full_to_swa",
    }
)
