"""A sampler for tests: the next token is a hash of request id and position, so every right input is known."""

from .manager import TokenOracleManager
from .oracle import TokenOracle

__all__ = ["TokenOracle", "TokenOracleManager"]
