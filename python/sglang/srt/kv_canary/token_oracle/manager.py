"""The oracle on the device: tokens of a batch, logits that make any sampler choose them, and accepted drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.reference.hashing import mix64, shift_right
from ..record import to_signed64
from .oracle import HASH_SHIFT, TokenOracle, seed_of

__all__ = ["TokenOracleManager"]

# Finite in every float type, and too far apart for penalties and temperatures to change the choice.
_CHOSEN, _OTHERS = 1e4, -1e4
_RIGHT_DRAFTS_OF_4 = 3


@dataclass(frozen=True, slots=True)
class TokenOracleManager:
    """The type of `install_canary(token_oracle_manager=...)`. Nothing here waits for the device."""

    oracle: TokenOracle

    def tokens(self, request_ids: Sequence[str], positions: torch.Tensor) -> torch.Tensor:
        """`TokenOracle.token` of each position, int64. `positions` int[batch size, ...], one request per row."""
        token = shift_right(self._hashes(request_ids, positions), HASH_SHIFT) % self.oracle.choices
        for skipped in self.oracle.excluded:
            token = token + (token >= skipped)
        return token

    def steer(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Change `logits` [n, vocabulary] in place so that each row's sample is that of `tokens` int64[n]."""
        logits.fill_(_OTHERS).scatter_(1, tokens[:, None], _CHOSEN)

    def correct_drafts(
        self, request_ids: Sequence[str], positions: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """`drafts` [batch size, n] at `positions`, three of four replaced by the oracle's tokens, which are accepted.

        A draft model cannot guess a hash. Without this, no draft would ever be accepted.
        """
        lucky = (self._hashes(request_ids, positions) & 3) < _RIGHT_DRAFTS_OF_4
        tokens = self.tokens(request_ids, positions).to(drafts.dtype)
        return torch.where(lucky, tokens, drafts)

    def _hashes(self, request_ids: Sequence[str], positions: torch.Tensor) -> torch.Tensor:
        if len(request_ids) != positions.shape[0]:
            raise ValueError(
                f"kv-canary: the token oracle expected one row of positions per request, got {len(request_ids)} "
                f"requests and positions of shape {tuple(positions.shape)}"
            )
        seeds = torch.tensor(
            [to_signed64(seed_of(request_id)) for request_id in request_ids],
            dtype=torch.int64,
            pin_memory=positions.device.type == "cuda",
        ).to(positions.device, non_blocking=True)
        each = seeds.view(-1, *(1,) * (positions.dim() - 1))
        return mix64(each ^ mix64(positions.long()))
