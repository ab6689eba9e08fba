"""Attention of SGLang's Triton backend in plain torch, for servers whose kernels are interpreted.

The interpreter takes half of the CPU time of a server with speculation for it. Which slots a token attends to comes
from the kernels' own arguments: rows of slots, masks, windows. A call that says more than that runs on the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, repeat
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attention_in_plain_torch", "decode_attention", "extend_attention", "kernels_of"]

# They choose among kernels that compute the same.
MAKES_NO_DIFFERENCE = {
    *("attn_logits", "attn_lse", "extend_seq_lens_cpu", "has_mla", "max_kv_splits"),
    *("max_len_extend", "num_kv_splits", "page_size", "uneven_batch", "use_pdl"),
    *("enable_lean", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks"),
}
# Of arguments without a default, and of those that a caller sets to what they are without it.
NOTHING: dict[str, Any] = {"k_scale": 1.0, "v_scale": 1.0}


def kernels_of(name: str) -> Any:
    """SGLang's module of `name`, which has moved."""
    moved = find_spec("sglang.kernels") is not None
    package = "sglang.kernels.ops.attention" if moved else "sglang.srt.layers.attention.triton_ops"
    return import_module(f"{package}.{name}")


def attention_in_plain_torch() -> None:
    """For the rest of this process, and for what is forked from it."""
    for name, plain in (
        ("extend_attention", extend_attention),
        ("decode_attention", decode_attention),
    ):
        module, function = kernels_of(name), f"{name}_fwd"
        setattr(module, function, plain_where_it_says_all(getattr(module, function), plain))


def plain_where_it_says_all(
    kernel: Callable[..., None], plain: Callable[..., None]
) -> Callable[..., None]:
    """`plain` with the arguments that it has, as long as no other one asks for anything."""
    signature = inspect.signature(kernel)
    known = {*inspect.signature(plain).parameters}
    without = {
        name: NOTHING.get(name, parameter.default)
        for name, parameter in signature.parameters.items()
        if name not in known | MAKES_NO_DIFFERENCE
    }

    @wraps(kernel)
    def attend(*args: Any, **named: Any) -> None:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        told = bound.arguments
        if _is_symmetric_window(told) or any(_asks(told[n], without[n]) for n in without):
            kernel(*args, **named)
        else:
            plain(**{name: told[name] for name in known})

    return attend


def _asks(value: Any, nothing: Any) -> bool:
    if isinstance(nothing, bool | int | float):
        return not isinstance(value, bool | int | float) or value != nothing
    return value is not nothing


def _is_symmetric_window(told: dict[str, Any]) -> bool:
    """Newer kernels look as far ahead as back then."""
    return told.get("sliding_window_size", -1) > 0 and not told["is_causal"]


def extend_attention(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor,
    v_extend: torch.Tensor,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    custom_mask: torch.Tensor | None,
    is_causal: bool,
    mask_indptr: torch.Tensor | None,
    sm_scale: float | None,
    skip_prefix_custom_mask: bool,
    sliding_window_size: int,
    window_kv_offsets: torch.Tensor | None,
) -> None:
    """Each request's new tokens attend to its slots, then to each other. Fills `o_extend`."""
    requests = [*zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=False)]
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    windowed = sliding_window_size > 0
    masks: Iterator[torch.Tensor | None] = repeat(None)
    if custom_mask is not None:
        shapes = [(end - first, stop - start) for (first, end), (start, stop) in requests]
        left_out = window_kv_offsets.tolist() if windowed else [0] * len(shapes)
        masks = _masks(custom_mask.bool(), mask_indptr.tolist(), shapes, left_out)
    for ((first, end), (start, stop)), mask in zip(requests, masks, strict=False):
        if first == end:
            continue
        slots = kv_indices[start:stop].long()
        seen = torch.ones(end - first, len(slots) + end - first, dtype=torch.bool)
        if mask is not None and not skip_prefix_custom_mask:
            seen &= mask
        elif mask is not None:
            seen[:, len(slots) :] &= mask[:, len(slots) :]
        elif is_causal:
            seen[:, len(slots) :].tril_()
        if windowed:
            seen.triu_(len(slots) - sliding_window_size)
        keys, values = k_extend[first:end], v_extend[first:end]
        if len(
            slots
        ):  # else the pool may have other widths: DeepSeek's first prefills attend to no latent rows
            keys = torch.cat([k_buffer[slots], keys])
            values = torch.cat([v_buffer[slots], values])
        o_extend[first:end] = _attend(q_extend[first:end], keys, values, scale, seen)


def _masks(
    mask: torch.Tensor,
    starts: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    left_out: Sequence[int],
) -> Iterator[torch.Tensor | None]:
    """bool[new tokens, slots and new tokens] of each request, from `shapes`, its new tokens and slots.

    On a CPU newer releases have masks of the new tokens alone, for kernels of their own. SGLang's Triton kernel reads
    behind their end. So it does for requests that a rank is padded with: None for them.
    """
    of_new_tokens = mask.numel() <= sum(new * new for new, _ in shapes)
    at = 0
    for start, (new, old), more in zip(starts, shapes, left_out, strict=False):
        width = new if of_new_tokens else more + old + new
        start = at if of_new_tokens else start
        at += new * width
        part = mask[start : start + new * width]
        if part.numel() < new * width:
            yield None
            continue
        seen = torch.ones(new, old + new, dtype=torch.bool)
        own = part.view(new, width)[:, -(old + new) :] if new else part.view(0, width)
        seen[:, old + new - own.shape[1] :] = own
        yield seen


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    o: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
) -> None:
    """Each request's token attends to its slots. Fills `o`."""
    rows = pairwise(kv_indptr.tolist())
    for request, (start, stop) in zip(range(len(q)), rows, strict=False):
        slots = kv_indices[start:stop].long()
        token = q[request : request + 1]
        o[request] = _attend(token, k_buffer[slots], v_buffer[slots], sm_scale)[0]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32[tokens, heads, width of v]. Tokens come first, then heads, in all of them."""
    q, k, v = (tensor.float().transpose(0, 1)[None] for tensor in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)
