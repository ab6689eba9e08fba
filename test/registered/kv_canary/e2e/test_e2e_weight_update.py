"""Weights that change while the server runs: slots of the old weights stay true records, or are flushed.

SGLang gives a prefix that was computed with the old weights to whoever asks for its tokens, unless the update
flushes the cache; requests that run through an update go on with old and new KV. None of that is a violation,
unless SGLANG_KV_CANARY_STALE_WEIGHTS says so.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from urllib.error import HTTPError

import pytest
import torch

from sglang.srt.managers import io_struct
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.serving import free_port
from sglang_kv_canary.testing.tiny_models import tiny_llama_weights, write_tiny_llama_checkpoint
from sglang_kv_canary.testing.traffic import (
    TrafficReport,
    TrafficShape,
    conversations,
    drive,
    random_tokens,
)

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")
register_cuda_ci(est_time=150, suite="stage-b-test-1-gpu-small")

HAS_SESSIONS = hasattr(io_struct, "BeginWeightUpdateReqInput")
WATCHED = "model.layers.1.mlp.down_proj.weight"


def _in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `work`; the returned function waits for it and returns its result, or raises what it raised."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return lambda: future.result(timeout=consts.PROCESS_TIMEOUT_S)


class WeightUpdates(CanaryE2EBase):
    """The three ways to update, each with another set of weights. The sweep reads the old weights' slots, too."""

    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20"}

    def ready_to_update(self, flush: bool) -> None:
        """SGLang ends the server at an update with a flush while the last step's result is still on its way."""
        if flush:
            self.settle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Newer releases take weights from memory in a session only."""
        if HAS_SESSIONS:
            assert self.serving.post("/begin_weight_update", {})["success"]
        yield
        if HAS_SESSIONS:
            assert self.serving.post("/end_weight_update", {})["success"]

    def update_from_disk(self, seed: int, flush: bool, **fields: Any) -> None:
        self.ready_to_update(flush)
        path = write_tiny_llama_checkpoint(self.serving.folder / f"weights{seed}", seed)
        body = {"model_path": path, "load_format": "auto", "flush_cache": flush, **fields}
        assert self.serving.post("/update_weights_from_disk", body)["success"]

    def update_from_tensor(self, seed: int, flush: bool) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        self.ready_to_update(flush)
        # By name: the server is no child of this process, and shares no file descriptors with it.
        torch.multiprocessing.set_sharing_strategy("file_system")
        named = list(tiny_llama_weights(seed).items())
        serialized = MultiprocessingSerializer.serialize(named, output_str=True)
        body = {"serialized_named_tensors": [serialized], "flush_cache": flush}
        with self.session():
            assert self.serving.post("/update_weights_from_tensor", body)["success"]

    def update_from_distributed(self, seed: int, flush: bool) -> None:
        from sglang.srt.utils import init_custom_process_group

        self.ready_to_update(flush)
        port, name = free_port(), f"trainer{seed}"
        group = {"master_address": "127.0.0.1", "master_port": port, "group_name": name}
        group |= {"rank_offset": 1, "world_size": 2, "backend": "gloo"}
        joining = _in_background(lambda: self.serving.post("/init_weights_update_group", group))
        url = f"tcp://127.0.0.1:{port}"
        ours = init_custom_process_group(
            backend="gloo",
            init_method=url,
            timeout=timedelta(seconds=consts.PROCESS_TIMEOUT_S),
            world_size=2,
            rank=0,
            group_name=name,
        )
        joining()
        weights = tiny_llama_weights(seed)
        body = {
            "names": list(weights),
            "dtypes": ["float32"] * len(weights),
            "shapes": [list(w.shape) for w in weights.values()],
            "group_name": name,
            "flush_cache": flush,
        }
        with self.session():
            updating = _in_background(
                lambda: self.serving.post("/update_weights_from_distributed", body)
            )
            for weight in weights.values():
                torch.distributed.broadcast(weight, 0, group=ours)
            assert updating()["success"]
        torch.distributed.destroy_process_group(ours)

    def update(self, way: str, seed: int, flush: bool) -> None:
        getattr(self, f"update_from_{way}")(seed, flush)

    def assert_weights(self, seed: int) -> None:
        """The server computes with the weights of `seed`."""
        body = {"name": WATCHED, "truncate_size": 1}
        (row,) = self.serving.post("/get_weights_by_name", body)
        expected = tiny_llama_weights(seed)[WATCHED][0]
        torch.testing.assert_close(torch.tensor(row), expected, rtol=0.01, atol=0.001)  # bf16


class TestWeightUpdates(WeightUpdates):
    # An update hides nothing. First, while nobody else has written the slots that the flush frees.

    def test_damage_to_slots_of_the_old_weights_is_found(self) -> None:
        prompt = random_tokens(random.Random("old"), 40)
        self.generate("old-writer", prompt, 1)
        self.update_from_disk(21, flush=False)
        done = self.inject("flip_bytes", cached=prompt, position=20).answer()
        self.generate("new-reader", prompt, 2)
        event = self.assert_violation(
            "CONTENT", "TAIL_K_FULL", reader="new-reader", slot=done["slots"][0]
        )
        assert event["writer"]["request_id"] == "old-writer"
        self.assert_all_explained(done)

    def test_reading_a_slot_from_before_the_flush_is_use_after_free(self) -> None:
        self.generate("flushed-writer", random_tokens(random.Random("flushed"), 40), 4)
        self.update_from_disk(22, flush=True)
        injection = self.inject("freed_slot", mode="DECODE")
        self.generate("stale-reader", random_tokens(random.Random("stale"), 30), 12)
        done = injection.answer()
        event = self.assert_violation("USE_AFTER_FREE", "HEAD_K_FULL", reader="stale-reader")
        assert event["slot"] in done["slots"]
        assert event["writer"]["request_id"] == "flushed-writer"
        self.assert_all_explained(done)

    # Clean

    @pytest.mark.parametrize("flush", [True, False], ids=["flush", "no_flush"])
    @pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
    def test_update_between_requests(self, way: str, flush: bool) -> None:
        shape = TrafficShape(12, seed=5, flushes=0, name=f"{way}{flush}-")
        self.serve(shape)
        seed = 10 + len(way) + flush
        self.update(way, seed, flush)
        self.assert_weights(seed)
        cached = self.cached_tokens("again", shape)
        assert cached == 0 if flush else cached > 0
        self.serve(shape)
        self.assert_no_violations()

    def cached_tokens(self, name: str, shape: TrafficShape) -> int:
        """Tokens of one of the traffic's prompts that the server has in its cache."""
        prompt = list(conversations(shape)[-1].turns[0].own_tokens)
        body = {"rid": f"{shape.name}{name}", "input_ids": prompt}
        body["sampling_params"] = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        return self.serving.post("/generate", body)["meta_info"]["cached_tokens"]

    # Without a flush: SGLang flushes only while no request is running or waiting, and ends the server otherwise.
    @pytest.mark.parametrize("mode", ["in_place", "retract"])
    def test_update_under_running_requests(self, mode: str) -> None:
        shape = TrafficShape(60, seed=6, flushes=0, name=f"running-{mode}-")
        updates = 0
        one_at_a_time = asyncio.Lock()
        updating: list[asyncio.Future] = []

        def on_progress(report: TrafficReport) -> None:
            if report.requests in (15, 30, 45):
                updating.append(asyncio.ensure_future(update()))

        async def update() -> None:
            async with one_at_a_time:
                await asyncio.to_thread(update_once)

        def update_once() -> None:
            nonlocal updates
            self.serving.post("/pause_generation", {"mode": mode})
            try:
                self.update_from_tensor(100 + updates, flush=False)
            finally:
                self.serving.post("/continue_generation", {})
            updates += 1

        async def serve_and_update() -> None:
            assert (await drive(self.serving, shape, on_progress)).requests == 60
            await asyncio.gather(*updating)

        self.run(serve_and_update())
        assert updates == 3
        self.assert_weights(100 + updates - 1)
        self.assert_no_violations()
        self.assert_healthy()


