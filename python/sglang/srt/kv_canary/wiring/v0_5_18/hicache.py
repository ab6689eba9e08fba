"""Hooks on HiCache. An engine of its own copies, and all prefix caches but one are the unified tree."""

from __future__ import annotations

from ..hicache import CopyStreams
from ..until_0_5_17.hicache import UNIFIED_TREE, tree_hooks

HOOKS = tree_hooks(
    CopyStreams(
        to_host=lambda controller: controller.l2_transfer_engine.device_to_host_stream,
        to_device=lambda controller: controller.l2_transfer_engine.host_to_device_stream,
    ),
    (UNIFIED_TREE,),
)
