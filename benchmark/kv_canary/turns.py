"""Two servers of one machine that run by turns, some steps each. A slow phase of the machine then slows both.

Each server has a FIFO, into which the other one writes. A server that has had its steps waits for its GPU, hands over,
and waits. Its clock, `now`, stands still in that time. Both schedulers have one core, on which nothing else runs: they
never need it at once. With several ranks, those of equal number share one, and hardly ever need it at once.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ENV = "KV_CANARY_BENCH_TURNS"  # what `Setting` has
FEWEST_CORES = 4  # left for all else; with fewer, no core is kept for schedulers
TIMEOUT_S = 240.0  # a start of the other server is over long before

_READY, _TURN, _LEFT = b"r", b"t", b"l"


@dataclass(frozen=True, slots=True)
class Setting:
    """What a server is told. `place`: 0 runs first in each round, 1 second."""

    folder: Path
    place: int
    block: int  # steps of a turn
    cores: tuple[int, ...]  # of each rank's scheduler; none: no core is kept for it

    def environment(self) -> dict[str, str]:
        cores = ",".join(map(str, self.cores))
        return {ENV: f"{self.folder}:{self.place}:{self.block}:{cores}"}

    @classmethod
    def of_environment(cls) -> Setting | None:
        """None: this server is alone."""
        if not (text := os.environ.get(ENV)):
            return None
        folder, place, block, cores = text.rsplit(":", 3)
        return cls(
            Path(folder), int(place), int(block), tuple(map(int, cores.split(",") if cores else ()))
        )


@dataclass(slots=True)
class Turns:
    """Raises RuntimeError where the other server does not answer."""

    setting: Setting
    _mine: int = -1
    _other: int = -1
    _steps: int = 0
    away: float = 0.0  # seconds in which the other server had its turn
    _other_left: bool = False
    _left: bool = True

    @classmethod
    @cache
    def of_environment(cls) -> Turns | None:
        """The same one each time. None: this server is alone."""
        if (setting := Setting.of_environment()) is None:
            return None
        turns = cls(setting)
        # For reading and writing: to open one end of a FIFO would wait for the other one.
        turns._mine = os.open(setting.folder / str(setting.place), os.O_RDWR)
        turns._other = os.open(setting.folder / str(1 - setting.place), os.O_RDWR)
        return turns

    def now(self) -> float:
        """Seconds, without those in which the other server had its turn."""
        return time.perf_counter() - self.away

    def meet(self) -> None:
        """Both servers have their requests. The second one waits for its first turn."""
        began = time.perf_counter()
        os.write(self._other, _READY)
        while self._read() != _READY:
            pass  # what was left of the run before
        self._steps, self._other_left, self._left = 0, False, False
        if self.setting.place == 1:
            self._other_left = self._read() == _LEFT
        self.away += time.perf_counter() - began

    def after_step(self) -> None:
        self._steps += 1
        if self._left or self._other_left or self._steps % self.setting.block:
            return
        _synchronize()
        began = time.perf_counter()
        os.write(self._other, _TURN)
        self._other_left = self._read() == _LEFT
        self.away += time.perf_counter() - began

    def leave(self) -> None:
        """The schedule is over. The first server waits until it is over for the second one, too."""
        if self._left:
            return
        self._left = True
        _synchronize()
        began = time.perf_counter()
        os.write(self._other, _LEFT)
        while self.setting.place == 0 and not self._other_left:
            self._other_left = self._read() == _LEFT
        self.away += time.perf_counter() - began

    def _read(self) -> bytes:
        if not select.select([self._mine], [], [], TIMEOUT_S)[0]:
            raise RuntimeError(f"expected the other server's turn to end within {TIMEOUT_S:.0f} s")
        return os.read(self._mine, 1)


def make_folder(folder: Path) -> None:
    for place in (0, 1):
        os.mkfifo(folder / str(place))


def keep_cores(ranks: int) -> tuple[int, ...]:
    """For schedulers, one for each of `ranks`. None with too few cores.

    This process and those that it starts leave them alone, and what shares their caches.
    """
    free, kept = os.sched_getaffinity(0), []
    for _ in range(ranks):
        if not free:
            return ()
        kept.append(max(free))
        free -= _sharing(kept[-1])
    if len(free) < FEWEST_CORES:
        return ()
    os.sched_setaffinity(0, free)
    return tuple(kept)


def take_core(rank: int) -> None:
    """The calling thread is the scheduler's, of this rank. It runs on the core that is kept for it, if one is."""
    setting = Setting.of_environment()
    if setting is not None and setting.cores:
        os.sched_setaffinity(0, {setting.cores[rank]})


def _sharing(core: int) -> set[int]:
    """The logical cores that share the caches of `core`, itself among them."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    text = siblings.read_text().strip() if siblings.exists() else str(core)
    shared = {core}
    for part in text.split(","):
        first, _, last = part.partition("-")
        shared |= set(range(int(first), int(last or first) + 1))
    return shared


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
