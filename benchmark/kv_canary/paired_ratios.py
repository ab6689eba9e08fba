"""Ratios of pairs of runs: how far the second of each pair is from the first, with intervals."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

# 97.5 % of Student's t, for 1, 2, ... degrees of freedom; the last for all above, a little wide.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)


def summary(part: str, name: str, lines: Sequence[Mapping[str, float]]) -> None:
    """Print how far `name` is from `off`. Each of `lines` is a pair, in seconds."""
    percent = [100 * (line[name] / line["off"] - 1) for line in lines]
    off = 1000 * statistics.median(line["off"] for line in lines)
    more = 1000 * statistics.median(line[name] - line["off"] for line in lines)
    figures = []
    for figure in (statistics.mean, statistics.median):
        low, high = interval(percent, figure)
        figures.append(f"{figure.__name__} {figure(percent):+.2f} % ({low:+.2f} to {high:+.2f})")
    print(
        f"{part} {name}: {len(lines)} pairs, off {off:.2f} ms, {more:+.2f} ms, {', '.join(figures)}"
    )


def interval(
    values: list[float], figure: Callable[[list[float]], float] = statistics.mean
) -> tuple[float, float]:
    """Of the mean, or the median, of `values`, 95 %: what 10,000 draws of as many of them have."""
    draws = random.Random(0)
    figures = sorted(figure(draws.choices(values, k=len(values))) for _ in range(10_000))
    return figures[250], figures[-251]


def interval_of_few(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean, 95 %, by Student's t. Draws from five values make it too narrow: it holds in 82 % of cases.

    Of one value nothing is known.
    """
    if len(values) < 2:
        return -math.inf, math.inf
    factor = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    half = factor * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values) - half, statistics.mean(values) + half


def trimmed(values: Sequence[float], share: float = 0.2) -> float:
    """The mean without a `share` of the lowest and as many of the highest."""
    left_out = int(share * len(values))
    return statistics.mean(sorted(values)[left_out : len(values) - left_out])
