"""How work is cut into blocks. Triton kernels and reference share it, so both cover the same slots."""

from __future__ import annotations

from ..buffer_group import CanaryBufferGroup, ContentSource
from ..config import ContentMode
from ..record import CONTENT_SOURCE_SALT, SECTOR_COST_BYTES, mix64, to_signed64

VERIFY_BLOCK = 256  # slots of one request per verify work item
WRITE_TILE = 1024  # tokens of one request per chain scan work item
# 2^32 over the golden ratio, whose multiples spread most evenly (Knuth, The Art of Computer Programming 3, 6.4).
TURN_MULTIPLIER = 0x9E3779B9


def blocks_between_visits(total_blocks: int, budget_slots: int) -> int:
    """k: every k-th block is verified, so that at most about `budget_slots` slots are."""
    budget_blocks = max(1, budget_slots // VERIFY_BLOCK)
    return max(1, -(-total_blocks // budget_blocks))


def slots_between_visits(total_slots: int, budget_slots: int) -> int:
    """k: the content of every k-th position of a request is re-read."""
    return max(1, -(-total_slots // max(1, budget_slots)))


def turn_of(forward: int, k: int) -> int:
    """The turn, 0 .. k - 1, of `forward`: the fraction of forward / golden ratio, in k-ths.

    Each turn comes within 2 k forwards. Some launches take part in every n-th forward only (drafts, pipeline stages).
    There, each turn comes within 6 k of them (n <= 8, k <= 64, counted over 2,000 forwards). `forward % k` would never
    reach some turns where n and k have a common factor.
    """
    return ((forward * TURN_MULTIPLIER & 0xFFFFFFFF) * k) >> 32


def content_unit(sources: tuple[ContentSource, ...]) -> int:
    """Bytes per hashed word: 4 where every source is laid out in multiples of 4 bytes, else 1."""
    parts = [(s.row_bytes, s.page_stride, s.run_stride, s.token_stride, s.address) for s in sources]
    return 4 if all(p % 4 == 0 for part in parts for p in part) else 1


def source_key(index: int) -> int:
    """The odd key of a half's content source. int64, see `record.CONTENT_BASE`."""
    return to_signed64(mix64(index + CONTENT_SOURCE_SALT) | 1)


def refuse_strided(group: CanaryBufferGroup) -> None:
    """Raises ValueError for a group whose slots stand for several tokens."""
    if group.stride != 1:
        raise ValueError(
            f"kv-canary: a slot of {group.kind.value} stands for {group.stride} tokens; expected a group with a slot "
            "for each token"
        )


def content_bytes_per_slot(
    group: CanaryBufferGroup, mode: ContentMode, sector_bytes: int = SECTOR_COST_BYTES
) -> int:
    """Bytes that one content check of a slot takes from the budget, over all halves.

    `sector_bytes`: what a sector of mode `partial` takes.
    """
    sources = group.k_content + group.v_content
    if mode is ContentMode.PARTIAL:
        return sector_bytes * len(sources)
    return sum(s.row_bytes for s in sources)


def content_bytes_per_token(groups: tuple[CanaryBufferGroup, ...], mode: ContentMode) -> int:
    """Bytes that content checks of one token take from the budget, over all `groups`."""
    return sum(-(-content_bytes_per_slot(group, mode) // group.stride) for group in groups)


def content_slots_per_forward(
    groups: tuple[CanaryBufferGroup, ...], mode: ContentMode, budget_bytes: int
) -> tuple[int, ...]:
    """Slots of each group whose content one forward re-reads. They stand for equally many tokens and fit the budget.

    Each group has at least one. The batch decides how many there are, and the host does not know it.
    """
    tokens = budget_bytes // max(1, content_bytes_per_token(groups, mode))
    return tuple(max(1, tokens // group.stride) for group in groups)
