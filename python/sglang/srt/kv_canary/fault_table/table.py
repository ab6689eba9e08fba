"""The rows of the table: every class of `bug-classes` that one machine can stage, and the others with the reason."""

from __future__ import annotations

from functools import partial

from ..reports.classify import BugClass
from . import breaks_drafts as drafts
from . import breaks_rows as rows
from . import breaks_stores as stores
from . import breaks_swa as swa
from . import breaks_tiers as tiers
from . import traffic
from .fault import NotStaged, StagedFault

__all__ = ["FAULTS", "NOT_STAGED"]

_ROW, _FREE, _LATE = BugClass.ROW_SUBSTITUTION, BugClass.USE_AFTER_FREE, BugClass.LATE_WRITE

_ROWS = (
    StagedFault(
        "row-recycled",
        "sgl#18803",
        "request row recycled while its request still reads it",
        "mha",
        traffic.staggered,
        rows.row_recycled,
        _ROW,
    ),
    StagedFault(
        "freed-while-queued",
        "sgl#29353",
        "ownership freed on the schedule stream while a forward is queued",
        "mha",
        traffic.together,
        rows.freed_while_queued,
        _FREE,
    ),
    StagedFault(
        "duplicates-kept",
        "mini-sglang#142",
        "row keeps duplicate slots that the prefix cache has freed",
        "mha",
        traffic.twins,
        rows.duplicates_kept_in_row,
        _FREE,
    ),
    StagedFault(
        "stale-reference",
        "vllm#52234",
        "prefix lookup answers with the previous prompt's slots",
        "mha",
        traffic.two_prompts,
        rows.stale_prefix_reference,
        _ROW,
    ),
    StagedFault(
        "finished-row-writes",
        "tpu-inference#3449",
        "finished row goes on writing",
        "mha",
        traffic.early_ends,
        stores.finished_row_writes,
        _LATE,
    ),
    StagedFault(
        "late-write-after-abort",
        "sgl#24527",
        "abort frees the pages, the late write lands in the next request",
        "mha",
        partial(traffic.aborted, tokens=30),
        stores.late_write_after_abort,
        _LATE,
    ),
    StagedFault(
        "chunk-stored-late",
        "sgl#38319",
        "chunk is in the prefix cache before it is stored",
        "mha",
        traffic.chunks,
        stores.chunk_stored_late,
        _LATE,
    ),
    StagedFault(
        "padding-writes-last-slot",
        "vllm#43810",
        "padding index -1 overwrites the last slot",
        "mha",
        traffic.together,
        stores.padding_writes_last_slot,
        _LATE,
    ),
    StagedFault(
        "unwritten-after-reuse",
        "vllm#35219",
        "reused slots are read before they are stored",
        "mha",
        traffic.prefix_hit,
        rows.claims_slots_not_stored,
        BugClass.NEVER_STORED,
    ),
    StagedFault(
        "block-table-overwritten",
        "trt#15546",
        "host buffer of the block table overwritten before its copy",
        "mha",
        traffic.together,
        rows.block_table_overwritten,
        _ROW,
    ),
    StagedFault(
        "namespaces-collide",
        "sgl#24638",
        "prefix key ignores the tenant",
        "mha",
        traffic.tenants,
        rows.namespaces_collide,
        _ROW,
    ),
    StagedFault(
        "kept-across-update",
        "RLinf#96",
        "old KV kept after a weight update",
        "mha",
        traffic.weight_update,
        rows.kept_across_weight_update,
        BugClass.STALE_WEIGHTS,
    ),
    StagedFault(
        "store-lost",
        "vllm#47574",
        "layers do not store a token: the slot keeps its old bytes",
        "mha",
        traffic.together,
        stores.store_lost,
        BugClass.NEVER_STORED,
        gap="the fingerprint is taken after the forward: of the old bytes",
    ),
    StagedFault(
        "padding-slot-poisoned",
        "sgl#32477",
        "padding writes NaN to slot 0",
        "mha",
        traffic.together,
        stores.padding_slot_poisoned,
        BugClass.BYTES_DAMAGED,
        gap="slot 0 has no record: SGLang writes anything to it",
    ),
    StagedFault(
        "pages-for-slots",
        "trt#13124",
        "page number used as slot number",
        "paged",
        traffic.prefix_hit,
        rows.pages_for_slots,
        _ROW,
    ),
    StagedFault(
        "partial-page-rewritten",
        "vllm#50749",
        "partial page quantised again with each token",
        "paged",
        traffic.together,
        stores.partial_page_rewritten,
        _LATE,
    ),
    StagedFault(
        "finished-row-writes-mla",
        "tpu-inference#3449",
        "finished row goes on writing",
        "mla",
        traffic.early_ends,
        stores.finished_row_writes,
        _LATE,
    ),
    StagedFault(
        "stale-reference-mla",
        "vllm#52234",
        "prefix lookup answers with the previous prompt's slots",
        "mla",
        traffic.two_prompts,
        rows.stale_prefix_reference,
        _ROW,
    ),
    StagedFault(
        "freed-while-queued-mla",
        "sgl#29353",
        "ownership freed on the schedule stream while a forward is queued",
        "mla",
        traffic.together,
        rows.freed_while_queued,
        _FREE,
    ),
)
_SWA = tuple(
    StagedFault(name, issue, title, "swa", drive, breaks, BugClass.SWA_MAPPING)
    for name, issue, title, drive, breaks in (
        (
            "window-freed-early",
            "vllm-ascend#13501",
            "window blocks freed under a running step",
            traffic.sliding,
            swa.window_freed_early,
        ),
        (
            "tombstone-not-cleared",
            "sgl#27586",
            "stale tombstone mapping frees a live slot",
            traffic.abort_beside,
            swa.tombstone_not_cleared,
        ),
        (
            "mapping-kept-on-reuse",
            "sgl#25805",
            "stale mapping on a recycled slot",
            traffic.sliding,
            swa.mapping_kept_on_reuse,
        ),
        (
            "grouped-free-after-remap",
            "sgl#36381",
            "grouped free resolves a remapped index",
            traffic.aborted,
            swa.grouped_free_after_remap,
        ),
        (
            "two-share-one",
            "sgl#35501",
            "two full slots share one SWA slot",
            traffic.sliding,
            swa.two_slots_share_one,
        ),
        (
            "free-rounded-to-page",
            "sgl#36457",
            "page-rounded free clears a neighbour's mapping",
            traffic.sliding,
            swa.free_rounded_to_page,
        ),
        (
            "cached-translation",
            "sgl#25889",
            "cached translation is stale after a remap",
            traffic.sliding,
            swa.cached_translation,
        ),
    )
)
_TIERS = (
    StagedFault(
        "load-not-fenced",
        "sgl#36738",
        "forward does not wait for the load-back",
        "hicache",
        traffic.load_back,
        tiers.load_not_fenced,
        _LATE,
    ),
    StagedFault(
        "host-slots-reused",
        "sgl#31427",
        "host slots released before the load is acknowledged",
        "hicache",
        traffic.load_back,
        tiers.host_slots_reused,
        _LATE,
    ),
    StagedFault(
        "evicted-while-sent",
        "trt#12542",
        "block evicted during an asynchronous send",
        "hicache",
        traffic.load_back,
        tiers.evicted_while_sent,
        _LATE,
    ),
    StagedFault(
        "another-prompts-pages",
        "trt#8813",
        "offloaded pages of another prompt are loaded",
        "hicache",
        traffic.load_back,
        tiers.loaded_from_another_prompt,
        _LATE,
    ),
    StagedFault(
        "queued-step-under-load",
        "vllm#45357",
        "queued step writes to a freed block that a transfer fills",
        "hicache",
        traffic.load_back,
        tiers.queued_step_writes_under_load,
        _LATE,
    ),
    StagedFault(
        "another-key-in-storage",
        "LMCache#4991",
        "failed store stays visible: another request's KV comes back",
        "storage",
        traffic.fetch,
        tiers.another_key_in_storage,
        _LATE,
    ),
)
_DRAFTS = (
    StagedFault(
        "draft-positions",
        "sgl#25015",
        "draft positions off by one",
        "eagle",
        traffic.together,
        drafts.draft_positions_off_by_one,
        BugClass.WRONG_POSITION,
    ),
    StagedFault(
        "draft-never-written",
        "sgl#19897",
        "never-written draft KV is read",
        "eagle",
        traffic.together,
        drafts.draft_never_written,
        BugClass.NEVER_STORED,
    ),
    StagedFault(
        "draft-row-recycled",
        "sgl#18746",
        "request row recycled while draft-extend still reads it",
        "eagle",
        partial(traffic.staggered, answer=40),
        rows.row_recycled,
        _ROW,
    ),
    StagedFault(
        "draft-token-at-chunk-end",
        "sgl#26329",
        "draft is fed the target's prediction at a chunk's end",
        "eagle",
        traffic.together,
        drafts.prediction_at_chunk_end,
        BugClass.ALTERED_TOKEN,
        gap="0.5.12.post1 does so itself on every chunk, so the last token of a chunk is not compared",
    ),
)
FAULTS: dict[str, StagedFault] = {fault.id: fault for fault in (*_ROWS, *_SWA, *_TIERS, *_DRAFTS)}

