"""What the tensor-parallel ranks of one scheduler say to each other, in the order in which all of them ask."""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankGroup"]

logger = logging.getLogger(__name__)

WARN_AFTER_S = 10.0
_POLL_S = 0.0002


class RankGroup:
    """The ranks of a CPU process group. Used from the scheduler's thread, as SGLang uses the group.

    A rank that is gone, or the group's own time-out, raises RuntimeError: SGLang cannot use the group either then.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """Each rank's `value`, by rank. All ranks must ask: returns when all have."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = self._all_gather(padded)
        return [
            pickle.loads(part[:size].numpy().tobytes())
            for part, size in zip(parts, sizes, strict=True)
        ]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        out = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(out, mine, group=self._group, async_op=True)
        start = time.monotonic()
        warn_at = start + WARN_AFTER_S
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() > warn_at:
                warn_at = float("inf")
                logger.error(
                    "kv-canary action: tensor-parallel rank %d has waited %.0f s for the other ranks to agree on "
                    "damage. One of them is stuck or gone, and SGLang waits for it too",
                    self.rank,
                    time.monotonic() - start,
                )
        work.wait()
        return out
