"""Host time of all of the canary's hooks around a prefill, with cold caches, by entry.

    python benchmark/kv_canary/bench_host_prefill.py [--device cuda] [--modes raise,log] [--prompt 8192] [--steps 200]
        [--python] [--out results.jsonl]

A step is a prefill of one prompt, which shares no prefix, after the request before it has ended. Until the layers
begin, a GPU that has nothing else to do waits for the host. See `bench_host_step.py` for all the rest.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench_host_step import Parts, Server, parser_of, run, timed_steps

from sglang_kv_canary.config import CanaryMode

WARM_UP = 3  # prefills


class PrefillServer(Server):
    """`step` times a prefill."""

    times_prefills = True

    def __init__(self, options: argparse.Namespace, mode: CanaryMode, decoder: Any) -> None:
        self.prompt = options.prompt, options.prompt
        super().__init__(options, mode, decoder)

    def step(self) -> None:
        was_running, self.clock.running = self.clock.running, False
        self._end_one()
        self._make_room()
        self._wait()
        self.clock.running = was_running
        self._admit()


def measure(options: argparse.Namespace, mode: CanaryMode, decoder: Any) -> Parts:
    server = PrefillServer(options, mode, decoder)
    for _ in range(WARM_UP):
        server.step()
    return timed_steps(server, options.steps)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.set_defaults(requests=1, replaced=1.0, evicts=0.4, sweep=0, spare_steps=0)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    run(options, lambda mode, decoder: measure(options, mode, decoder))


if __name__ == "__main__":
    main()
