"""Where the bytes of a slot lie, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..buffer_group import ContentSource
from ..page_table import PageTable


@dataclass(frozen=True, slots=True)
class ContentLayout:
    """Where the bytes of a slot lie in `memory`; the fields of `ContentSource`, `offset` from its start."""

    memory: bytearray
    page_size: int
    page_stride: int
    token_stride: int
    row_bytes: int
    offset: int
    run_slots: int
    run_stride: int
    pages: list[int] | None = None  # place of each page, see `PageTable`; None: pages do not move

    def has_bytes(self, slot: int) -> bool:
        """Whether the page of `slot` is bound."""
        return self.pages is None or 0 < self.pages[slot // self.page_size] < len(self.pages)

    def start_of(self, slot: int) -> int:
        page, in_page = divmod(slot, self.page_size)
        if not self.has_bytes(slot):
            page = 0
        elif self.pages is not None:
            page = self.pages[page]
        start = self.offset + page * self.page_stride
        if not self.run_slots:
            return start + in_page * self.token_stride
        run, in_run = divmod(in_page, self.run_slots)
        return start + run * self.run_stride + in_run * self.token_stride

    def row_of(self, slot: int) -> bytes:
        start = self.start_of(slot)
        return bytes(self.memory[start : start + self.row_bytes])

    @property
    def in_words(self) -> bool:
        """Whether every row starts and ends at a multiple of 4 bytes."""
        parts = (self.page_stride, self.token_stride, self.row_bytes, self.offset, self.run_stride)
        return all(part % 4 == 0 for part in parts)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Layout of one content source: rows of `row_bytes` in pages, all in bytes."""

    row_bytes: int
    page_size: int = 1
    token_gap: int = 0  # between the rows of a page
    page_gap: int = 0  # after the rows of a page
    offset: int = 0  # before the first page
    dtype: torch.dtype = torch.uint8
    run_slots: int = (
        0  # the first slots of all runs of a page, then their second ones, and so on; 0: no runs
    )
    moves: bool = False  # a page table says where its pages lie

    @property
    def run_stride(self) -> int:
        return self.row_bytes + self.token_gap if self.run_slots else 0

    @property
    def token_stride(self) -> int:
        runs = self.page_size // self.run_slots if self.run_slots else 1
        return runs * (self.row_bytes + self.token_gap)

    @property
    def page_stride(self) -> int:
        return self.page_size * (self.row_bytes + self.token_gap) + self.page_gap


CONTENT_SHAPES: dict[str, tuple[RowShape, ...]] = {
    "none": (),
    "two layers": (RowShape(16, dtype=torch.float32), RowShape(16, dtype=torch.float32)),
    "odd bytes": (RowShape(6), RowShape(7, token_gap=2)),
    "three sectors": (RowShape(80, dtype=torch.bfloat16),),
    "paged": (
        RowShape(20, page_size=4, token_gap=4, page_gap=12, offset=8),
        RowShape(36, offset=4),
    ),
    "584 bytes": (RowShape(584),),
    "interleaved": (
        RowShape(12),
        RowShape(4, page_size=16, run_slots=8),
        RowShape(8, page_size=8, run_slots=2, page_gap=12, offset=4),
    ),
    "moving": (
        RowShape(20, page_size=4, moves=True),
        RowShape(40, page_size=4, token_gap=4, page_gap=12, offset=8, moves=True),
    ),
}


class Pages:
    """A page table: SGLang's tensor on the device and its host mirror. At first each page lies in its own place."""

    def __init__(self, page_size: int, num_slots: int, device: str) -> None:
        self.host = list(range(-(-num_slots // page_size)))
        entries = torch.tensor(self.host, dtype=torch.int64, device=device)
        self.table = PageTable(entries, page_size, len(self.host))

    @classmethod
    def of(cls, shapes: Sequence[RowShape], num_slots: int, device: str) -> Pages | None:
        """The one table of `shapes`. None if no pages move."""
        sizes = {shape.page_size for shape in shapes if shape.moves}
        return cls(sizes.pop(), num_slots, device) if sizes else None

    def upload(self) -> None:
        self.table.pages.copy_(torch.tensor(self.host))


class Memory:
    """Bytes of one content source: a device tensor and its host mirror, changed together."""

    def __init__(
        self, shape: RowShape, num_slots: int, device: str, pages: Pages | None = None
    ) -> None:
        size = shape.offset + -(-num_slots // shape.page_size) * shape.page_stride
        item = torch.empty(0, dtype=shape.dtype).element_size()
        size = -(-size // item) * item
        self.host = bytearray(size)
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.shape = shape
        self.pages = pages if shape.moves else None
        self.layout = ContentLayout(
            self.host,
            shape.page_size,
            shape.page_stride,
            shape.token_stride,
            shape.row_bytes,
            shape.offset,
            shape.run_slots,
            shape.run_stride,
            self.pages and self.pages.host,
        )

    def source(self) -> ContentSource:
        s = self.shape
        return ContentSource(
            self.device.view(s.dtype),
            s.page_size,
            s.page_stride,
            s.token_stride,
            s.row_bytes,
            s.offset,
            s.run_slots,
            s.run_stride,
            self.pages and self.pages.table,
        )

    def write(self, slot: int, values: bytes, at: int = 0) -> None:
        """Put `values` at byte `at` of the slot's row."""
        start = self.layout.start_of(slot) + at
        self.host[start : start + len(values)] = values

    def page(self, place: int) -> bytes:
        """The bytes of the page in `place`."""
        start = self.shape.offset + place * self.shape.page_stride
        return bytes(self.host[start : start + self.shape.page_stride])

    def put_page(self, place: int, values: bytes) -> None:
        start = self.shape.offset + place * self.shape.page_stride
        self.host[start : start + len(values)] = values

    def upload(self) -> None:
        self.device.copy_(torch.frombuffer(self.host, dtype=torch.uint8))
