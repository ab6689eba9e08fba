"""What a prefill server says about the records that it sends with a request's KV, and the board where it is kept."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace

__all__ = ["Notice", "NoticeBoard"]

MAX_NOTICES = 8192  # of requests whose transfer has not ended; those of failed ones stay until then
_LONGEST_TEXT = 200  # characters; a peer is not trusted


@dataclass(frozen=True, slots=True)
class Notice:
    """About one request, from one rank or, merged, from several."""

    server: str  # name of the sender
    has_records: bool
    keeps_content: bool
    why: str = ""  # what is not checked, and why

    def to_wire(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Notice:
        """Raises ValueError for anything else. Fields of later versions are ignored."""
        try:
            said = json.loads(data)
            texts = [str(said[name])[:_LONGEST_TEXT] for name in ("server", "why")]
            return cls(texts[0], bool(said["has_records"]), bool(said["keeps_content"]), texts[1])
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"expected a notice about records as JSON, got {len(data)} bytes: {error!r}"
            ) from error

    def merge(self, other: Notice) -> Notice:
        """What holds of the KV that both senders wrote."""
        return replace(
            self,
            has_records=self.has_records and other.has_records,
            keeps_content=self.keeps_content and other.keeps_content,
            why=self.why or other.why,
        )


class NoticeBoard:
    """Notices by bootstrap room. The transfer's thread puts them up, the scheduler's thread takes them down."""

    def __init__(self) -> None:
        self._notices: OrderedDict[int, Notice] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def put(self, room: int, notice: Notice) -> None:
        with self._lock:
            before = self._notices.get(room)
            self._notices[room] = notice if before is None else before.merge(notice)
            if len(self._notices) > MAX_NOTICES:
                self._notices.popitem(last=False)

    def take(self, room: int) -> Notice | None:
        """None: the sender said nothing, so it has no canary."""
        with self._lock:
            return self._notices.pop(room, None)
