"""Public methods of the token and paged slot allocators. All that free slots lead to hooked ones."""

ALLOCATOR_METHODS = frozenset(
    {
        "alloc",
        "alloc_decode",
        "alloc_extend",
        "available_size",
        "backup_state",
        "clear",
        "debug_print",
        "free",
        "free_group_begin",
        "free_group_end",
        "get_cpu_copy",
        "get_kvcache",
        "load_cpu_copy",
        "merge_and_sort_free",
        "restore_state",
        "size_full",
    }
)
