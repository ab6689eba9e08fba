"""What a prefill server says about the records that it sends with a request's KV, and the boards where it is kept."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

__all__ = ["NO_TOKEN", "Notice", "NoticeBoard", "SentChunks"]

logger = logging.getLogger(__name__)

MAX_NOTICES = 8192  # of requests whose transfer has not ended; those of failed ones stay until then
_LONGEST_TEXT = 200  # characters; a peer is not trusted
_LONGEST_NOTICE = 1 << 20  # bytes
_MOST_TOKENS = 1 << 31  # of a request
_DIFFER = "its ranks number images in different ways"
NO_TOKEN = -1
_MOST_CHUNKS = 512  # of a request that are told apart; the last one stands for all others


@dataclass(frozen=True, slots=True)
class Notice:
    """About one request, from one rank or, merged, from several."""

    server: str  # name of the sender
    has_records: bool
    keeps_content: bool
    why: str = ""  # what is not checked, and why
    has_draft_records: bool = False  # those of the draft model's KV, too
    request: str = ""  # the sender's name of the request
    chunks: tuple[int, ...] = ()  # first position of each chunk
    # A digest of the tokens that stand for images, as the sender numbers them: "" without images. None: not said
    images: str | None = None
    damage: str = ""  # why the sender has failed the request: its KV must not be used
    # What the sender has sampled after the prompt. SGLang sends it beside the KV. NO_TOKEN: not said, or ranks differ
    first_token: int = NO_TOKEN
    keeps_draft_content: bool = False  # `keeps_content` of the draft model's KV
    leaves_draft: bool = False  # another pipeline stage sends the draft model's KV
    lost_states: bool = (
        False  # index keys, or the window: their records came, and the bytes did not
    )

    def to_wire(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_wire(cls, data: bytes) -> Notice:
        """Raises ValueError for anything else. Fields of later versions are ignored."""
        try:
            if len(data) > _LONGEST_NOTICE:
                raise ValueError(f"more than {_LONGEST_NOTICE} bytes")
            said = json.loads(data)
            texts = [str(said[name])[:_LONGEST_TEXT] for name in ("server", "why")]
            flags = [bool(said[name]) for name in ("has_records", "keeps_content")]
            draft = bool(said.get("has_draft_records", False))
            request = str(said.get("request", ""))[:_LONGEST_TEXT]
            chunks = tuple(int(first) for first in said.get("chunks", ())[:_MOST_CHUNKS])
            if any(not 0 <= first < _MOST_TOKENS for first in chunks) or list(chunks) != sorted(
                chunks
            ):
                raise ValueError("chunks that do not follow each other")
            images = said.get("images")
            images = None if images is None else str(images)[:_LONGEST_TEXT]
            damage = str(said.get("damage", ""))[:_LONGEST_TEXT]
            token = int(said.get("first_token", NO_TOKEN))
            if not NO_TOKEN <= token < _MOST_TOKENS:
                raise ValueError("a token that no vocabulary has")
            # An earlier version has only servers on which the same holds of both.
            content = bool(said.get("keeps_draft_content", flags[1]))
            leaves = bool(said.get("leaves_draft", False))
            return cls(
                texts[0],
                *flags,
                texts[1],
                draft,
                request,
                chunks,
                images,
                damage,
                token,
                content,
                leaves,
                bool(said.get("lost_states", False)),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError(
                f"expected a notice about records as JSON, got {len(data)} bytes: {error!r}"
            ) from error

    def merge(self, other: Notice) -> Notice:
        """What holds of the KV that both senders wrote. `other` is the later one.

        It names the request: a room that is used again may still have the notice of a request that failed.
        """
        images = {self.images, other.images} - {None}
        is_same = self.request == other.request
        damage = other.damage or (self.damage if is_same else "")
        tokens = {self.first_token} if is_same else {other.first_token}
        drafts = [notice for notice in (self, other) if not notice.leaves_draft]
        has_records = self.has_records and other.has_records
        sent_drafts = bool(drafts) and all(notice.has_draft_records for notice in drafts)
        if is_same and len(images) > 1:
            return replace(
                other, has_records=False, has_draft_records=False, why=_DIFFER, damage=damage
            )
        return replace(
            self,
            has_records=has_records,
            keeps_content=self.keeps_content and other.keeps_content,
            why=self.why or other.why,
            # Their chains step from the target's records.
            has_draft_records=has_records and sent_drafts,
            keeps_draft_content=all(n.keeps_draft_content for n in drafts),
            leaves_draft=not drafts,
            request=other.request or self.request,
            chunks=other.chunks or self.chunks,
            images=self.images if other.images is None else other.images,
            damage=damage,
            first_token=other.first_token if tokens <= {other.first_token} else NO_TOKEN,
            lost_states=other.lost_states or (is_same and self.lost_states),
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

    def put_received(self, message: Sequence[bytes]) -> None:
        """Put up what a peer sent: the room in digits, and a notice. Anything else is logged and ignored."""
        try:
            room, data = message
            self.put(int(room), Notice.from_wire(data))
        except ValueError as error:
            logger.warning("kv-canary: a notice of a prefill server is ignored: %r", error)

    def damage(self, room: int) -> str:
        """Why a sender has failed the request of `room`. "": none has."""
        with self._lock:
            notice = self._notices.get(room)
        return "" if notice is None else notice.damage

    def take(self, room: int) -> Notice | None:
        """None: the sender said nothing, so it has no canary."""
        with self._lock:
            return self._notices.pop(room, None)


@dataclass(frozen=True, slots=True)
class _Sent:
    request: str = ""
    images: str | None = None
    obstacle: str = ""
    chunks: tuple[int, ...] = ()
    first_token: int = NO_TOKEN
    damage: str = ""  # why its transfer fails
    has_gone: bool = False  # a decode rank has been told that the KV is complete


_NOTHING = _Sent()


@dataclass(slots=True)
class SentChunks:
    """What this prefill server has sent of its requests, by bootstrap room, for their notices.

    The scheduler's thread notes chunks before the transfer's threads send them. Requests whose transfer has ended are
    forgotten as newer ones come.
    """

    _requests: OrderedDict[int, _Sent] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(
        self,
        room: int,
        request: str,
        first: int,
        images: str,
        obstacle: str = "",
        first_token: int = NO_TOKEN,
    ) -> None:
        """The chunk of `request` from position `first` on is sent next. `images`, `first_token`: see Notice.

        `obstacle`: why the peer cannot compare the request's records with what it expects. "": it can. That of one
        chunk holds for all later ones.
        """
        request = request[:_LONGEST_TEXT]
        with self._lock:
            before = self._requests.pop(room, _NOTHING)
            chunks = before.chunks
            if before.request != request or (chunks and first < chunks[-1]):  # another user
                chunks = ()
            if chunks and first > chunks[-1]:
                obstacle = obstacle or before.obstacle
            if len(chunks) < _MOST_CHUNKS and first not in chunks[-1:]:
                chunks = (*chunks, first)
            is_same = before.request == request
            damage, has_gone = (before.damage, before.has_gone) if is_same else ("", False)
            sent = _Sent(request, images, obstacle, chunks, first_token, damage, has_gone)
            self._put(room, sent)

    def fail(self, room: int, request: str, why: str) -> bool:
        """The transfer of `request` must fail. False: its last part has gone already, and nothing is done."""
        request = request[:_LONGEST_TEXT]
        with self._lock:
            before = self._requests.pop(room, _NOTHING)
            if before.request != request:
                before = _Sent(request)
            if not before.has_gone:
                before = replace(before, damage=before.damage or why[:_LONGEST_TEXT])
            self._put(room, before)
            return not before.has_gone or before.damage != ""

    def has_gone(self, room: int, request: str) -> bool:
        """Whether a decode rank may use the KV of `request`."""
        with self._lock:
            sent = self._requests.get(room, _NOTHING)
        return sent.request == request[:_LONGEST_TEXT] and sent.has_gone and not sent.damage

    def forget(self, room: int) -> None:
        """Another request uses `room` from now on."""
        with self._lock:
            self._requests.pop(room, None)

    def let_go(self, room: int) -> str:
        """The last part of the KV of `room` goes now. Why its transfer must fail; "": it need not."""
        with self._lock:
            sent = self._requests.get(room)
            if sent is None:
                return ""
            self._requests[room] = replace(sent, has_gone=True)
            return sent.damage

    def _put(self, room: int, sent: _Sent) -> None:
        self._requests[room] = sent
        if len(self._requests) > MAX_NOTICES:
            self._requests.popitem(last=False)

    def images_of(self, room: int, request: str, first: int) -> str | None:
        """As noted with an earlier chunk of `request` than that from position `first` on. None without one."""
        with self._lock:
            sent = self._requests.get(room, _NOTHING)
        goes_on = sent.request == request[:_LONGEST_TEXT] and sent.chunks
        return sent.images if goes_on and first > sent.chunks[-1] else None

    def complete(self, notice: Notice, room: int) -> Notice:
        """`notice` about the request of `room`, with what was noted of it."""
        with self._lock:
            sent = self._requests.get(room, _NOTHING)
        notice = replace(
            notice,
            request=sent.request,
            chunks=sent.chunks,
            images=sent.images,
            damage=sent.damage,
            first_token=sent.first_token,
        )
        if not sent.obstacle:
            return notice
        return replace(notice, has_records=False, has_draft_records=False, why=sent.obstacle)
