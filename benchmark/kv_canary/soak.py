"""Minutes of clean mixed traffic on a real server in RAISE, content `all`, with the sweep: no alarm may be raised.

    python benchmark/kv_canary/soak.py mha --minutes 6

Prints a JSON line for each round of traffic, and a last one with the totals. A violation ends the server, and with
it this program, with exit code 1 and the report on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import sglang_kv_canary_rigs.eagle_swa_serving  # the mode `eagle_swa`
import sglang_kv_canary_rigs.ngram_serving  # noqa: F401  the mode `ngram`
from sglang_kv_canary.testing import (
    MODES,
    CanaryServer,
    Serving,
    TrafficReport,
    TrafficShape,
    drive,
)
from sglang_kv_canary.testing.eagle_mode import V1, V2
from sglang_kv_canary.testing.family_traffic import FamilyShape, drive_families
from sglang_kv_canary.testing.scripted_models import write_scripted_eagle
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED

FLAGS = {
    "kv_canary": "raise",
    "kv_canary_real_data": "all",
    "kv_canary_sweep_interval": 20,
    "log_level": "warning",
}
ENV = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
    "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "200",
}
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}

Traffic = Callable[[Serving, int], Coroutine[Any, Any, TrafficReport]]


def mixed(serving: Serving, seed: int) -> Coroutine[Any, Any, TrafficReport]:
    """Shared prefixes, several turns, chunked prompts, duplicates, aborts and flushes."""
    return drive(serving, TrafficShape(400, seed=seed, abort_share=0.1, name=f"r{seed}-"))


def families(serving: Serving, seed: int) -> Coroutine[Any, Any, TrafficReport]:
    """The same without prefixes that running requests share: see `family_traffic`."""
    return drive_families(serving, FamilyShape(200, seed=seed, name=f"f{seed}-"))


@dataclass(frozen=True, slots=True)
class Soak:
    """What is served, and what is sent to it."""

    mode: str
    traffic: Traffic
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    draft: bool = False  # an EAGLE draft model is written and given


# The modes with speculation are small, for a CPU.
SIZES = {
    name: MODES["mha"].server_args[name]
    for name in (
        "max_total_tokens",
        "max_running_requests",
        "chunked_prefill_size",
        "context_length",
    )
}
SOAKS = {
    "mha": Soak("mha", mixed, env=RETRACTIONS),
    "mha-page16": Soak("mha", mixed, {"page_size": 16}, RETRACTIONS),
    "swa": Soak("swa", families),
    # Not on 0.5.12.post1, which frees shared prefixes that are read.
    "swa-shared": Soak("swa", mixed, env=RETRACTIONS),
    "swa-page16": Soak("swa", mixed, {"page_size": 16}, RETRACTIONS),
    "mla": Soak("mla", mixed, env=RETRACTIONS),
    "eagle-v2": Soak("eagle", mixed, {**SIZES, **V2}, draft=True),
    "eagle-v1": Soak("eagle", mixed, {**SIZES, **V1}, draft=True),
    "eagle-swa": Soak("eagle_swa", families, {**SIZES, **V2}, draft=True),
    "ngram": Soak("ngram", mixed, SIZES),
}


def soak(name: str, minutes: float, folder: str) -> None:
    chosen, seed, total = SOAKS[name], 0, TrafficReport()
    flags = {**FLAGS, **chosen.flags}
    if chosen.draft:
        flags["speculative_draft_model_path"] = write_scripted_eagle(folder)
    mode = MODES[chosen.mode]
    env = {**ENV, **chosen.env}
    if chosen.draft and not torch.cuda.is_available():
        env |= INTERPRETED  # SGLang's own kernels
    with CanaryServer(mode, flags, env) as server:
        start = time.monotonic()
        while time.monotonic() - start < 60 * minutes:
            report = server.run(chosen.traffic(server, seed))
            seed += 1
            for count in ("requests", "aborts", "flushes", "prompt_tokens", "output_tokens"):
                setattr(total, count, getattr(total, count) + getattr(report, count))
            say(name, server, total, time.monotonic() - start)
        say(name, server, total, time.monotonic() - start, counters=settled(server))


def settled(server: Serving) -> dict[str, Any]:
    """The device's counters once the server is idle and everything found is reported."""
    for _ in range(2):
        answer = server.send("counters").answer()
    return answer["counters"]


def say(name: str, server: CanaryServer, total: TrafficReport, seconds: float, **more: Any) -> None:
    violations = server.events("violation")
    line = {
        "soak": name,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": round(seconds, 1),
        **{k: getattr(total, k) for k in ("requests", "aborts", "flushes")},
        "prompt_tokens": total.prompt_tokens,
        "output_tokens": total.output_tokens,
        "retractions": server.stderr.count("Testing retraction"),
        "unhealthy": sum(not event["healthy"] for event in server.events("health")),
        "violations": len(violations),
        **more,
    }
    print(json.dumps(line), flush=True)
    if violations or not server.alive:
        print(server.stderr[-20_000:], file=sys.stderr)
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("soak", choices=SOAKS)
    parser.add_argument("--minutes", type=float, default=6.0, help="minutes of traffic, default 6")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv_canary_draft_") as folder:
        soak(args.soak, args.minutes, folder)


if __name__ == "__main__":
    main()