class TestStaleWeights(WeightUpdates):
    """Reads of the old weights' KV are reported, and nothing else is."""

    env: ClassVar = {"SGLANG_KV_CANARY_STALE_WEIGHTS": "report"}

    def read_after(self, name: str, update: Callable[[], Any]) -> list[dict[str, Any]]:
        """The violations of a request whose prefix is cached before an update."""
        prompt = random_tokens(random.Random(name), 40)
        self.generate(f"{name}-writer", prompt, 1)
        update()
        self.assert_no_violations()  # the sweep has read all of it
        self.generate(f"{name}-reader", prompt, 4)
        return self.violations()

    def test_the_versions_are_named(self) -> None:
        self.expect_violations()
        self.update_from_disk(31, flush=True, weight_version="before")
        found = self.read_after(
            "named", lambda: self.update_from_disk(32, flush=False, weight_version="after")
        )
        (event,) = found
        assert (event["tag"], event["reasons"]) == ("HEAD_K_FULL", ["STALE_WEIGHTS"])
        assert event["writer"]["request_id"] == "named-writer"
        assert event["reader"]["request_id"] == "named-reader"
        assert event["expected_position"] == 0
        names = [event[side]["name"] for side in ("writer_weights", "reader_weights")]
        assert names == ["before", "after"]
        self.generate("named-unrelated", random_tokens(random.Random("unrelated"), 40), 4)
        assert self.violations() == found

    @pytest.mark.parametrize("way", ["tensor", "distributed"])
    def test_each_way_to_update_is_noticed(self, way: str) -> None:
        self.expect_violations()
        (event,) = self.read_after(way, lambda: self.update(way, 40 + len(way), flush=False))
        assert event["reasons"] == ["STALE_WEIGHTS"]
        assert event["reader_weights"]["number"] == event["writer_weights"]["number"] + 1

    @pytest.mark.skipif(not HAS_SESSIONS, reason="this SGLang has no sessions of weight updates")
    def test_a_session_in_which_the_trainer_writes_to_the_parameters_is_noticed(self) -> None:
        def write() -> None:
            with self.session():
                pass  # over the network, past the server

        self.expect_violations()
        (event,) = self.read_after("written", write)
        assert event["reasons"] == ["STALE_WEIGHTS"]
        assert event["reader_weights"]["number"] == event["writer_weights"]["number"] + 1

    # Clean

    @pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
    def test_after_a_flush_there_is_nothing_stale(self, way: str) -> None:
        flushed = self.read_after(f"{way}-flush", lambda: self.update(way, 50 + len(way), True))
        assert flushed == []

    def test_an_update_that_fails_changes_nothing(self) -> None:
        def fail() -> None:
            body = {"model_path": "/no/such/model", "load_format": "auto", "flush_cache": False}
            with pytest.raises(HTTPError, match="400"):
                self.serving.post("/update_weights_from_disk", body)

        assert self.read_after("failed", fail) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
