"""The records of pages in a storage backend: stored before their page, and compared with it when it is fetched.

The threads of the backend call it. The server that creates a page's records also stores the page. So they fit each
other, also where several servers share a folder.

There are two exceptions. Records that a server has taken over from another one, which it took for ended, may not fit.
Records may also vanish while their server stores the page, and another server creates new ones. So each server
announces what it stores. A difference to records that were taken over is no finding, nor is one while a server stores
the page: the page is not used.

A disk that fails is no error of the canary. What it affects is not used, and the log says so.

Pages are stored under a name of the server's own. When all that it has stored may come from damage, it revokes the
name, and takes another.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from .. import record
from ..record import Mode, State
from ..reports.complaints import Complaints
from ..reports.tier_finding import Finding
from .host_records import SlotRecords
from .host_tier import HostTier
from .record_files import TAKEN_OVER, NoHardLinksError, RecordFiles
from .stored_records import NAME_BYTES, Unusable, name_in, pack, unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_PREFETCHES = 4096  # whose start is remembered, and of which some may have ended
MOST_FORGOTTEN = 65536  # keys: only prefetches that are under way need them
ABANDONED_S = 60.0  # records whose page has not come by then belong to a server that has ended


class _Trouble(NamedTuple):
    """What a disk that fails prevents."""

    cannot: str  # before the folder
    outcome: str


_UNWRITTEN = _Trouble(
    "store the records of a page in",
    "The page is left out of the storage, and SGLang computes it again. No check is lost. Make room in the folder, or "
    "let the server write to it",
)
_UNLINKED = _Trouble(
    "store the records of a page in",
    "Without them, two servers could store one page. So nothing is stored there, and SGLang computes it again. No "
    "check is lost. Use a folder on another file system, or serve without a storage backend",
)
_UNSETTLED = _Trouble(
    "look after stored pages in", "Records or pages that no server can use may stay there"
)
_UNREADABLE = _Trouble(
    "read the records of a page in",
    "The page is not used, and SGLang computes it again. No check is lost",
)
_UNREMOVED = _Trouble(
    "remove damaged pages from", "This server does not use them. Other servers may"
)
_STILL_REVOKED = _Trouble("remove a revoked page from", "No server uses it, nor stores it again")
_UNREVOKED = _Trouble(
    "revoke stored pages in",
    "They may come from damage. This server does not use them. Others do until the next drop of the cache, which tries "
    "it again",
)

_SAID = {
    Unusable.MISSING: "it has no records, as pages that a server without the canary has stored",
    Unusable.OTHER: "its records are of another version, model, weights, setting, prefix or server",
    Unusable.REVOKED: "the server that has stored it has found damage since",
}


class Weights(Protocol):
    """What the store must know of the server now."""

    @property
    def forward_ct(self) -> int: ...

    @property
    def weights_since(self) -> int:
        """Last forward before the last weight update."""

    @property
    def loads_ct(self) -> int:
        """The forward that records of what is loaded now name."""


@dataclass(slots=True)
class _Start:
    """Where the next page of a prefetch continues."""

    position: int
    chain: int
    forgets: int  # how often keys had been forgotten
    token: int = 0  # index in the prefetch's own tokens
    operation: weakref.ref[Any] | None = None  # SGLang's, of the prefetch. None: it is being made

    @property
    def has_ended(self) -> bool:
        """Nobody can ask for its pages any more."""
        return self.operation is not None and self.operation() is None


@dataclass(slots=True)
class _Storing:
    """A page that is under way to storage."""

    announcement: Path
    is_wanted: bool = True
    records: bytes = b""  # what their file holds, as long as it is this server's


class _Stored(NamedTuple):
    """The records of a page in storage."""

    data: bytes | None  # None: there are none
    name: bytes | None  # of who has stored the page
    is_revoked: bool
    is_taken_over: bool  # they may not fit the page


class Known(NamedTuple):
    """The file with the records of a page, as it was before the page was read."""

    data: bytes | None  # None: there was none


class Claim(NamedTuple):
    """The pages of one batch that are in the storage now, or will be."""

    pages: list[int]  # the backend has them, or is to store them
    ours: list[str]  # keys whose records are new: for `settle`
    is_whole: bool  # False: records of some pages could not be written, so these pages are left out


class PageStore:
    """Beside one storage backend. Host slots are those of whole pages, int64 on the CPU."""

    def __init__(
        self,
        tier: HostTier,
        backend: Any,
        name: str,  # of the backend, in findings
        files: RecordFiles,
        page_size: int,
        server: Weights,
        identity: Callable[[], bytes],  # see `stored_records.identity_of`
    ) -> None:
        self.backend = backend
        self.name = name
        self.files = files
        self.page_size = page_size
        self.stored = 0  # pages
        self.fetched = 0
        self.unwritable = (
            0  # pages that were not stored, because their records could not be written
        )
        self.unreadable = 0  # pages that were not used, because their records could not be read
        self.unusable: Counter[Unusable] = Counter()  # pages
        self._said: set[Unusable] = set()  # in the log
        self._tier = tier
        self._server = server
        self._identity = identity
        self._complaints: defaultdict[_Trouble, Complaints] = defaultdict(Complaints)
        self._starts: dict[str, _Start] = {}  # by request id
        self._most_starts = MOST_PREFETCHES  # until those that have ended are looked for
        self._lock = threading.Lock()  # of what follows
        self._forgets = 0
        self._forgotten: OrderedDict[str, int] = OrderedDict()  # key -> number of the last time
        self._undeletable: set[str] = set()
        self._storing: dict[str, _Storing] = {}  # by key
        self._own_name = os.urandom(NAME_BYTES)
        self._has_stored = False  # under this name
        self._names_to_revoke: list[bytes] = []
        self._revoked_at = -1  # forward: what was computed until then is not stored any more

    # Host to storage

    def claim(
        self, keys: Sequence[str], host_slots: torch.Tensor, page_exists: Callable[[str], bool]
    ) -> Claim:
        """Store the records of pages that are about to be stored.

        A page is left out if it has no record or if another server is storing it. So is one whose records cannot be
        written.
        Call `settle` with the claim's keys when the backend is done.
        """
        unwritable, identity = self.unwritable, self._identity()
        with self._lock:
            name, since = self._own_name, max(self._server.weights_since, self._revoked_at)
            self._has_stored = True
        slots = dict(zip(keys, host_slots.split(self.page_size), strict=True))
        missing = [key for key in keys if not page_exists(key)]
        for key in slots.keys() - {*missing}:
            self.files.lose_sight(key)
        ours = self._claim_pages(missing, slots, since, (identity, name)) if missing else []
        left_out = {*missing} - {*ours}  # what the backend has, it keeps
        self.stored += len(ours)
        return Claim(
            [number for number, key in enumerate(keys) if key not in left_out],
            ours,
            is_whole=self.unwritable == unwritable,
        )

    def _claim_pages(
        self,
        keys: Sequence[str],
        host_slots: Mapping[str, torch.Tensor],
        since: int,  # forward: only what later ones have computed is stored
        whose: tuple[bytes, bytes],  # identity, and the name under which it is stored
    ) -> list[str]:
        """Which of these pages this server stores. Their records are in the folder then."""
        try:
            announcement = self.files.announce(keys)
        except OSError as error:
            self._leave_out(len(keys), error)
            return []
        ours = [
            key
            for key in keys
            if self._claim_page(key, host_slots[key], since, whose, announcement)
        ]
        if not ours:
            self._attempt(_UNSETTLED, self.files.retract, announcement)
        return ours

    def _claim_page(
        self,
        key: str,
        slots: torch.Tensor,
        since: int,
        whose: tuple[bytes, bytes],
        announcement: Path,
    ) -> bool:
        """Whether this server stores the page. Its records are in the folder then."""
        page, records = _Storing(announcement), None
        with self._lock:  # before its records are read: whoever forgets a page clears them first
            self._storing[key] = page
        try:
            known = self._tier.records.get(slots)
            if _are_written_after(since, known, self._server.loads_ct):
                records = self._create(key, pack(known, *whose))
        except OSError as error:
            self._leave_out(1, error)
        finally:
            if records is None:
                with self._lock:
                    del self._storing[key]
            else:
                self.files.lose_sight(key)
                page.records = records
        return records is not None

    def _leave_out(self, pages: int, error: OSError) -> None:
        """SGLang never replaces a page, so none is stored without records."""
        self.unwritable += pages
        trouble = _UNLINKED if isinstance(error, NoHardLinksError) else _UNWRITTEN
        self._complain(trouble, error, f". {self.unwritable} pages so far")

    def _create(self, key: str, data: bytes) -> bytes | None:
        """What the file of the records holds then. None: another server stores the page."""
        if self.files.create(key, data):
            return data
        stored = self._read(key)
        if stored.name == name_in(data):  # this server's: their page is gone, as after an eviction
            if stored.is_taken_over:
                return self.files.take_over(key, data)
            self.files.remove(key)
            return data if self.files.create(key, data) else None
        if self.files.unchanged_s(key) < ABANDONED_S:
            return None
        # Its server may live, and store its page now or have just stored it: nobody can tell. The mark stays.
        return self.files.take_over(key, data)

    def give_up_present(self, keys: Sequence[str]) -> None:
        """Of these pages, which this server is about to store, those that are there are of a server without records.

        The backend keeps them, and their bytes need not be this server's. So they go with the records in `settle`.
        """
        present = [key for key in keys if self.files.has_page(key)]
        with self._lock:
            for key in present:
                if key in self._storing:
                    self._storing[key].is_wanted = False

    def settle(self, keys: Sequence[str], page_exists: Callable[[str], bool]) -> None:
        """The backend has stored these pages, or has failed to."""
        with self._lock:
            pages = {key: self._storing.pop(key, None) for key in keys}
        announcements, unsettled = set(), set()
        for key, page in pages.items():
            if page is None:
                continue
            announcements.add(page.announcement)
            if page.is_wanted:
                done = self._attempt(_UNSETTLED, self._settle_page, key, page.records, page_exists)
            else:
                done = self._remove([key])
            if not done:
                unsettled.add(page.announcement)
        # Last: a page that is not this server's to store may lie there until now, or longer.
        for announcement in announcements - unsettled:
            self._attempt(_UNSETTLED, self.files.retract, announcement)

    def _settle_page(self, key: str, records: bytes, page_exists: Callable[[str], bool]) -> bool:
        if self.files.read(key) != records:
            # Taken over or removed since. The page alone goes: a server that stores it now still has its records,
            # and removes them itself if it finds no page.
            self.files.remove_page(key)
        elif not page_exists(key):
            # Whoever takes them over at this moment finds no records when it settles, and removes its page.
            self.files.remove(key)
            self.files.page_gone(key)
        return True

    def forget(self, keys: Sequence[str]) -> None:
        """Remove pages and their records. What is stored or fetched at this moment is not used, either.

        The records of these pages in host memory must be cleared already. This server does not use files that cannot be
        removed.
        """
        with self._lock:
            self._forgets += 1
            for key in keys:
                self._forgotten[key] = self._forgets
                self._forgotten.move_to_end(key)
                if key in self._storing:
                    self._storing[key].is_wanted = False
            while len(self._forgotten) > MOST_FORGOTTEN:
                self._forgotten.popitem(last=False)
        self._remove(keys)

    def revoke(self) -> None:
        """All that was computed until now may come from damage. No server uses what this one has stored of it.

        A name that cannot be revoked is tried again with the next one.
        """
        with self._lock:
            self._revoked_at = self._server.loads_ct
            if self._has_stored:
                self._names_to_revoke.append(self._own_name)
                self._own_name, self._has_stored = os.urandom(NAME_BYTES), False
        self._attempt(_UNREVOKED, self._revoke_names)

    def _revoke_names(self) -> None:
        while self._names_to_revoke:
            self.files.revoke(self._names_to_revoke[-1])
            self._names_to_revoke.pop()

    def _remove(self, keys: Sequence[str]) -> bool:
        """Whether all could be removed."""
        stay = [key for key in keys if not self._attempt(_UNREMOVED, self._remove_files, key)]
        with self._lock:
            self._undeletable.update(stay)
        return not stay

    def _remove_files(self, key: str) -> bool:
        self.files.remove_page(key)  # first: whoever then creates new records finds no old page
        self.files.remove(key)
        return True

    def _is_forgotten(self, key: str, start: _Start) -> bool:
        """Since the prefetch began, or for good."""
        with self._lock:
            return key in self._undeletable or self._forgotten.get(key, 0) > start.forgets

    # Storage to host

    def begin(self, request_id: str, position: int, chain: int | None) -> None:
        """A prefetch begins at `position`, after a token with `chain`. None: unknown, so nothing is used.

        `made` has to follow: SGLang decides only then, and may fetch the first page before it says so.
        """
        self._starts.pop(request_id, None)
        if chain is not None:
            self._starts[request_id] = _Start(position, chain, self._forgets)

    def made(self, request_id: str, operation: object | None) -> None:
        """SGLang fetches pages as long as `operation` exists. None: it has made no prefetch."""
        if operation is None:
            self._starts.pop(request_id, None)
        elif request_id in self._starts:
            self._starts[request_id].operation = weakref.ref(operation)
        if len(self._starts) > self._most_starts:
            for name in [name for name, start in self._starts.items() if start.has_ended]:
                del self._starts[name]
            self._most_starts = max(MOST_PREFETCHES, 2 * len(self._starts))

    def recorded(self, keys: Sequence[str]) -> int:
        """How many of the stored pages `keys`, from the first on, have records."""
        for number, key in enumerate(keys):
            exists = self._attempt(_UNREADABLE, self.files.exists, key)
            if not exists:
                if exists is None:
                    self.unreadable += 1
                else:
                    self._refuse_without_records(key)
                return number
        return len(keys)

    def known(self, key: str) -> Known | None:
        """For `accept`, and asked for before the page is read. None: the disk fails, so the page is not used.

        The page may be evicted and stored again at any time. Records from before and after tell its bytes from those.
        """
        known = self._attempt(_UNREADABLE, self._known, key)
        if known is None:
            self.unreadable += 1
        return known

    def _known(self, key: str) -> Known:
        return Known(self.files.read(key))

    def _read(self, key: str) -> _Stored:
        return self._judged(self._known(key))

    def _judged(self, known: Known) -> _Stored:
        data = known.data
        if data is None:
            return _Stored(None, None, is_revoked=False, is_taken_over=False)
        records = data.removeprefix(TAKEN_OVER)
        name = name_in(records)
        is_revoked = name is not None and self.files.is_revoked(name)
        return _Stored(records, name, is_revoked, is_taken_over=data.startswith(TAKEN_OVER))

    def accept(
        self,
        request_id: str,
        key: str,
        tokens: Sequence[int],
        host_slots: torch.Tensor,
        known: Known,
    ) -> bool:
        """Whether the page whose bytes are now at `host_slots` may be used. Its records are then there, too.

        `tokens`: all of the prefetch.
        """
        start = self._starts.get(request_id)
        stored = self._attempt(_UNREADABLE, self._judged, known)
        if start is not None and self._is_forgotten(key, start):
            return False
        if stored is None:
            self.unreadable += 1
            return False
        data, name = stored.data, stored.name
        if start is None:  # the page may have records, so nothing is said of it
            self.unusable[Unusable.MISSING] += 1
            return False
        if data is None:
            return self._refuse_without_records(key)
        if stored.is_revoked:
            self._attempt(_STILL_REVOKED, self._remove_files, key)  # so that it can be stored anew
            return self._refuse(Unusable.REVOKED)
        parts = len(self._tier.parts)
        records = unpack(data, self._identity(), self.page_size, parts)
        if records is Unusable.DAMAGED:
            self._tier.report(Finding.of_records(self.name, key, self._tier.groups[0].kind))
        if isinstance(records, Unusable):
            return self._refuse(records)
        if name != self._own_name:
            self._stamp(records)
        mine = tokens[start.token : start.token + self.page_size]
        if not self._continues(records, start, mine):
            if len(mine) == len(records) and not _occurs_in(tokens, records):
                self._report_other_tokens(records, start, mine, key)
                return self._refuse(Unusable.DAMAGED)
            return self._refuse(Unusable.OTHER)
        found: list[Finding] = []
        if _reporting_to(found.append, self._tier).damaged(
            host_slots.numpy(), records.words.numpy(), self.name, key
        ):
            return self._refuse_unlike(key, stored, found)
        start.position += self.page_size
        start.token += self.page_size
        start.chain = int(records.words[-1, 0, record.WORD_CHAIN])
        self._stamp(records)
        self._tier.records.put(host_slots, records)
        if self._is_forgotten(key, start):  # in the meantime
            self._tier.records.clear(host_slots)
            return False
        self.fetched += 1
        return True

    def _refuse_unlike(self, key: str, stored: _Stored, found: Sequence[Finding]) -> bool:
        """The bytes are not those of the records. That is damage if both are of the same server."""
        is_stray = self._attempt(_UNREADABLE, self._may_be_stray, key, stored)
        unchanged = self._attempt(_UNREADABLE, self._is_still_there, key, stored)  # in this order
        if is_stray is None or unchanged is None:
            self.unreadable += 1
            return False
        if is_stray:
            self._attempt(_UNSETTLED, self.files.remove_page, key)  # so that it can be stored anew
        if is_stray or not unchanged:
            return self._refuse(Unusable.OTHER)
        for finding in found:
            self._tier.report(finding)
        return self._refuse(Unusable.DAMAGED)

    def _may_be_stray(self, key: str, stored: _Stored) -> bool:
        """Whether the page may be of another server than its records."""
        return stored.is_taken_over or self.files.is_being_stored(key)

    def _is_still_there(self, key: str, stored: _Stored) -> bool:
        """A server removes a stray page of its own before it retracts its announcement."""
        return self.files.has_page(key) and self._read(key) == stored

    def _refuse_without_records(self, key: str) -> bool:
        has_page = self._attempt(_UNREADABLE, self.files.has_page, key)
        if has_page:
            return self._refuse(Unusable.MISSING)
        if has_page is None:
            self.unreadable += 1
        else:  # it was evicted since
            self.files.page_gone(key)
        return False

    def _refuse(self, why: Unusable) -> bool:
        self.unusable[why] += 1
        if why in _SAID and why not in self._said:
            self._said.add(why)
            logger.warning("kv-canary: a page in storage is not used: %s. Said once", _SAID[why])
        return False

    def _report_other_tokens(
        self, records: SlotRecords, start: _Start, tokens: Sequence[int], key: str
    ) -> None:
        for words, position, token in zip(
            records.words[:, 0], count(start.position), tokens, strict=False
        ):
            if int(words[record.WORD_IDENTITY]) != record.pack_identity(token, position):
                where = (self.name, key, self._tier.groups[0].kind)
                self._tier.report(Finding.of_other_token(*where, words, position, token))
                return

    def _continues(self, records: SlotRecords, start: _Start, tokens: Sequence[int]) -> bool:
        """Whether the records are those of `tokens` behind the start, in the same namespace."""
        chain = start.chain
        identities, chains = [], []
        for offset, token in enumerate(tokens):
            position = start.position + offset
            chain = record.chain_step(chain, token, position)
            identities.append(record.pack_identity(token, position))
            chains.append(chain)
        if len(tokens) != len(records):
            return False
        words = records.words[:, :, (record.WORD_IDENTITY, record.WORD_CHAIN)]
        expected = torch.tensor([identities, chains], dtype=torch.int64).T
        return bool((words == expected[:, None]).all())

    def _stamp(self, records: SlotRecords) -> None:
        """Forwards and rows of another server say nothing here."""
        word = record.pack_writer(self._server.loads_ct, 0, Mode.LOADED, State.LIVE)
        records.words[:, :, record.WORD_WRITER] = word

    # A disk that fails

    def _attempt(self, trouble: _Trouble, function: Callable[..., T], *args: Any) -> T | None:
        """The result of `function`. None if the disk fails."""
        try:
            return function(*args)
        except OSError as error:
            self._complain(trouble, error)
            return None

    def _complain(self, trouble: _Trouble, error: OSError, more: str = "") -> None:
        self._complaints[trouble].log(
            f"cannot {trouble.cannot} {self.files.folder}: {error}. {trouble.outcome}{more}"
        )


def _reporting_to(found: Callable[[Finding], None], tier: HostTier) -> HostTier:
    """The same records and bytes, for a comparison whose differences may say nothing."""
    aside = copy(tier)
    aside.report = found
    return aside


def _are_written_after(forward: int, records: SlotRecords, newest: int) -> bool:
    """Whether all slots are live, and were written by later forwards, up to `newest`."""
    writer = records.words[:, :, record.WORD_WRITER]
    live = ((writer >> record.WRITER_STATE_SHIFT) & 0xF) == State.LIVE
    age = record.forwards_between(writer, newest)  # a record has the low bits of the number only
    return bool((live & (newest - age > forward)).all())


def _occurs_in(tokens: Sequence[int], records: SlotRecords) -> bool:
    """Whether a page of `tokens`, those of a prefetch, has these records. A key is made of tokens, so one has.

    Which one it is does not count: a request of the same name may have begun another prefetch since.
    """
    named = [
        record.unpack_identity(int(word)) for word in records.words[:, 0, record.WORD_IDENTITY]
    ]
    theirs, first = [token for token, _ in named], named[0][1]
    size = len(theirs)
    last = min(first, len(tokens) - size)
    return any(list(tokens[at : at + size]) == theirs for at in range(0, last + 1, size))
