"""Where servers spend the time of a request: spans of SGLang's functions and of the canary's, and of work on the GPU.

All times are of the machine's monotonic clock, so that those of several processes fit together.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import pkgutil
import statistics
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SPAN_FILE = "KV_CANARY_SPAN_FILE"  # a JSON line for each span: name, start and end in seconds
_WRITE_EVERY_S = 0.2  # while idle
_SRT = "sglang.srt"
_SCHEDULER = f"{_SRT}.managers.scheduler.Scheduler"
_PREFILL = f"{_SRT}.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_DECODE = f"{_SRT}.disaggregation.decode"
_NIXL = f"{_SRT}.disaggregation.nixl.conn.NixlKVManager"
_MOONCAKE = f"{_SRT}.disaggregation.mooncake.conn.MooncakeKVManager"
_CONTROLLER = f"{_SRT}.managers.cache_controller.HiCacheController"
_LOADS = f"{_CONTROLLER}.start_loading"
_FORWARD = f"{_SRT}.model_executor.model_runner.ModelRunner.forward"
# Functions of SGLang. Those that a release does not have are left out.
_SGLANG = (
    f"{_SCHEDULER}.process_input_requests",
    f"{_SCHEDULER}.get_new_batch_prefill",
    f"{_SCHEDULER}.run_batch",
    f"{_SCHEDULER}.process_batch_result",
    f"{_SRT}.mem_cache.hiradix_cache.HiRadixCache.init_load_back",
    f"{_SRT}.mem_cache.hiradix_cache.HiRadixCache.evict",
    f"{_SRT}.managers.schedule_policy.PrefillAdder._select_prefill_admission",
    _LOADS,
    f"{_CONTROLLER}.start_writing",
    _FORWARD,
    f"{_PREFILL}.send_kv_chunk",
    f"{_NIXL}.send_kvcache",
    f"{_NIXL}.send_aux",
    f"{_MOONCAKE}.send_kvcache",
    f"{_MOONCAKE}.send_aux",
    f"{_DECODE}.DecodePreallocQueue.pop_preallocated",
    f"{_DECODE}.DecodeTransferQueue.pop_transferred",
)
# Those of the canary, where they are called from
_CANARY = (
    "wiring.scheduler._begin_step",
    "wiring.scheduler.write_late_content",
    "single_forward_manager.late_head.LateHead.take",
    "wiring.record_sender.await_content",
    "wiring.model_runner.update_anchors",
    "wiring.model_runner.expected_tokens_of",
    "wiring.expected_tokens._lists_on_device",
    "runner.manager.CanaryManager._before_forwards",
    "runner.manager.CanaryManager._after_forwards",
    "runner.manager.CanaryManager.drain",
    "runner.manager.CanaryManager.on_idle",
    "runner.manager.CanaryManager.settle_slots",
    "runner.manager.CanaryManager.note_arrivals",
    "runner.slot_ledger.SlotLedger.apply",
    "host_tier.host_tier.HostTier.usable",
    "host_tier.host_tier.HostTier.records_for",
    "host_tier.host_tier.HostTier.load_back",
    "host_tier.host_tier.HostTier.copy_back",
    "load_back.LoadBack.land",
    *(
        f"single_forward_manager.SingleForwardManager.{name}"
        for name in (
            "pre_ops_outside_graph",
            "pre_ops_maybe_inside_graph",
            "post_ops_maybe_inside_graph",
            "post_ops_outside_graph",
        )
    ),
    "wiring.record_sender.RecordSender.send",
    "wiring.record_sender.RecordSender.sides",
    "wiring.disaggregation.arrival_of",
    "wiring.disaggregation.take_in",
)
_IDLE = f"{_SCHEDULER}.on_idle"
# Polled: most calls have none
_HAS_NEWS = (
    "process_input_requests",
    "get_new_batch_prefill",
    "pop_preallocated",
    "pop_transferred",
)
Span = tuple[str, float, float]


@dataclass(slots=True)
class _Recorder:
    """Of one process."""

    spans: list[Span] = field(default_factory=list)
    pending: list[tuple[str, Any, Any]] = field(default_factory=list)  # name, events of the GPU
    base: tuple[Any, float] | None = None  # event of the GPU, and when it happened
    written: float = 0.0
    collecting: float = 0.0

    def around(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            result = original(*args, **kwargs)
        finally:
            end = time.perf_counter()
        if name not in _HAS_NEWS or result or (len(args) > 1 and args[1]):
            self.spans.append((name, start, end))
        return result

    def on_gpu(
        self,
        name: str,
        stream_of: Callable[[Any], Any],
        original: Callable[..., Any],
        owner: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The same, and from here to the end of what `original` puts on a stream."""
        self._know_base()
        start = self._event(stream_of(owner))
        result = self.around(name, original, owner, *args, **kwargs)
        self.pending.append((f"gpu: {name}", start, self._event(stream_of(owner))))
        return result

    def _know_base(self) -> None:
        """Once, before the first request that is measured."""
        if self.base is None:
            event = self._event(torch.cuda.current_stream())
            event.synchronize()
            self.base = event, time.perf_counter()

    @staticmethod
    def _event(stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def note_collection(self, phase: str, what: dict[str, int]) -> None:
        """Python looks for garbage in a generation, whatever the thread does."""
        now = time.perf_counter()
        if phase == "start":
            self.collecting = now
        else:
            self.spans.append((f"garbage {what['generation']}", self.collecting, now))

    def write(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if now - self.written < _WRITE_EVERY_S:
            return
        self.written = now
        while self.pending and self.pending[0][2].query():
            name, *events = self.pending.pop(0)
            event, at = self.base
            self.spans.append((name, *(at + event.elapsed_time(e) / 1000 for e in events)))
        spans, self.spans = self.spans, []
        if spans:
            with open(os.environ[SPAN_FILE], "a") as file:
                file.writelines(f"{json.dumps(span)}\n" for span in spans)


def note_spans() -> None:
    """A plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = _Recorder()
    gc.callbacks.append(recorder.note_collection)
    for target in filter(_exists, _SGLANG):
        name = target.rsplit(".", 1)[1]
        around = functools.partial(recorder.around, name)
        if torch.cuda.is_available() and target in (_LOADS, _FORWARD):
            stream = _load_stream if target == _LOADS else _current_stream
            around = functools.partial(recorder.on_gpu, name, stream)
        HookRegistry.register(target, around, HookType.AROUND)
    HookRegistry.register(_IDLE, recorder.write, HookType.BEFORE)
    for target in _CANARY:
        _wrap(f"sglang_kv_canary.{target}", recorder)


def _wrap(target: str, recorder: _Recorder) -> None:
    """Functions of the canary are looked up when they are called."""
    owner_name, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    label = f"canary: {name}"

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return recorder.around(label, original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def _current_stream(_: Any) -> Any:
    return torch.cuda.current_stream()


def _load_stream(controller: Any) -> Any:
    return controller.load_stream


# Figures


def read_spans(path: Path) -> list[Span]:
    """None, if the server was never idle."""
    if not path.exists():
        return []
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def by_request(
    spans: Iterable[Span], requests: Sequence[tuple[float, float]]
) -> dict[str, tuple[float, float, float, float]]:
    """Of each name, medians over `requests` (start and end): ms from the start to the first span, ms in spans, ms to
    the end of the last one, and calls.

    Names that fewer than half of the requests have are left out.
    """
    found: dict[str, list[list[Span]]] = defaultdict(lambda: [[] for _ in requests])
    for span in spans:
        at = _request_of(span, requests)
        if at is not None:
            found[span[0]][at].append(span)
    figures = {}
    for name, of_requests in found.items():
        there = [
            (start, some) for (start, _), some in zip(requests, of_requests, strict=True) if some
        ]
        if len(there) < len(requests) / 2:
            continue
        rows = [
            (
                1000 * (some[0][1] - start),
                1000 * sum(span[2] - span[1] for span in some),
                1000 * (max(span[2] for span in some) - start),
                len(some),
            )
            for start, some in there
        ]
        figures[name] = tuple(statistics.median(column) for column in zip(*rows, strict=True))
    return figures


def _request_of(span: Span, requests: Sequence[tuple[float, float]]) -> int | None:
    at = bisect_right(requests, (span[1], float("inf"))) - 1
    return at if at >= 0 and span[1] < requests[at][1] else None


def halves(
    spans: Sequence[Span], requests: Sequence[tuple[float, float]]
) -> dict[str, dict[str, tuple[float, float, float, float]]]:
    """`by_request` of the faster half of `requests`, and of the slower one."""
    ranked = sorted(requests, key=lambda request: request[1] - request[0])
    middle = (len(ranked) + 1) // 2
    parts = {"fast": sorted(ranked[:middle]), "slow": sorted(ranked[middle:])}
    return {name: by_request(spans, some) for name, some in parts.items() if some}


def table(parts: dict[str, dict[str, tuple[float, float, float, float]]]) -> str:
    """Lines of text. `parts`: of each server, its figures by name."""
    names = dict.fromkeys(
        name for figures in parts.values() for name in sorted(figures, key=lambda n: figures[n][0])
    )
    lines = [f"{'':32}" + "".join(f"{server:>36}" for server in parts)]
    lines.append(f"{'ms':32}" + f"{'begins   within     ends  calls':>36}" * len(parts))
    for name in names:
        cells = []
        for figures in parts.values():
            row = figures.get(name)
            cell = "-" if row is None else f"{row[0]:.2f} {row[1]:8.3f} {row[2]:8.2f} {row[3]:6.0f}"
            cells.append(f"{cell:>36}")
        lines.append(f"{name:32}" + "".join(cells))
    return "\n".join(lines)
