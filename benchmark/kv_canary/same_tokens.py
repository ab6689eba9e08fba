"""Times between tokens of two runs with the same batches, compared token by token.

A step has one of a few lengths, so a quantile of the times between tokens jumps from one to the next by chance. What
the tokens near it take in the other run does not jump. The tokens are chosen by the mean of both runs, which favours
neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens from `low` to `high` of all, by what they take, counted from 0 to 1."""

    figure: str  # of the run, beside which theirs is printed
    low: float
    high: float


# All tokens, or a tenth of them on either side of a quantile
PARTS = {
    "itl_all_same": TokenPart("itl_mean", 0.0, 1.0),
    "itl_p50_same": TokenPart("itl_p50", 0.4, 0.6),
    "itl_p90_same": TokenPart("itl_p90", 0.8, 1.0),
}

# The step of some tokens, the step of the tokens before them, and how many they are
Tokens = tuple[int, int, int]


def log_ratios(off: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, float]:
    """By PARTS: the log of what these tokens take in `on`, over what they take in `off`; their median.

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
    ratios = [(count, after - before) for count, before, after in pairs]
    return {name: _median(_part(ratios, part.low, part.high)) for name, part in PARTS.items()}


def _part(
    counted: Sequence[tuple[int, float]], low: float, high: float
) -> list[tuple[float, float]]:
    """Those from `low` to `high` of all, which are counted from 0 to 1."""
    total, part, begin = sum(count for count, _ in counted), [], 0
    for count, value in counted:
        inside = min(begin + count, high * total) - max(begin, low * total)
        if inside > 0:
            part.append((inside, value))
        begin += count
    return part


def _median(counted: Sequence[tuple[float, float]]) -> float:
    ascending = sorted(counted, key=lambda each: each[1])
    half, begin = sum(count for count, _ in counted) / 2, 0.0
    for count, value in ascending:
        begin += count
        if begin >= half:
            return value
    raise ValueError("expected tokens, got none")
