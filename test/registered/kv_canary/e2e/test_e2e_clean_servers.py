"""What real servers do, under RAISE with every check on: none of it raises an alarm. One table of cases.

Each case also proves that the feature was at work, so that a server that ignores the request does not pass.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError

import pytest
import torch

import sglang.version
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.fill_ins import pageable_memory
from sglang_kv_canary.testing.quick_interpreter import quick_interpreter
from sglang_kv_canary.testing.spec_fill_ins import INTERPRETED
from sglang_kv_canary.testing.traffic import TrafficShape, random_tokens
from sglang_kv_canary_rigs.choices_grammar import choices_grammar
from sglang_kv_canary_rigs.feature_serving import MANY, CleanServer, together
from sglang_kv_canary_rigs.tiny_lora import write_lora
from sglang_kv_canary_rigs.volume import volume

WITH_BEAMS = pytest.mark.skipif(
    find_spec("sglang.srt.beam_search") is None,
    reason="this release has no beam search; lifted by make test SGLANG=0.5.23",
)

register_cpu_ci(est_time=150, suite="stage-a-test-cpu")
register_cuda_ci(est_time=300, suite="stage-b-test-1-gpu-small")


@dataclass(frozen=True, slots=True)
class Case:
    """`drive` sends the traffic to a server of the class `server` and asserts that the feature was at work."""

    name: str
    server: str
    drive: Callable[[Any], None]
    gpu_only: str = ""  # what a CPU lacks


def prompt(seed: str, count: int) -> list[int]:
    return random_tokens(random.Random(seed), count)


# Default server: pages of 1, room for many requests, text and JSON


def health_generate(s: CleanServer) -> None:
    """Token 0 is asked for, one token is generated, alone and beside others."""
    before = len(s.prefill_sizes())
    for _ in range(3):
        assert s.status("/health_generate") == 200
    assert len(s.prefill_sizes()) > before + 2, "the health check ran nothing"
    long = prompt("health", 50)
    together(lambda: s.ask("beside", long, 60), lambda: s.status("/health_generate"))


def pause_in_place(s: CleanServer) -> None:
    answers = s.while_paused("in_place", "in-place")
    assert [a["meta_info"]["num_retractions"] for a in answers] == [0] * len(answers)


def pause_and_retract(s: CleanServer) -> None:
    answers = s.while_paused("retract", "retracted")
    assert any(a["meta_info"]["num_retractions"] for a in answers)


def pause_and_abort(s: CleanServer) -> None:
    answers = s.while_paused("abort", "aborted", tokens=900)
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}


def abort_all(s: CleanServer) -> None:
    prompts = [prompt(f"all{i}", 40 + i) for i in range(6)]
    calls = [lambda i=i, p=p: s.ask(f"all{i}", p, 900) for i, p in enumerate(prompts)]

    def stop() -> None:
        s.wait_until_running(len(prompts))
        s.serving.post("/abort_request", {"rid": "", "abort_all": True})

    answers = together(*calls, stop)[:-1]
    assert {a["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
    assert all(a["meta_info"]["completion_tokens"] for a in answers), "they were running"


def cache_salt_and_extra_key(s: CleanServer) -> None:
    """The same tokens in several namespaces: each computes them once, and reads its own later."""
    tokens = prompt("salt", 80)
    text = "".join(random.Random("salt").choice("abcdefgh") for _ in range(80))

    def cached_by_salt(i: int, salt: str | None) -> int:
        body = {"model": "m", "prompt": text, "max_tokens": 4, "temperature": 0}
        answer = s.serving.post(
            "/v1/completions", {**body, **({"cache_salt": salt} if salt else {})}
        )
        return (answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]

    for turn in range(2):
        for key in (None, "a", "b", "ab"):
            more = {} if key is None else {"extra_key": key}
            answer = s.ask(f"key-{key}-{turn}", tokens, 6, **more)
            assert (answer["meta_info"]["cached_tokens"] >= 79) == bool(turn), key
    for turn in range(2):
        for salt in (None, "a", "b"):
            assert (cached_by_salt(turn, salt) >= 79) == bool(turn), salt
    keys = [f"k{i % 3}" for i in range(9)]
    together(
        *(lambda i=i, k=k: s.ask(f"mix{i}", tokens, 8, extra_key=k) for i, k in enumerate(keys))
    )


def json_schema(s: CleanServer) -> None:
    choices = [{"answer": "yes", "why": "a"}, {"answer": "no"}, ["none"]]
    schema = json.dumps({"enum": choices})
    tokens = prompt("json", 30)
    sampling = {"json_schema": schema, "ignore_eos": False}
    calls = [
        lambda i=i: s.ask(f"json{i}", tokens[i:], 64, sampling_params=sampling) for i in range(5)
    ]
    free = [lambda i=i: s.ask(f"free{i}", tokens[:-i], 20) for i in range(1, 4)]
    answers = together(*calls, *free)
    for answer in answers[:5]:
        assert json.loads(answer["text"]) in choices
    assert all(len(answer["output_ids"]) == 20 for answer in answers[5:])


def logprobs(s: CleanServer) -> None:
    """Input logprobs shorten the prefix that a request may reuse: what is cached is computed again."""
    tokens = prompt("logprobs", 60)
    s.ask("plain", tokens, 4)
    for start, count, cached in ((0, 60, 0), (30, 30, 30), (-1, 0, 59)):
        answer = s.ask(
            f"logprob{start}",
            tokens,
            4,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=3,
        )["meta_info"]
        assert len(answer["output_token_logprobs"]) == len(answer["output_top_logprobs"]) == 4
        assert len(answer["input_token_logprobs"]) == count
        assert answer["cached_tokens"] == cached


def several_answers(s: CleanServer) -> None:
    """`n` answers of one prompt share its slots; each goes its own way."""
    hot = {"n": 5, "temperature": 5.0}
    for turn in range(2):
        answers = s.ask(f"n{turn}", prompt("n", 70), 16, sampling_params=hot, rid=None)
        assert len({tuple(answer["output_ids"]) for answer in answers}) == 5
        assert all(answer["meta_info"]["cached_tokens"] >= 69 for answer in answers)


# These forget a streamed request whose client has left before they abort it: it runs to its end.
ABORTS_STREAMS = sglang.version.__version__ not in ("0.5.18", "0.5.19")


def disconnects(s: CleanServer) -> None:
    """Clients that hang up, over a streamed answer and while they wait for one: SGLang aborts their requests."""
    count = 900 if ABORTS_STREAMS else 60
    for i in range(4):
        body = s.body(f"gone{i}", prompt(f"gone{i}", 50 + i), count, stream=True)
        s.hang_up(body, after_tokens=3)
    if ABORTS_STREAMS:
        s.serving.wait_for(lambda: len(s.aborted("gone")) == 4, "four aborts")
    s.hang_up(s.body("waited", prompt("waited", 50), 900))
    s.serving.wait_for(lambda: s.aborted("waited"), "an abort")
    s.ask("after", prompt("gone0", 50), 8)


def many_in_one_prefill(s: CleanServer) -> None:
    """A prefill of more than 256 requests, some over a shared prefix, and the decode of as many."""
    shared = prompt("many", 40)
    s.ask("many", shared, 1)
    prompts = [shared[: i % 40] + prompt(f"many{i}", 1 + i % 6) for i in range(MANY)]
    s.generate_together([(f"many{i}", p, 3) for i, p in enumerate(prompts)])
    assert max(s.prefill_sizes()) > 256


def mixed_traffic(s: CleanServer) -> None:
    report = s.serve(
        TrafficShape(volume(24, 40), seed=31, flushes=1, name="mixed", abort_share=0.1)
    )
    assert (report.requests, report.flushes) == (volume(24, 40), 1)


# Pages of 16, four requests at once, priorities


def preemption(s: CleanServer) -> None:
    """Urgent requests take running ones their place; those start again from what the cache has kept."""
    low = [lambda i=i: s.ask(f"low{i}", prompt(f"low{i}", 90), 150, priority=0) for i in range(4)]

    def urgent(i: int) -> dict[str, Any]:
        s.wait_until_running(4)
        return s.ask(f"urgent{i}", prompt("urgent", 40) + prompt(f"urgent{i}", 9), 20, priority=100)

    answers = together(*low, *(lambda i=i: urgent(i) for i in range(3)))
    assert sum(a["meta_info"]["num_retractions"] for a in answers[:4]) > 0
    assert not any(a["meta_info"]["num_retractions"] for a in answers[4:])
    assert all(len(a["output_ids"]) == 150 for a in answers[:4])


def page_traffic(s: CleanServer) -> None:
    page = s.serving.get("/server_info")["page_size"]
    assert page == s.flags["page_size"]
    report = s.serve(
        TrafficShape(volume(24, 40), seed=page, flushes=1, name="paged", abort_share=0.1)
    )
    assert (report.requests, report.flushes) == (volume(24, 40), 1)
    first = prompt("page", 3 * page + 7)
    for turn in range(2):
        cached = s.ask(f"page{turn}", first, 4)["meta_info"]["cached_tokens"]
        assert cached == turn * 3 * page


# Pages of 64, LoRA


def adapters(s: CleanServer) -> None:
    """The same tokens under two adapters and none, in one batch: each has a prefix of its own."""
    tokens = prompt("lora", 150)
    s.serving.post("/load_lora_adapter", {"lora_name": "blue", "lora_path": s.adapters["blue"]})
    answers = {}
    for turn in range(2):
        for name in (None, "red", "blue"):
            answer = s.ask(
                f"lora-{name}-{turn}", tokens, 8, **({"lora_path": name} if name else {})
            )
            assert answer["meta_info"]["cached_tokens"] == turn * 128, name
            answers.setdefault(name, []).append(answer["output_ids"])
    assert len({tuple(a[0]) for a in answers.values()}) == 3, "the adapters change the answers"
    names = [(None, "red", "blue")[i % 3] for i in range(9)]
    together(
        *(
            lambda i=i, n=n: s.ask(
                f"mix{i}", tokens[: 80 + i], 12, **({"lora_path": n} if n else {})
            )
            for i, n in enumerate(names)
        )
    )
    s.serving.post("/unload_lora_adapter", {"lora_name": "blue"})


# Embeddings


def embeddings(s: CleanServer) -> None:
    """Prefills only; a prompt that was seen is read from the cache and gives the same vector."""
    prompts = [prompt("embed", 90)[: 90 - 20 * (i % 3)] + prompt(f"e{i}", i) for i in range(12)]
    first = together(*(lambda p=p: s.embed(p) for p in prompts))
    again = together(*(lambda p=p: s.embed(p) for p in prompts))
    for one, two in zip(first, again, strict=True):
        assert len(one) == 64
        assert torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-3)
    assert s.settle()["TAIL_K_FULL"]["checked"] > 500, "nothing was read from the cache"
    assert s.status("/health_generate") == 200


# Images: placeholder values beyond the vocabulary, positions that the model changes in place


def picture(shade: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (40, 40), (shade, 255 - shade, 7)).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def images(s: CleanServer) -> None:
    """The same text around other images is another prefix; around the same image it is read from the cache."""
    text = "see <start_of_image> and <start_of_image> what now?"
    cached = {}
    for turn in range(2):
        for shades in ((10, 20), (10, 30), (40, 20)):
            answer = s.see(f"see-{shades}-{turn}", text, [picture(shade) for shade in shades])
            cached[turn, shades] = answer["meta_info"]["cached_tokens"]
            length = answer["meta_info"]["prompt_tokens"]
    assert cached[0, (10, 30)] > 4, cached
    assert cached[0, (40, 20)] < cached[0, (10, 30)] < length - 6, cached
    assert all(cached[1, shades] >= length - 1 for shades in ((10, 20), (10, 30), (40, 20)))
    plain = [lambda i=i: s.ask(f"text{i}", prompt("text", 40)[: 20 + i], 12) for i in range(4)]
    seen = [lambda i=i: s.see(f"mixed{i}", text, [picture(i), picture(20)]) for i in range(4)]
    together(*plain, *seen)


def second_turn_over_an_image(s: CleanServer) -> None:
    text = "<start_of_image> is what?"
    first = s.see("turn0", text, [picture(90)])
    second = s.see("turn1", text + first["text"] + " and now", [picture(90)])
    assert second["meta_info"]["cached_tokens"] >= first["meta_info"]["prompt_tokens"]


# Deterministic inference


def deterministic(s: CleanServer) -> None:
    assert s.serving.get("/server_info")["enable_deterministic_inference"]
    tokens = prompt("same", 100)
    alone = s.ask("alone", tokens, 24, return_logprob=True)
    others = [lambda i=i: s.ask(f"o{i}", prompt(f"o{i}", 30 + 9 * i), 40) for i in range(6)]
    beside = together(lambda: s.ask("beside", tokens, 24, return_logprob=True), *others)[0]
    chances = [a["meta_info"]["output_token_logprobs"] for a in (alone, beside)]
    assert chances[0] == chances[1], "the batch around a request changes nothing, bit for bit"


CASES = (
    Case("health_generate", "features", health_generate),
    Case("pause_in_place", "features", pause_in_place),
    Case("pause_and_retract", "features", pause_and_retract),
    Case("pause_and_abort", "features", pause_and_abort),
    Case("abort_all", "features", abort_all),
    Case("cache_salt_and_extra_key", "features", cache_salt_and_extra_key),
    Case("json_schema", "features", json_schema),
    Case("logprobs", "features", logprobs),
    Case("several_answers", "features", several_answers),
    Case("disconnects", "features", disconnects),
    Case("prefill_of_more_than_256", "features", many_in_one_prefill),
    Case("mixed_traffic", "features", mixed_traffic),
    Case("preemption", "page16", preemption),
    Case("page_16", "page16", page_traffic),
    Case("lora", "page64", adapters),
    Case("page_64", "page64", page_traffic),
    Case("embeddings", "embedding", embeddings),
    Case("images_and_positions_in_place", "images", images),
    Case("second_turn_over_an_image", "images", second_turn_over_an_image),
    Case(
        "deterministic_inference",
        "deterministic",
        deterministic,
        gpu_only="SGLang's batch-invariant operators exist for CUDA and XPU only",
    ),
)


def cases_of(server: str) -> Any:
    """Parametrizes a test with the server's cases; a case that this machine cannot run says what it needs."""
    on_cpu = not torch.cuda.is_available()
    cases = [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.skipif(bool(case.gpu_only) and on_cpu, reason=case.gpu_only),
        )
        for case in CASES
        if case.server == server
    ]
    return pytest.mark.parametrize("case", cases)


