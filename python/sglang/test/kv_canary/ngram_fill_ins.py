"""Lets SGLang's NGRAM worker run on a machine without a GPU: stand-ins for its trie and for the ops of sgl_kernel.

A fill-in as those of `fill_ins.py`. The trie is C++ that is compiled when a server starts; the stand-in proposes from
pairs of tokens, and hands out its trees as that one does, padding included.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sglang_kv_canary.testing.spec_fill_ins import verify_tree_greedy
from sglang_kv_canary.wiring.releases import release

__all__ = ["PairCorpus", "ngram_on_cpu", "reconstruct_indices"]


def ngram_on_cpu() -> None:
    """Replace what NGRAM needs a GPU, or a C++ compiler, for."""
    _module("sgl_kernel.speculative", reconstruct_indices_from_tree_mask=reconstruct_indices)
    if release().has_own_canary:
        _module("sglang.kernels.ops.speculative.ngram_corpus", get_ngram_corpus_cls=_pair_corpus)
        _mask_as_on_gpus()
    else:
        _module("sglang.jit_kernel.ngram_corpus", get_ngram_corpus_cls=_pair_corpus)
        _replace_gpu_parts()


def _pair_corpus() -> type[PairCorpus]:
    return PairCorpus


def _mask_as_on_gpus() -> None:
    """Triton attention reads a mask that spans the prefix, too. On a CPU SGLang hands out one without."""
    from sglang.srt.speculative import ngram_worker

    ngram_worker._is_cpu = False


def _replace_gpu_parts() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, stand_in in (
        ("sglang.srt.server_args.ServerArgs._handle_speculative_decoding", _as_on_cuda),
        ("sglang.srt.speculative.ngram_worker.NGRAMWorker._init_preallocated_tensors", _on_cpu),
    ):
        HookRegistry.register(target, stand_in, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.speculative.ngram_info.NgramVerifyInput._greedy_verify",
        _supply_verify,
        HookType.BEFORE,
    )
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def _module(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def _as_on_cuda(original: Callable[[Any], None], server_args: Any) -> None:
    """NGRAM is refused on other devices."""
    device = server_args.device
    server_args.device = "cuda"
    try:
        original(server_args)
    finally:
        server_args.device = device


def _on_cpu(original: Callable[[Any], None], worker: Any) -> None:
    worker.device = "cpu"
    original(worker)


def _supply_verify(*_: Any, **__: Any) -> None:
    from sglang.srt.speculative import ngram_info

    ngram_info.verify_tree_greedy = _verify_tree_greedy


def _verify_tree_greedy(
    *,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    **tensors: torch.Tensor,
) -> None:
    verify_tree_greedy(
        retrieve_index=retrive_index,
        retrieve_next_token=retrive_next_token,
        retrieve_next_sibling=retrive_next_sibling,
        **tensors,
    )


class PairCorpus:
    """Stand-in for SGLang's NgramCorpusFFI: proposes what lately followed each token, breadth first."""

    def __init__(self, *, draft_token_num: int, max_bfs_breadth: int, **_: Any) -> None:
        self._width, self._breadth = draft_token_num, max_bfs_breadth
        self._followers: dict[int, list[int]] = {}  # latest first

    def insert(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        for tokens in batch_tokens:
            for before, after in itertools.pairwise(tokens):
                known = [t for t in self._followers.get(before, []) if t != after]
                self._followers[before] = [after, *known][: self._breadth]

    def match_stateful(
        self, state_ids: list[int], batch_tokens: list[list[int]], total_lens: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64[requests * width] and ancestors, itself included, int64[requests * width * width]."""
        trees = [self._tree(tokens[-1]) for tokens in batch_tokens]
        tokens = np.array([tree[0] for tree in trees], dtype=np.int64)
        masks = np.stack([_ancestors(tree[1]) for tree in trees])
        return tokens.reshape(-1), masks.reshape(-1)

    def _tree(self, last_token: int) -> tuple[list[int], list[int]]:
        """Tokens and their parents; what is left of the width are zeros below the root."""
        tokens, parents, open_ends = [last_token], [-1], deque([0])
        while open_ends:
            parent = open_ends.popleft()
            for token in self._followers.get(tokens[parent], [])[: self._width - len(tokens)]:
                open_ends.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
        padding = [0] * (self._width - len(tokens))
        return tokens + padding, parents + padding

    def synchronize(self) -> None: ...

    def erase_states(self, state_ids: list[int]) -> None: ...

    def reset(self) -> None:
        self._followers.clear()


def _ancestors(parents: list[int]) -> np.ndarray:
    mask = np.eye(len(parents), dtype=np.int64)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token, : parent + 1] = mask[parent, : parent + 1]
    return mask


def reconstruct_indices(
    tree_mask: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    width: int,
) -> None:
    """Stand-in for sgl_kernel's reconstruct_indices_from_tree_mask; fills all tensors behind `seq_lens`."""
    masks = tree_mask.view(batch_size, width, width).int()
    positions.copy_((seq_lens[:, None] + masks.sum(2) - 1).flatten())
    retrieve_index.copy_(torch.arange(batch_size * width).view(batch_size, width))
    for request, mask in enumerate(masks.tolist()):
        parents = [max((a for a in range(t) if mask[t][a]), default=-1) for t in range(width)]
        for token in range(width):
            children = [t for t in range(width) if parents[t] == token]
            later = [t for t in range(token + 1, width) if parents[t] == parents[token] >= 0]
            retrieve_next_token[request, token] = children[0] if children else -1
            retrieve_next_sibling[request, token] = later[0] if later else -1
