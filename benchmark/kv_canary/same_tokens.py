"""Times between tokens of two runs with the same batches, compared token by token.

A step has one of a few lengths, so a quantile of the times between tokens jumps from one to the next by chance. What
the tokens near it take in the other run does not jump. The tokens are chosen by the mean of both runs, which favours
neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

BAND = 0.05  # tokens that far from the quantile, of all, on either side
QUANTILES = {"itl_p50_same": 0.5, "itl_p90_same": 0.9}

# The step of some tokens, the step of the tokens before them, and how many they are
Tokens = tuple[int, int, int]


def log_ratios(off: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, float]:
    """By QUANTILES: the mean log of what the tokens near the quantile take in `on`, over what they take in `off`.

    Both are lines of runs with `token_steps` and `step_lengths`. Nothing of runs without tokens.
    """
    tokens: Sequence[Tokens] = off["token_steps"]
    if not tokens:
        return {}
    times = [list(itertools.accumulate(run["step_lengths"], initial=0.0)) for run in (off, on)]
    pairs = [
        (count, *(math.log(at[step] - at[before]) for at in times))
        for step, before, count in tokens
    ]
    pairs.sort(key=lambda pair: pair[1] + pair[2])
    return {name: _mean_near(pairs, quantile) for name, quantile in QUANTILES.items()}


def _mean_near(pairs: Sequence[tuple[int, float, float]], quantile: float) -> float:
    """`pairs`: numbers of tokens and their log times, ascending."""
    total = sum(count for count, _, _ in pairs)
    low, high = (quantile - BAND) * total, (quantile + BAND) * total
    weighed = begin = 0.0
    for count, off, on in pairs:
        inside = max(0.0, min(begin + count, high) - max(begin, low))
        weighed += inside * (on - off)
        begin += count
    return weighed / (high - low)
