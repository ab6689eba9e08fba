"""The request of each row of `req_to_token`, to recognise a request's first forward in a row."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from .releases import release


class Owner(NamedTuple):
    """A request, and how its row was filled."""

    request: weakref.ref[Any]
    cached: int  # tokens that were in the row before the request's first extend
    prefix: int  # tokens of the row before the request's last extend
    length: int  # and after it


class RowOwners:
    """Rows and the requests last extended in them. Use only from the scheduler's thread."""

    def __init__(self) -> None:
        self._owners: dict[int, Owner] = {}

    def extend(self, request: Any, prefix: int, length: int) -> bool:
        """Note that `request` is extended from `prefix` tokens by `length`. Returns whether it is new in its row.

        A row that is shorter than after the request's last extend counts as new: its owner gave a part back.
        """
        row = release().row_of(request)
        owner = self._owners.get(row)
        is_new = owner is None or owner.request() is not request or prefix < owner.length
        cached = prefix if is_new else owner.cached
        self._owners[row] = Owner(weakref.ref(request), cached, prefix, prefix + length)
        return is_new

    def of(self, row: int) -> Owner | None:
        """Who was last extended in `row`. None if the row was given back, or the request is gone."""
        owner = self._owners.get(row)
        return None if owner is None or owner.request() is None else owner

    def forget(self, row: int) -> None:
        """The row, or a part of it, was given back. The next request extended in it is new."""
        self._owners.pop(row, None)
