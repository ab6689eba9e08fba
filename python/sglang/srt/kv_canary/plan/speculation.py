"""What speculative decoding adds to the plans: inner draft steps, and draft trees with one parent per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class SpeculationShape:
    """Sizes of one speculative step. The defaults mean no speculation."""

    # Length of a draft chain in tokens; the maximum if it changes while the server runs
    num_steps: int = 1
    topk: int = 1  # branches per draft step
    draft_tokens: int = 1  # tokens per request that a target verify checks; again the maximum

    @classmethod
    def from_server_args(cls, server_args: Any) -> SpeculationShape:
        if server_args.speculative_algorithm is None:
            return cls()
        if server_args.speculative_algorithm == "NGRAM":
            draft_tokens = server_args.speculative_num_draft_tokens or 1
            # Trees of any shape and breadth: tokens that the trie does not fill are padded below the root.
            return cls(topk=draft_tokens, draft_tokens=draft_tokens)
        steps = max(_candidate_steps(server_args))
        draft_tokens = max(verify_widths(server_args))
        return cls(steps, server_args.speculative_eagle_topk or 1, draft_tokens)

    @property
    def inner_draft_forwards(self) -> int:
        """Forwards of one draft. Its first token comes from the previous draft-extend."""
        return max(1, self.num_steps - 1)

    def tree_width(self, is_draft: bool) -> int:
        """Maximum new tokens of a request that do not form a chain in one of the runner's forwards; 1: no tree."""
        if self.topk == 1:
            return 1
        return self.topk if is_draft else self.draft_tokens


def draft_keeps_kv(server_args: Any) -> bool:
    """Whether a draft model, if there is one, stores K and V of its own.

    FROZEN_KV_MTP reads the target's KV of the prefix instead. The target verify after it reads and checks the same KV.
    """
    return server_args.speculative_algorithm not in ("NGRAM", "FROZEN_KV_MTP")


def checks_draft(server_args: Any) -> bool:
    """Whether the draft model's KV is checked. Where it is not, the target's is all the same."""
    return draft_keeps_kv(server_args) and why_draft_is_unchecked(server_args) is None


_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")  # SGLang's other workers ignore --enable-multi-layer-eagle


def why_draft_is_unchecked(server_args: Any) -> str | None:
    """Why KV that a draft model keeps is not checked. None: it is, or it keeps none."""
    if server_args.speculative_algorithm == "DFLASH":
        return "it is stored outside any forward, from the target's hidden states"
    if server_args.enable_multi_layer_eagle and server_args.speculative_algorithm in _EAGLE:
        return "its later layers store tokens that a cached prefix does not determine"
    return None


def verify_widths(server_args: Any) -> tuple[int, ...]:
    """Tokens per request that target verifies check. Adaptive speculation has several; without a draft it is one."""
    first = server_args.speculative_num_draft_tokens or 1
    if not server_args.speculative_adaptive:
        return (first,)
    return tuple(sorted({first, *(steps + 1 for steps in _candidate_steps(server_args))}))


def _candidate_steps(server_args: Any) -> tuple[int, ...]:
    """Adaptive speculation switches between them. The graphs of all candidates are captured at start-up."""
    steps = server_args.speculative_num_steps or 1
    if not server_args.speculative_adaptive:
        return (steps,)
    from sglang.srt.speculative import adaptive_spec_params as adaptive

    path = server_args.speculative_adaptive_config
    candidates = getattr(adaptive, "resolve_candidate_steps_from_config", None)
    if candidates is not None:  # from 0.5.17 on
        return (steps, *candidates(path))
    config = adaptive.load_adaptive_config(path)
    return tuple(adaptive.AdaptiveSpeculativeParams(steps, config).candidate_steps)


def parents_of_tree(next_token: torch.Tensor, next_sibling: torch.Tensor) -> torch.Tensor:
    """Parent of each draft token within its request, int64[batch size, tokens]; -1 for roots.

    `next_token` and `next_sibling`: int[batch size, tokens], first child and next sibling, -1 for none. This is how
    SGLang keeps its draft trees. Nothing is read back from the device.
    """
    batch, width = next_token.shape
    places = torch.arange(width + 1, device=next_token.device).expand(batch, -1)
    numbers = places[:, :width]

    def inverse(pointers: torch.Tensor, default: torch.Tensor) -> torch.Tensor:
        # Column `width` receives the writes of tokens that point nowhere.
        target = torch.where(pointers < 0, width, pointers.long())
        return default.scatter(1, target, numbers)

    parent_of_first = inverse(next_token, torch.full_like(places, -1))
    eldest = inverse(next_sibling, places)
    for _ in range(width.bit_length()):  # pointer jumping along the siblings
        eldest = eldest.gather(1, eldest)
    return parent_of_first.gather(1, eldest)[:, :width]
