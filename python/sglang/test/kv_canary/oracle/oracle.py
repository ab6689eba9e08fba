"""The oracle: all chapters together, and the order of one forward."""

from __future__ import annotations

from sglang_kv_canary.pool_kind import Side

from .forwards import Forward
from .model import GroupModel
from .slots import Slots
from .sweep import Sweeps
from .writes import Writes


class Oracle(Sweeps, Writes, Slots):
    """Predicts records, counters and violation rows of forwards, sweeps and allocator events."""

    def head(self, forward: Forward, group: GroupModel) -> None:
        """Verify and write HEAD."""
        self.running = self.done + 1
        if not self.armed:
            return
        # As they were before this forward, which leaves them otherwise
        self._rows = {r: self._remembered(r, group) for r in forward.requests}
        for half in group.halves:
            tag = group.tag(half, Side.HEAD)
            for request in forward.requests:
                self._check_request(forward, request, group, tag)
            self._verify_prefixes(forward, group, half, Side.HEAD)
            if group.stride == 1:
                self._write_head(forward, group, half)
            else:
                self._write_strided(forward, group, half)

    def tail(self, forward: Forward, group: GroupModel) -> None:
        """Verify and write TAIL; the forward is done."""
        self.done = self.running
        if not self.armed:
            return
        for half in group.halves:
            self._verify_prefixes(forward, group, half, Side.TAIL)
            self._write_tail(forward, group, half)
