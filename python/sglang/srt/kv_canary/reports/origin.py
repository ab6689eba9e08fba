"""Where KV came from that a request has not computed on this server."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """`text` names the sender and what it calls the request. `chunks`: first position of each chunk that it sent."""

    text: str
    chunks: tuple[int, ...] = ()

    def at(self, position: int | None, is_windowed: bool = False) -> str:
        """What is known about the token at `position`. `is_windowed`: in a pool whose window the last chunk brings."""
        if is_windowed and self.chunks:
            count = len(self.chunks)
            return f"{self.text}, chunk {count} of {count} (the window is sent with the last one)"
        if position is None or not self.chunks or position < self.chunks[0]:
            return self.text
        number, count = self._number(position), len(self.chunks)
        first = self.chunks[number - 1]
        until = f"to {self.chunks[number] - 1}" if number < count else "on"
        return f"{self.text}, chunk {number} of {count} (positions from {first} {until})"

    def chunk(self, position: int | None, is_windowed: bool = False) -> int | None:
        """Number of the chunk, from 1, that brought the token at `position`. None: none did, or it is not known."""
        if is_windowed and self.chunks:
            return len(self.chunks)
        return None if position is None else self._number(position) or None

    def _number(self, position: int) -> int:
        return bisect_right(self.chunks, position)
