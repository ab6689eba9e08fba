"""A sampler for tests: the next token is a hash of request id and position, so that every right input is known."""

from sglang.srt.kv_canary.token_oracle.manager import TokenOracleManager
from sglang.srt.kv_canary.token_oracle.oracle import TokenOracle

__all__ = ["TokenOracle", "TokenOracleManager"]
