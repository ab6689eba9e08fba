"""Time of the scene of one cause: a changed bit, and a wrong row entry, on a pool of any size. Prints the reports, too.

    python benchmark/kv_canary/bench_scene.py [--device cuda --slots 400000 --layers 32 --heads 8 --head-dim 128]

The launches are the host's time in the step in which a finding is read. They run on the scheduler's stream, and
"until it arrived" is how long a report has to wait for them.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable

import torch

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.reports.scene import Place
from sglang_kv_canary.runner.pending_scene import PendingScene
from sglang_kv_canary.runner.scene_taker import SceneTaker
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool

TOKENS = 40
Times = dict[str, list[float]]


def _timed(times: Times) -> None:
    """Make every scene add its milliseconds to `times`."""
    take = SceneTaker.take

    def timed_take(taker: SceneTaker, place: Place) -> PendingScene:
        _wait()
        started = time.perf_counter()
        pending = take(taker, place)
        times["launches"].append(1e3 * (time.perf_counter() - started))
        pending.copy.wait()
        times["until it arrived"].append(1e3 * (time.perf_counter() - started))
        return pending

    SceneTaker.take = timed_take


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _settle(rig: ManagerRig) -> None:
    for _ in range(4):
        _wait()
        rig.settle()


def _bit(rig: ManagerRig, position: int) -> None:
    row = rig.pool.k_buffer[1][rig.slot(1, position)].view(torch.uint8).reshape(-1)
    row[5] ^= 4


def _entry(rig: ManagerRig, position: int) -> None:
    rig.rows.req_to_token[1, position] = rig.slot(2, position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="default %(default)s")
    for name, default in (("slots", 4096), ("layers", 4), ("heads", 2), ("head-dim", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="causes of a kind, default 5")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    for damage in (_bit, _entry):
        times: Times = {"launches": [], "until it arrived": []}
        taken = SceneTaker.take
        _timed(times)
        try:
            _one_kind(args, damage)
        finally:
            SceneTaker.take = taken
        for what, values in times.items():
            first, rest = values[0], statistics.median(values[1:])
            print(f"{damage.__name__[1:]}: {what}: first {first:.2f} ms, then {rest:.2f} ms")


def _one_kind(args: argparse.Namespace, damage: Callable[[ManagerRig, int], None]) -> None:
    real = make_mha_pool(
        size=args.slots,
        layers=args.layers,
        head_num=args.heads,
        head_dim=args.head_dim,
        dtype=torch.bfloat16,
        device=args.device,
    )
    rig = ManagerRig(real=real, device=args.device, content=ContentMode.ALL)
    rig.extend(1, range(TOKENS))
    rig.extend(2, range(100, 100 + TOKENS))
    rig.decode([1])
    _settle(rig)
    for round_ in range(args.rounds):
        damage(rig, 3 + 2 * round_)
        rig.decode([1])
        _settle(rig)


if __name__ == "__main__":
    main()
