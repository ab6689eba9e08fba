"""Attention of SGLang's Triton backend in plain torch, for servers whose kernels are interpreted.

The interpreter takes half of the CPU time of a server with speculation for it. Which slots a token attends to comes
from the kernels' own arguments: rows of slots, masks, windows. A call that says more than that runs on the kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
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
    rows = pairwise(kv_indptr.tolist())
    scale = sm_scale or q_extend.shape[-1] ** -0.5
    for request, (first, end) in enumerate(pairwise(qo_indptr.tolist())):
        start, stop = next(rows)
        if first == end:
            continue
        slots = kv_indices[start:stop].long()
        seen = torch.ones(end - first, len(slots) + end - first, dtype=torch.bool)
        new = seen[:, len(slots) :]
        if custom_mask is not None:
            left_out = int(window_kv_offsets[request]) if sliding_window_size > 0 else 0
            width, at = left_out + seen.shape[1], int(mask_indptr[request])
            mask = custom_mask[at : at + len(seen) * width].view(len(seen), width)[:, left_out:]
            if skip_prefix_custom_mask:
                new &= mask[:, len(slots) :].bool()
            else:
                seen &= mask.bool()
        elif is_causal:
            new.tril_()
        if sliding_window_size > 0:
            seen.triu_(len(slots) - sliding_window_size)
        keys, values = k_extend[first:end], v_extend[first:end]
        if len(
            slots
        ):  # else the pool may have other widths: DeepSeek's first prefills attend to no latent rows
            keys = torch.cat([k_buffer[slots], keys])
            values = torch.cat([v_buffer[slots], values])
        o_extend[first:end] = _attend(q_extend[first:end], keys, values, scale, seen)


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
