"""What speculative decoding adds to the plans: inner draft steps, and draft trees as one parent per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class SpeculationShape:
    """Sizes of one speculative step; those of no speculation by default."""

    # Draft tokens behind each other; the most of them, where it changes as the server runs
    num_steps: int = 1
    topk: int = 1  # branches per draft step
    draft_tokens: int = 1  # tokens per request that a target verify checks

    @classmethod
    def from_server_args(cls, server_args: Any) -> SpeculationShape:
        if server_args.speculative_algorithm is None:
            return cls()
        draft_tokens = server_args.speculative_num_draft_tokens or 1
        if server_args.speculative_algorithm == "NGRAM":
            # Trees of any shape, whatever its breadth: what the trie does not fill is padded below the root.
            return cls(topk=draft_tokens, draft_tokens=draft_tokens)
        return cls(
            _most_steps(server_args),
            server_args.speculative_eagle_topk or 1,
            draft_tokens,
        )

    @property
    def inner_draft_forwards(self) -> int:
        """Forwards of one draft: its first token comes from the draft-extend before."""
        return max(1, self.num_steps - 1)

    def tree_width(self, is_draft: bool) -> int:
        """Most new tokens of a request that do not follow each other, in a runner's forwards; 1: none."""
        if self.topk == 1:
            return 1
        return self.topk if is_draft else self.draft_tokens


def draft_keeps_kv(server_args: Any) -> bool:
    """Whether a draft model, if there is one, stores K and V of its own.

    That of FROZEN_KV_MTP attends to the target's, of the prefix that the target verify behind it reads and checks.
    """
    return server_args.speculative_algorithm not in ("NGRAM", "FROZEN_KV_MTP")


def _most_steps(server_args: Any) -> int:
    """Adaptive speculation moves between candidates, all of which have their graphs captured at start-up."""
    steps = server_args.speculative_num_steps or 1
    if not server_args.speculative_adaptive:
        return steps
    from sglang.srt.speculative.adaptive_spec_params import (
        AdaptiveSpeculativeParams,
        load_adaptive_config,
    )

    config = load_adaptive_config(server_args.speculative_adaptive_config)
    return AdaptiveSpeculativeParams(steps, config).max_steps


def parents_of_tree(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Parent of each draft token, int64[batch size, tokens], within its request; -1 for roots.

    `next_token` and `next_sibling`: int[batch size, tokens], first child and next sibling, -1 for none, as SGLang
    keeps its draft trees. Nothing is read back from the device.
    """
    batch, width = next_token.shape
    places = torch.arange(width + 1, device=next_token.device).expand(batch, -1)
    numbers = places[:, :width]

    def inverse(pointers: torch.Tensor, default: torch.Tensor) -> torch.Tensor:
        # Column `width` takes the writes of tokens that point nowhere.
        target = torch.where(pointers < 0, width, pointers.long())
        return default.scatter(1, target, numbers)

    parent_of_first = inverse(next_token, torch.full_like(places, -1))
    eldest = inverse(next_sibling, places)
    for _ in range(width.bit_length()):  # pointer jumping along the siblings
        eldest = eldest.gather(1, eldest)
    return parent_of_first.gather(1, eldest)[:, :width]
