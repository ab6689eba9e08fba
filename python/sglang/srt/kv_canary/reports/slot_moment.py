"""One event in the life of a slot, as reports show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..slot_event import CallSite, SlotEventKind
from .safe_text import safe_text
from .violation import cut_request_id

__all__ = ["MAX_FUNCTIONS", "SlotMoment"]

MAX_FUNCTIONS = 4  # of a call site, in a report

_VERBS = {
    SlotEventKind.ALLOC: "handed out",
    SlotEventKind.FREE: "freed",
    SlotEventKind.CLEAR: "freed with all other slots",
    SlotEventKind.LOAD: "filled",
}


@dataclass(frozen=True, slots=True)
class SlotMoment:
    """One event in the life of a slot."""

    kind: SlotEventKind
    step: int  # the scheduler's last step before it
    slots: int  # of the call; 0 for all
    site: CallSite | None
    request_id: str | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "what": self.kind.name.lower(),
            "step": self.step,
            "slots": self.slots,
            "purpose": None if self.site is None else self.site.purpose or None,
            "functions": [] if self.site is None else list(self.site.functions),
            "request_id": cut_request_id(self.request_id),
        }

    @classmethod
    def from_event(cls, moment: Mapping[str, Any]) -> SlotMoment:
        """The inverse of `as_dict`."""
        functions = tuple(moment["functions"])
        site = CallSite(moment["purpose"] or "", functions) if functions else None
        kind = SlotEventKind[moment["what"].upper()]
        return cls(kind, moment["step"], moment["slots"], site, moment["request_id"])

    def text(self) -> str:
        """One line."""
        others = self.slots - 1
        others = f" with {others} other{'s' * (others > 1)}" if others > 0 else ""
        return f"after step {self.step}: {_VERBS[self.kind]}{others}{self.caller_text()}"

    def caller_text(self) -> str:
        """Who called the allocator, after a comma. Empty if it is not known."""
        if self.site is None or not self.site.functions:
            return ""
        purpose = f", {self.site.purpose}" if self.site.purpose else ""
        request = "" if self.request_id is None else f' of request "{safe_text(self.request_id)}"'
        return f"{purpose}{request} ({' < '.join(self.site.functions[:MAX_FUNCTIONS])})"