ON_CPU = () if torch.cuda.is_available() else (pageable_memory,)
# SGLang's allocator of pages is a Triton kernel.
PAGED = {} if torch.cuda.is_available() else INTERPRETED
PAGED_PLUGINS = () if torch.cuda.is_available() else (quick_interpreter,)


class TestFeatures(CleanServer):
    mode_name = "features"
    plugins = (choices_grammar, *ON_CPU)

    @cases_of("features")
    def test_clean(self, case: Case) -> None:
        case.drive(self)

    @WITH_BEAMS
    @pytest.mark.parametrize("widths", [(2,), (1, 2)], ids=["alone", "later_in_a_batch"])
    def test_beam_search_is_refused(self, widths: Sequence[int]) -> None:
        """Each item of a batch has a width of its own. The second one would be fed tokens that nobody has sampled."""
        prompts = [prompt(f"beam{i}", 40) for i in range(len(widths))]
        bodies = [self.body("", (), 8, sampling_params={"beam_width": w}) for w in widths]
        sampling = [body["sampling_params"] for body in bodies]
        with pytest.raises(HTTPError, match=r"400.*kv-canary: beam_width > 1 is refused"):
            self.serving.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        one = {"beam_width": 1}
        assert len(self.ask("beam", prompts[0], 8, sampling_params=one)["output_ids"]) == 8


