"""An abort that reaches one server of a pair before the request does."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.mode_config import MODES
from sglang_kv_canary_rigs.pd_serving import PdServing

register_cpu_ci(est_time=3, suite="stage-a-test-cpu")


class _Server:
    """Learns of a request after `late` seconds, ignores aborts before that, and answers when it is aborted."""

    def __init__(self, late: float) -> None:
        self._late = late
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, request: web.Request) -> web.Response:
        name = (await request.json())["rid"]
        await asyncio.sleep(self._late)
        self._aborted[name] = asyncio.Event()
        await self._aborted[name].wait()
        return web.json_response({"output_ids": []})

    async def abort(self, request: web.Request) -> web.Response:
        aborted = self._aborted.get((await request.json())["rid"])
        if aborted is not None:
            aborted.set()
        return web.Response()

    async def start(self) -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, site.name


class _Pair(PdServing):
    url = ""  # of the decode server


@pytest.mark.parametrize("late", [(0.0, 0.3), (0.3, 0.0), (0.3, 0.3)])
def test_a_request_ends_on_both_servers(late: tuple[float, float]) -> None:
    async def run() -> list[int]:
        servers = [await _Server(seconds).start() for seconds in late]
        pair = _Pair(MODES["mha"])
        (_, prefill), (_, pair.url) = servers
        pair.prefill = SimpleNamespace(url=prefill)
        async with aiohttp.ClientSession() as pair._session:
            answer = asyncio.ensure_future(pair.generate("r", [1, 2], 3))
            await asyncio.sleep(0.1)
            await pair.abort("r")
            tokens = await answer
        for runner, _ in servers:
            await runner.cleanup()
        return tokens

    assert asyncio.run(asyncio.wait_for(run(), 20)) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
