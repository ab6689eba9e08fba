"""Ratios of pairs of runs: how far the second of each pair is from the first, with intervals."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence


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
