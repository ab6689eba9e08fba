"""The request of each row of `req_to_token`, to recognise a request's first forward in a row."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from .releases import release


@dataclass(frozen=True, slots=True)
class _Owner:
    request: weakref.ref[Any]
    length: int  # tokens of the row after the request's last extend


class RowOwners:
    """Rows and the requests last extended in them. Use only from the scheduler's thread."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}

    def extend(self, request: Any, prefix: int, length: int) -> bool:
        """Note that `request` is extended from `prefix` tokens by `length`. Returns whether it is new in its row.

        A row that is shorter than after the request's last extend counts as new: its owner gave a part back.
        """
        row = release().row_of(request)
        owner = self._owners.get(row)
        is_new = owner is None or owner.request() is not request or prefix < owner.length
        self._owners[row] = _Owner(weakref.ref(request), prefix + length)
        return is_new

    def forget(self, row: int) -> None:
        """The row, or a part of it, was given back. The next request extended in it is new."""
        self._owners.pop(row, None)
