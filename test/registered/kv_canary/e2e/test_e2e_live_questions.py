"""Live questions to a real server: with SGLang's admin key only, while it serves and while it idles."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.traffic import random_tokens
from sglang_kv_canary_rigs import runbook
from sglang_kv_canary_rigs.checkout import DOCS

register_cpu_ci(est_time=20, suite="stage-a-test-cpu")

ODD = "a/b?c\n\x1b[2Jchat"  # a request id is whatever a client sends


class TestLiveQuestions(CanaryE2EBase):
    flags: ClassVar = {
        "kv_canary": "log",
        "kv_canary_real_data": "all",
        "admin_api_key": "the-admin-key",
    }

    def ask(self, path: str) -> dict[str, Any]:
        (rank,) = self.serving.get(f"/kv_canary/{path}", self.serving.admin)["ranks"]
        return rank

    def status(self, path: str, key: str | None = None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        with pytest.raises(HTTPError) as refused:
            self.serving.get(f"/kv_canary/{path}", headers)
        return refused.value.code

    def ask_for_request(self, request_id: str) -> dict[str, Any]:
        try:
            return self.ask(f"request/{quote(request_id, safe='')}")
        except HTTPError as error:
            return {"running": False, "status": error.code}

    def prompt(self, name: str) -> list[int]:
        return random_tokens(random.Random(name), 40)

    def test_nobody_is_answered_without_the_key(self) -> None:
        assert [self.status("slot/1"), self.status("request/ada", "wrong")] == [401, 401]
        assert [self.status(path, "the-admin-key") for path in ("slot/0", "slot/999999")] == [
            400
        ] * 2
        assert self.status("request/nobody", "the-admin-key") == 404

    def test_a_running_request_and_its_slots_are_told(self) -> None:
        async def asking() -> tuple[dict[str, Any], dict[str, Any]]:
            running = asyncio.create_task(self.serving.generate(ODD, self.prompt("ada"), 900))
            while not (request := await asyncio.to_thread(self.ask_for_request, ODD))["running"]:
                assert not running.done()
            slot = await asyncio.to_thread(self.ask, f"slot/{request['slots'][7]}")
            assert not running.done(), "the request ended too early for this test"
            await self.serving.abort(ODD)
            await running
            return request, slot

        request, slot = self.run(asking())
        assert request["filled"] == {"cached": 0, "prefix": 0, "length": 40}
        assert request["length"] >= 40 <= len(request["slots"])
        assert (request["groups"][0]["diverges"], request["causes"]) == (None, [])
        (group,) = slot["groups"]
        assert (group["state"], group["writer"]["request_id"]) == ("LIVE", ODD)
        assert group["records"]["V_TAIL"]["position"] == 7
        assert [(r["position"], r["request_id"]) for r in slot["readers"]] == [(7, ODD)]
        assert [moment["what"] for moment in slot["history"]["FULL"]][-1] == "alloc"
        assert "\x1b" not in self.serving.stderr
        self.assert_no_violations()

    def test_a_damaged_cached_slot_is_told_with_its_cause(self) -> None:
        prompt = self.prompt("cleo")
        self.generate("cleo", prompt, 2)
        (slot,) = self.inject("flip_bytes", cached=prompt, position=9).answer()["slots"]
        (group,) = self.ask(f"slot/{slot}")["groups"]
        assert (group["cached_at"][0]["position"], group["causes"]) == (9, [])
        self.generate("dora", [*prompt, 7], 2)
        self.assert_violation("CONTENT")
        self.serving.post("/pause_generation", {"mode": "in_place"}, self.serving.admin)
        (group,) = self.ask(f"slot/{slot}")["groups"]
        assert 'request "dora"' in group["causes"][0]["sentence"]
        self.serving.post("/continue_generation", {"torch_empty_cache": False}, self.serving.admin)
        answers = {name: self.ask(f"request/{name}") for name in ("cleo", "dora")}
        parts = {name: {cause["as"] for cause in a["causes"]} for name, a in answers.items()}
        assert parts == {"cleo": {"writer"}, "dora": {"reader"}}
        assert [answer["running"] for answer in answers.values()] == [False, False]

    @pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: the runbook is not here")
    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    def test_the_runbook_sends_the_key_that_each_command_needs(self, tmp_path: Path) -> None:
        def run(sign: str, key: str) -> str:
            (command,) = runbook.commands("curl ", sign)
            command = command.replace(
                runbook.SERVER, f"127.0.0.1:{self.serving.server_args['port']}"
            )
            return runbook.run(command, tmp_path, KEY="", ADMIN_KEY=key)

        for sign in ("/abort_request", "/flush_cache"):
            assert run(sign, "the-admin-key").endswith("HTTP 200\n")
            assert run(sign, "").endswith("HTTP 401\n")
        run("/server_info", "")
        assert json.loads((tmp_path / "server_info.json").read_text())["kv_canary"] == "log"

    @pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: the runbook is not here")
    @pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
    def test_the_runbook_takes_the_keys_out_of_the_flags(self, tmp_path: Path) -> None:
        told = self.serving.get("/server_info")
        state = told["internal_states"][0]
        state["ssl_keyfile_password"] = "the-admin-key"
        assert "the-admin-key" in (told["admin_api_key"], state["admin_api_key"])
        (tmp_path / "server_info.json").write_text(json.dumps(told))
        (command,) = runbook.commands("jq ", "server_info.json")
        runbook.run(command, tmp_path)
        text = (tmp_path / "flags.json").read_text()
        assert "the-admin-key" not in text
        left = json.loads(text)
        gone = {"api_key", "admin_api_key", "ssl_keyfile_password", "launch_command"}
        for whole, part in ((told, left), (state, left["internal_states"][0])):
            assert whole.keys() - part.keys() == gone & whole.keys()
        assert left["internal_states"][0]["kv_canary"] == state["kv_canary"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
