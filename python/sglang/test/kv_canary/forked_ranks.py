"""Runs a function on several ranks of a real CPU process group, each in a fork of this process."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["on_ranks"]

TIMEOUT_S = 60.0


def on_ranks(work: Callable[[Any], Any], size: int = 2) -> list[Any]:
    """What `work(group)` returns on each rank. Raises RuntimeError with what went wrong on one of them, or hangs."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends = [fork.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            fork.Process(target=_run, args=(work, rank, size, folder, mine), daemon=True)
            for rank, (_, mine) in enumerate(ends)
        ]
        for process in ranks:
            process.start()
        try:
            return [
                _result(process, theirs) for process, (theirs, _) in zip(ranks, ends, strict=True)
            ]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _run(
    work: Callable[[Any], Any], rank: int, size: int, folder: str, results: Connection
) -> None:
    try:
        store = dist.FileStore(str(Path(folder, "store")), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        results.send((work(dist.group.WORLD), None))
    except BaseException:
        results.send((None, traceback.format_exc()))
    finally:
        results.close()


def _result(process: multiprocessing.process.BaseProcess, results: Connection) -> Any:
    if not results.poll(TIMEOUT_S):
        raise RuntimeError(f"{process.name} hangs")
    value, error = results.recv()
    if error is not None:
        raise RuntimeError(error)
    return value
