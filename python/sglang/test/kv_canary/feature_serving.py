"""Servers for the features that real ones use, in RAISE mode with every check on; see `test_e2e_clean_servers.py`."""

from __future__ import annotations

import http.client
import json
import random
import re
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary.testing.tiny_models import (
    write_tiny_gemma3_with_images,
    write_tiny_llama_checkpoint,
    write_tiny_llama_with_tokenizer,
)
from sglang_kv_canary.testing.traffic import random_tokens

from . import choices_grammar


def write_gemma3_checkpoint(folder: str | Path) -> str:
    """The tiny Gemma 3 that sees images, with weights of transformers' making. Returns the path."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, Gemma3ForConditionalGeneration

    path = Path(write_tiny_gemma3_with_images(folder))
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as saved:
        torch.manual_seed(1)
        Gemma3ForConditionalGeneration(AutoConfig.from_pretrained(path)).save_pretrained(saved)
        weights = load_file(Path(saved) / "model.safetensors")
    # As SGLang, and checkpoints of Gemma 3, name them.
    tower, whole = "vision_tower.", "vision_tower.vision_model."
    renamed = {name.replace(tower, whole): weight for name, weight in weights.items()}
    save_file(renamed, path / "model.safetensors")
    return str(path)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run blocking calls at once; what they return."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [running.result() for running in [threads.submit(call) for call in calls]]


_MHA = MODES["mha"]
MANY = 300  # requests in one prefill: more than the 256 that the warm-up prepares for

MODES["features"] = replace(
    _MHA,
    name="features",
    write_model=write_tiny_llama_with_tokenizer,
    server_args={
        **_MHA.server_args,
        "skip_tokenizer_init": False,
        "grammar_backend": choices_grammar.NAME,
        "max_running_requests": MANY + 20,
        "max_total_tokens": 16 * 1024,
        "chunked_prefill_size": 8 * MANY,
    },
)
MODES["weights"] = replace(
    _MHA,
    name="weights",
    write_model=partial(write_tiny_llama_checkpoint, seed=1),
    server_args={**_MHA.server_args, "load_format": "auto"},
)
MODES["images"] = replace(
    _MHA,
    name="images",
    write_model=write_tiny_gemma3_with_images,
    # SGLang: attention between an image's tokens is incompatible with chunks.
    server_args={
        **_MHA.server_args,
        "skip_tokenizer_init": False,
        "chunked_prefill_size": -1,
        "enable_multimodal": True,
    },
    # SGLang's choice for the vision tower needs FlashAttention 3, which not every build has.
    cuda_args={**_MHA.cuda_args, "mm_attention_backend": "triton_attn"},
)

MODES["images_weights"] = replace(
    MODES["images"],
    name="images_weights",
    write_model=write_gemma3_checkpoint,
    server_args={**MODES["images"].server_args, "load_format": "auto"},
)


class CleanServer(CanaryE2EBase):
    """`--kv-canary raise` with content `all`, the whole token check and a sweep that is always due.

    The first finding ends the server, which fails the test that it happens in.
    """

    flags: ClassVar[Mapping[str, Any]] = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        "log_level": "debug",  # SGLang names the requests that it aborts
        "enable_cache_report": True,
    }
    env: ClassVar[Mapping[str, str]] = {
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",  # SGLang's own default
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
        "SGLANG_KV_CANARY_HEALTH_CHECK_INTERVAL": "20",
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds after which SGLang looks whether a client is still there
    }

    def body(self, name: str, tokens: Sequence[int], answer: int, **more: Any) -> dict[str, Any]:
        """A request for `answer` tokens; `more`: further fields, whose `sampling_params` are added to ours."""
        sampling = {"temperature": 0.0, "max_new_tokens": answer, "ignore_eos": True}
        sampling |= more.pop("sampling_params", {})
        return {"rid": name, "input_ids": list(tokens), "sampling_params": sampling, **more}

    def ask(self, name: str, tokens: Sequence[int], answer: int, **more: Any) -> Any:
        """SGLang's whole answer to `body`."""
        return self.serving.post("/generate", self.body(name, tokens, answer, **more))

    def see(self, name: str, text: str, pictures: Sequence[str]) -> Any:
        """SGLang's whole answer to a text with pictures, each base64."""
        body = self.body(name, (), 8, text=text, image_data=list(pictures))
        del body["input_ids"]
        return self.serving.post("/generate", body)

    def embed(self, tokens: Sequence[int]) -> list[float]:
        return self.serving.post("/encode", {"input_ids": list(tokens)})["embedding"]

    def status(self, path: str) -> int:
        """HTTP status of a GET."""
        with urllib.request.urlopen(self.serving.url + path, timeout=60) as answer:
            return answer.status

    # Pauses

    def while_paused(self, mode: str, name: str, tokens: int = 100) -> list[Any]:
        """Answers to requests that were running when the server was paused and that it went on with."""
        prompts = [random_tokens(random.Random(f"{name}{i}"), 30 + 7 * i) for i in range(5)]

        def pause() -> None:
            self.wait_until_running(len(prompts))
            self.serving.post("/pause_generation", {"mode": mode})
            # The scheduler answers between two steps, each of which would take slots.
            used = {self.load()["num_used_tokens"] for _ in range(5)}
            self.resume()
            assert len(used) == 1, f"the server went on: {used}"

        calls = [lambda i=i, p=p: self.ask(f"{name}{i}", p, tokens) for i, p in enumerate(prompts)]
        return together(*calls, pause)[:-1]

    def resume(self) -> None:
        # SGLang empties CUDA's cache otherwise, also where there is none.
        self.serving.post("/continue_generation", {"torch_empty_cache": False})

    def load(self) -> dict[str, Any]:
        """What the scheduler says of itself."""
        return self.serving.get("/v1/loads")["loads"][0]

    def wait_until_running(self, requests: int) -> None:
        """Until `requests` are running at once."""
        self.serving.wait_for(
            lambda: self.load()["num_running_reqs"] >= requests,
            f"{requests} requests were running",
        )

    # Observe

    def aborted(self, prefix: str) -> list[str]:
        """Requests whose name starts with `prefix` that were aborted while they ran, as SGLang logs them."""
        running = re.findall(r"Abort running request\. req\.rid='([^']*)'", self.serving.stderr)
        return sorted({name for name in running if name.startswith(prefix)})

    def prefill_sizes(self) -> list[int]:
        """Requests in each prefill so far, as SGLang logs them."""
        return [
            int(size)
            for size in re.findall(r"Prefill batch.*?#new-seq: (\d+)", self.serving.stderr)
        ]

    def hang_up(self, body: Mapping[str, Any], after_tokens: int = 0) -> None:
        """Send a request and close the connection, after some of the streamed answer where that is asked for."""
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.server_args["port"])
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        if after_tokens:
            response = connection.getresponse()
            for _ in range(2 * after_tokens):  # an event and an empty line each
                assert response.readline()
            response.close()
        connection.close()
