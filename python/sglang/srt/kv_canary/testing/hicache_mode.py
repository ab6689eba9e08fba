"""What a server with HiCache gets: arguments for a small device pool, and fill-ins where there is no GPU."""

from __future__ import annotations

import torch

from .fill_ins import hicache_on_cpu, pageable_memory

__all__ = ["FILL_INS", "ON_CPU", "SMALL_POOL"]

ON_CPU = not torch.cuda.is_available()
FILL_INS = (hicache_on_cpu, pageable_memory) if ON_CPU else ()
# Three prompts of 100 tokens fit on the device, all of them in host memory.
SMALL_POOL = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 6.0,
    "max_total_tokens": 320,
    "enable_cache_report": True,
    **({"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"} if ON_CPU else {}),
}