@WITH_BEAMS
class TestPreferredBeams(CleanServer):
    flags: ClassVar = {**CleanServer.flags, "preferred_sampling_params": '{"beam_width": 2}'}

    def test_beams_that_the_server_prefers_are_refused(self) -> None:
        tokens = prompt("beam", 40)
        with pytest.raises(HTTPError, match=r"400.*kv-canary: beam_width > 1 is refused"):
            self.ask("preferred", tokens, 8)
        one = {"beam_width": 1}
        assert len(self.ask("beam", tokens, 8, sampling_params=one)["output_ids"]) == 8


class TestPage16WithPriorities(CleanServer):
    flags: ClassVar = {
        **CleanServer.flags,
        "page_size": consts.PAGE_SIZE,
        "enable_priority_scheduling": True,
        "schedule_policy": "fcfs",
        "max_running_requests": 4,
    }
    env: ClassVar = {**CleanServer.env, **PAGED}
    plugins = PAGED_PLUGINS

    @cases_of("page16")
    def test_clean(self, case: Case) -> None:
        case.drive(self)


class TestPage64WithLora(CleanServer):
    mode_name = (
        "weights"  # SGLang reads adapters as it reads the model, so that dummy weights will not do
    )
    env: ClassVar = {**CleanServer.env, **PAGED}
    plugins = (*ON_CPU, *PAGED_PLUGINS)
    adapters: ClassVar[dict[str, str]]

    @classmethod
    def setup_class(cls) -> None:
        cls._folder = tempfile.TemporaryDirectory(prefix="kv_canary_lora_")
        names = ("red", "blue")
        cls.adapters = {n: write_lora(Path(cls._folder.name) / n, i) for i, n in enumerate(names)}
        cls.flags = {
            **CleanServer.flags,
            "page_size": 64,
            "lora_paths": f"red={cls.adapters['red']}",
            "lora_backend": "triton" if torch.cuda.is_available() else "torch_native",
        }
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls._folder.cleanup()

    @cases_of("page64")
    def test_clean(self, case: Case) -> None:
        case.drive(self)


class TestEmbeddings(CleanServer):
    flags: ClassVar = {**CleanServer.flags, "is_embedding": True}

    @cases_of("embedding")
    def test_clean(self, case: Case) -> None:
        case.drive(self)


class TestImages(CleanServer):
    mode_name = "images"
    plugins = ON_CPU

    @cases_of("images")
    def test_clean(self, case: Case) -> None:
        case.drive(self)


class TestDeterministic(CleanServer):
    flags: ClassVar = {
        **CleanServer.flags,
        "enable_deterministic_inference": True,
        # In this mode SGLang cuts chunks at multiples of 4,096 tokens. A prompt that needs a smaller one waits forever.
        "chunked_prefill_size": 8192,
    }

    @cases_of("deterministic")
    def test_clean(self, case: Case) -> None:
        case.drive(self)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
