"""Lets SGLang's EAGLE workers run on a machine without a GPU: greedy stand-ins for the ops that only sgl_kernel has.

A fill-in as those of `fill_ins.py`. SGLang's own Triton kernels run interpreted, see `INTERPRETED`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from typing import Any

import torch

from ..wiring.releases import release

__all__ = ["INTERPRETED", "eagle_on_cpu"]

# Environment of the server.
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile'd helpers would need a C++ compiler
}
_FULL_MASK = 0  # sglang.srt.speculative.eagle_utils.TreeMaskMode: rows span the prefix and the tree


def eagle_on_cpu() -> None:
    """Replace what EAGLE needs a GPU for."""
    if release().has_own_canary:
        _fill_in_sgl_kernel()
    else:
        _replace_gpu_kernels()
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None
    torch.cpu.Event = _NoEvent


def _replace_gpu_kernels() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import eagle_utils

    eagle_utils.sgl_build_tree_kernel_efficient = build_tree
    for target, stand_in in (
        ("eagle_utils.verify_tree_greedy_func", verify_tree_greedy),
        ("eagle_info_v2.assign_extend_cache_locs_func", assign_extend_cache_locs),
    ):
        HookRegistry.register(f"sglang.srt.speculative.{target}", stand_in, HookType.REPLACE)


def _fill_in_sgl_kernel() -> None:
    """Newer releases have CPU kernels for all of it, in the sgl_kernel that tools/cpu_sgl_kernel stands in for."""
    import sgl_kernel

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    overlap = "sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu"
    HookRegistry.register(overlap, lambda *_: None, HookType.REPLACE)
    kernels = {
        "assign_draft_cache_locs_contiguous_cpu": assign_draft_slots,
        "assign_extend_cache_locs_cpu": assign_extend_slots,
        "assign_req_to_token_pool_cpu": assign_rows,
        "build_tree_kernel_efficient_cpu": build_tree,
        "copy_all_layer_kv_cache_cpu": copy_slots,
        "fill_accept_out_cache_loc_cpu": accepted_slots,
        "fill_bonus_tokens_cpu": fill_bonus_tokens,
        "rotate_input_ids_cpu": rotate_input_ids,
        "verify_tree_greedy_cpu": verify_tree_greedy_cpu,
    }
    for name, kernel in kernels.items():
        setattr(sgl_kernel, name, kernel)
    for module in [m for n, m in sys.modules.items() if n.startswith("sglang.")]:
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "") == "sgl_kernel" and value.__name__ in kernels:
                setattr(module, name, kernels[value.__name__])


class _NoEvent:
    """torch.Event of a device that has no streams."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


def tree_parents(parent_list: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent of each draft token of one request; token 0 is the root, token i the selected[i - 1]-th candidate.

    Candidate c of a later level hangs below candidate parent_list[c // topk] of the level before.
    """
    parents = [-1]
    for candidate in selected:
        level_parent = candidate // topk
        if level_parent == 0:
            parents.append(0)
            continue
        above = parent_list[level_parent]
        with contextlib.suppress(ValueError):
            parents.append(selected.index(above) + 1)
            continue
        raise ValueError(f"candidate {candidate} was selected without its parent {above}")
    return parents


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Stand-in for sgl_kernel's build_tree_kernel_efficient; fills all tensors behind `seq_lens`."""
    width, mask_at = draft_token_num, 0
    for request, length in enumerate(seq_lens.tolist()):
        parents = tree_parents(
            parent_list[request].tolist(), selected_index[request].tolist(), topk
        )
        prefix = length if int(tree_mask_mode) == _FULL_MASK else 0
        mask = tree_mask[mask_at : mask_at + width * (prefix + width)].view(width, -1)
        mask_at += mask.numel()
        mask[:, prefix:] = False
        for token in range(width):
            path = [token]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            mask[token, [prefix + p for p in path]] = True
            positions[request * width + token] = length + len(path) - 1
            retrieve_index[request, token] = request * width + token
            children = [t for t in range(width) if parents[t] == token]
            for child, sibling in itertools.pairwise(children):
                retrieve_next_sibling[request, child] = sibling
            retrieve_next_token[request, token] = children[0] if children else -1


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand-in for sgl_kernel's verify_tree_greedy: follow the target's choice down each tree."""
    choice = target_predict.flatten()
    for request in range(candidates.shape[0]):
        token, accepted = 0, [int(retrieve_index[request, 0])]
        while len(accepted) < accept_index.shape[1]:
            wanted = int(choice[accepted[-1]])
            child = int(retrieve_next_token[request, token])
            while child >= 0 and int(candidates[request, child]) != wanted:
                child = int(retrieve_next_sibling[request, child])
            if child < 0:
                break
            token = child
            accepted.append(int(retrieve_index[request, child]))
        accept_index[request, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1
        for index in accepted:
            predicts[index] = choice[index]
    return predicts, accept_index, accept_token_num


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Slots of each request's new positions, one request after the other, int64."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).long()


# The same as the CPU kernels of newer releases


def verify_tree_greedy_cpu(**tensors: torch.Tensor) -> None:
    """SGLang spells some arguments in another way there."""
    renamed = {name.replace("retrive_", "retrieve_"): t for name, t in tensors.items()}
    verify_tree_greedy(**renamed)


def assign_draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """`topk * num_steps` slots of each request from its length on."""
    ends = seq_lens + topk * num_steps
    assign_extend_slots(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def assign_extend_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    count = len(req_pool_indices)
    slots = assign_extend_cache_locs(
        req_pool_indices, req_to_token, start_offset, end_offset, count, 0, None
    )
    out_cache_loc[: len(slots)] = slots  # those of a tree's accepted tokens leave a rest


def accepted_slots(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots of accepted tokens, packed; -1 in `accept_index` is none."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


def assign_rows(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The slots of each request's new positions go to its row."""
    spans, at = (
        zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True),
        0,
    )
    for row, start, end in spans:
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].int()
        at += end - start


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """The last accepted token of each request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def rotate_input_ids(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Each request's tokens move down by one place; `topk_index` goes to the last, or to `select_index`."""
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    # Requests that a rank is padded with have a length alone. SGLang's Triton kernel reads past the end for them.
    for request, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        if not length:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = topk_index.flatten()[request]


def copy_slots(
    data_ptrs: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy the bytes of slots in each buffer. `data_ptrs`: addresses of the buffers; `strides`: bytes of a slot."""
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(base + target * size, row, size)
