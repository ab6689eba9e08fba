"""Real servers under the token oracle: every answer is compared with it, and sampled tokens can be altered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from sglang_kv_canary.environ import TOKEN_ORACLE
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.serving import Serving
from sglang_kv_canary.token_oracle import TokenOracle

from .altered_sampling import alter_sampled_tokens, request_file

__all__ = ["CheckedClient", "TokenOracleE2E"]


class CheckedClient:
    """A `traffic.Client` that compares every answer of `serving` with the oracle."""

    def __init__(self, serving: Serving, oracle: TokenOracle) -> None:
        self._serving, self._oracle = serving, oracle
        self.checked_tokens = 0

    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> list[int]:
        answer = await self._serving.generate(request_id, input_ids, max_new_tokens)
        assert answer == self._oracle.answer(request_id, len(input_ids), len(answer)), request_id
        self.checked_tokens += len(answer)
        return answer

    async def abort(self, request_id: str) -> None:
        await self._serving.abort(request_id)

    async def flush(self) -> bool:
        return await self._serving.flush()


class TokenOracleE2E(CanaryE2EBase):
    """The oracle is on, and `alter_plugin` alters a sampled token when asked to."""

    env: ClassVar[Mapping[str, str]] = {
        TOKEN_ORACLE.name: "1",
        "SGLANG_KV_CANARY_TOKEN_CHECK": "all",
    }
    plugins: ClassVar[Sequence[Callable[[], None]]] = (alter_sampled_tokens,)
    oracle: ClassVar[TokenOracle]

    @classmethod
    def setup_class(cls) -> None:
        super().setup_class()
        said = cls.serving.get("/server_info")["kv_canary_active"][0]["token_oracle"]
        cls.oracle = TokenOracle(said["vocab_size"], tuple(said["excluded"]))

    def client(self) -> CheckedClient:
        return CheckedClient(self.serving, self.oracle)

    def generate_altered(self, prompt: list[int], tokens: int, sampling: int) -> dict[str, Any]:
        """A request whose `sampling`-th sampling returns another token; returns the violation to expect of it."""
        self.expect_violations()
        request = request_file(self.serving.controls)
        request.write_text(str(sampling))
        answer = self.generate("altered", prompt, tokens)
        assert not request.exists()
        right = self.oracle.answer("altered", len(prompt), tokens)
        (index,) = (i for i in range(tokens) if answer[i] != right[i])
        return {
            "reader": "altered",
            "expected_position": len(prompt) + index,
            "stored_position": len(prompt) + index,
            "expected_token": right[index],
            "stored_token": answer[index],
        }

    def assert_altered_token_is_reported(self, expected: Mapping[str, Any]) -> None:
        """At each pool and half of the target, and nothing else is."""
        found = self.violations()
        assert {event["tag"] for event in found} == {*self.mode.tags("HEAD")}
        assert len(found) == len(self.mode.tags("HEAD"))
        for tag in self.mode.tags("HEAD"):
            event = self.assert_violation("WRITE_TOKEN", tag, runner="target", **expected)
            assert event["reasons"] == ["WRITE_TOKEN"]
