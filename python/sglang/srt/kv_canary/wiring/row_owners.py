"""Which request each row of `req_to_token` belongs to, so that a request's first forward in a row is known as that."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Owner:
    request: weakref.ref[Any]
    length: int  # tokens of the row after the request's last extend


class RowOwners:
    """Rows and the requests that were last extended in them. Used from the scheduler's thread only."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}

    def extend(self, request: Any, prefix: int, length: int) -> bool:
        """`request` is about to be extended from `prefix` tokens by `length`; whether it is new in its row.

        A row that is shorter than the request's last extend left it counts as new: its owner has given a part back.
        """
        owner = self._owners.get(request.req_pool_idx)
        is_new = owner is None or owner.request() is not request or prefix < owner.length
        self._owners[request.req_pool_idx] = _Owner(weakref.ref(request), prefix + length)
        return is_new

    def forget(self, row: int) -> None:
        """The row was given back, or a part of it: the request that is extended in it next is new."""
        self._owners.pop(row, None)
