"""Where each new token of a request hangs: behind its neighbour, or behind its parent in a draft tree."""

from __future__ import annotations

import numpy as np

from ...plan.plan_input import WritePlan
from .host import array


def parents_and_depths(
    write: WritePlan, token_index: np.ndarray, in_chunk: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) int64[n] of the tokens `token_index` of the batch, the `in_chunk`-th of their requests.

    A parent is an earlier token of the same request, or -1: the request's prefix. Any other value counts as -1.
    """
    if write.parents is None:
        return in_chunk - 1, in_chunk
    parents = array(write.parents)[token_index].astype(np.int64)
    parents = np.where((parents >= 0) & (parents < in_chunk), parents, -1)
    depths: list[int] = []
    for i, (parent, place) in enumerate(zip(parents.tolist(), in_chunk.tolist(), strict=True)):
        depths.append(0 if parent < 0 else depths[i - place + parent] + 1)
    return parents, np.array(depths, dtype=np.int64)
