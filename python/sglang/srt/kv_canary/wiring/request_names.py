"""The rows and ids of each step's requests, carried over from the steps before.

A step of 200 requests differs from the one before it by one or two of them. Each look at a request is a cache miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..host_code import HOST
from ..reports.flight_recorder import RequestName
from .releases import release

MOST_VOID = 16  # requests that have ended and are still kept alive


class RequestNames:
    """A request keeps its row until it gives it back (`row_given_back`), and its id for ever."""

    def __init__(self) -> None:
        # Kept alive, because they are compared by identity
        self._requests: list[Any] = []
        self._names: list[RequestName] = []
        self._named: tuple[RequestName, ...] = ()  # the same, if a step had just these requests
        # Each row has one name that holds, however often it is among `_names`
        self._of_row: dict[int, RequestName] = {}
        # Those among `_names` that hold no longer, the same objects
        self._void: list[RequestName] = []
        # Rows that requests of the last step had given back before it was launched
        self.given_back: frozenset[int] = frozenset()

    def of(self, requests: list[Any]) -> tuple[RequestName, ...]:
        """Names in the order of `requests`, which must not change afterwards.

        A request may have ended since its batch was prepared. Its name has the row that the forward reads, and
        `given_back` has it.
        """
        self.given_back = frozenset()
        names, unknown = HOST.carry_over(requests, self._requests, self._names, self._void)
        if not unknown and len(requests) == len(self._requests) == len(self._named):
            return self._named
        without_row = self._look_up(requests, names, unknown) if unknown else []
        named = tuple(names)
        if 2 * len(requests) >= len(self._requests) or len(self._void) > MOST_VOID:
            self._requests, self._names, self._void = requests, names, without_row
            self._named = named
        elif unknown:  # a prefill between two decodes, which join it later at the end
            self._requests = self._requests + [requests[i] for i in unknown]
            self._names = self._names + [names[i] for i in unknown]
            self._void += without_row
        return named

    def _look_up(
        self, requests: list[Any], names: list[RequestName], unknown: Sequence[int]
    ) -> list[RequestName]:
        """Fill in `names` at `unknown`. Returns those without a row of their own."""
        row_of, without_row = release().row_of, []
        for i in unknown:
            request = requests[i]
            name = (row_of(request), request.rid)
            if name[0] is None:
                name = self._name_given_back(name)
                without_row.append(name)
            else:
                name = self._name_that_holds(name)
            names[i] = name
        gone = {name[0] for name in without_row} - {None}
        # Not a row that another request has by now
        self.given_back = frozenset(gone - self._of_row.keys()) if gone else frozenset()
        return without_row

    def _name_given_back(self, name: RequestName) -> RequestName:
        """What this request was called before it gave its row back; `name` if it gets its first row later.

        An id may have had several rows. The last one is the request's, unless another request has it by now.
        """
        had = (void for void in reversed(self._void) if void[1] == name[1] and void[0] is not None)
        last = next(had, name)
        return name if last[0] in self._of_row else last

    def _name_that_holds(self, name: RequestName) -> RequestName:
        known = self._of_row.get(name[0])
        if known == name:
            return known
        if known is not None:
            self._void.append(known)
        self._of_row[name[0]] = name
        return name

    def row_given_back(self, row: int) -> None:
        """The request that had it has another one from now on, or none."""
        name = self._of_row.pop(row, None)
        if name is not None:
            self._void.append(name)