_NO_STATES = "states of linear-attention models are not covered, and no such model runs on a CPU"
_NO_DSV4 = "DeepSeek-V4 is not served without a GPU of sm_90; its pool has tests of its own"
NOT_STAGED: tuple[NotStaged, ...] = (
    NotStaged("sgl#30339", "per-request ring is not in the prefix cache", _NO_DSV4),
    NotStaged("sgl#34189", "write padding of the compression state", _NO_DSV4),
    NotStaged(
        "vllm#56104",
        "first failed handle frees blocks under sibling writes",
        "needs two servers and Mooncake; `test_e2e_disaggregation.py` stages a write that comes late",
    ),
    NotStaged(
        "vllm#44238",
        "transfer is complete before its bytes are visible",
        "needs two servers and Mooncake; `test_e2e_disaggregation.py` damages what is in transit",
    ),
    NotStaged(
        "Mooncake#2236",
        "index_k is not stored in the third tier",
        "the attention kernels of DSA run on GPUs only",
    ),
    NotStaged(
        "sgl#28254",
        "draft is fed the target's prediction for resumed requests",
        "the same gap as draft-token-at-chunk-end",
    ),
    NotStaged(
        "sgl#17338",
        "draft KV is not restored by HiCache",
        "HiCache with speculative decoding is refused",
    ),
    NotStaged(
        "sgl#27338",
        "kv_indices of a draft tree are under-allocated",
        "no KV slot is touched: a tool that checks memory accesses finds it",
    ),
    NotStaged("sgl#29973", "wrong or zero state snapshot is cached", _NO_STATES),
    NotStaged("sgl#33810", "sentinel -1 writes below the pool", _NO_STATES),
    NotStaged(
        "sgl#24198",
        "k and v scales are missing on the read path",
        "the stored bytes are right, and how attention scales them is not checked",
    ),
)
