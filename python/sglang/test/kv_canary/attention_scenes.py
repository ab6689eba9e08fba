"""Batches that SGLang's attention kernels and `plain_attention` compute, in a process that interprets kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from . import plain_attention
from .plain_attention import kernels_of, plain_where_it_says_all

__all__ = ["CASES", "CASES_OF_KERNELS", "compare", "runs_on_the_kernel"]

SLOTS, UNTOUCHED = 40, 7.0
MIXED = ((9, 0, 20, 4), (3, 5, 1, 0))  # slots of each request, and its new tokens
# Not bfloat16: Triton's interpreter multiplies the bits of those as if they were numbers.
MLA = {"heads": (4, 1), "widths": (288, 256), "dtype": torch.float16}


class Scene:
    """Requests of a batch: their slots, their new tokens."""

    def __init__(
        self,
        slots: Sequence[int] = MIXED[0],
        new: Sequence[int] = MIXED[1],
        heads: tuple[int, int] = (4, 2),
        widths: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(1)
        self.new, self.slots = new, slots

        def numbers(count: int, of: int, width: int) -> torch.Tensor:
            return torch.randn(count, of, width).to(dtype)

        (heads_q, heads_k), (width_k, width_v) = heads, widths
        self.q = numbers(sum(new), heads_q, width_k)
        self.k, self.v = numbers(sum(new), heads_k, width_k), numbers(sum(new), heads_k, width_v)
        self.k_buffer = numbers(SLOTS, heads_k, width_k)
        self.v_buffer = numbers(SLOTS, heads_k, width_v)
        self.kv_indptr, self.qo_indptr = map(_starts, (slots, new))
        self.kv_indices = torch.randint(SLOTS, (sum(slots),))
        self.out = torch.full((sum(new), heads_q, width_v), UNTOUCHED, dtype=dtype)

    def mask(self, left_out: Sequence[int] = (0, 0, 0, 0)) -> dict[str, Any]:
        """Each token sees itself, and half of the others."""
        shapes = [
            (new, more + old + new)
            for new, old, more in zip(self.new, self.slots, left_out, strict=True)
        ]
        masks = [torch.rand(shape) < 0.5 for shape in shapes]
        for mask, (new, width) in zip(masks, shapes, strict=True):
            mask[range(new), range(width - new, width)] = True
        return {
            "custom_mask": torch.cat([mask.flatten() for mask in masks]),
            "mask_indptr": _starts([mask.numel() for mask in masks]),
            "window_kv_offsets": torch.tensor(left_out),
        }

    def extend(self, attend: Callable[..., None], **more: Any) -> torch.Tensor:
        out = self.out.clone()
        tensors = (self.q, self.k, self.v, out, self.k_buffer, self.v_buffer)
        rows = (self.qo_indptr, self.kv_indptr, self.kv_indices)
        told = {"custom_mask": None, "is_causal": True, "mask_indptr": None, **more}
        scales = {"k_scale": 1.0, "v_scale": 1.0, "sm_scale": 0.3}
        attend(*tensors, *rows, max_len_extend=max(self.new), **scales, **told)
        return out

    def decode(self, attend: Callable[..., None], **more: Any) -> torch.Tensor:
        out, (count, heads, width) = self.out.clone(), self.out.shape
        splits = torch.empty(count, heads, 1, width), torch.empty(count, heads, 1)
        rows = (self.kv_indptr, self.kv_indices)
        scales = (torch.ones(count, dtype=torch.int32), 1, 0.3, 1.0, 1.0)
        attend(self.q, self.k_buffer, self.v_buffer, out, *rows, *splits, *scales, **more)
        return out


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def _tree(left_out: Sequence[int] = (0, 0, 0, 0), **more: Any) -> tuple[Scene, dict[str, Any]]:
    scene = Scene()
    return scene, {**scene.mask(left_out), **more}


def _without_slots() -> tuple[Scene, dict[str, Any]]:
    scene = Scene((0, 0), (3, 5))
    scene.k_buffer, scene.v_buffer = torch.empty(SLOTS, 1, 24), torch.empty(SLOTS, 1, 20)
    return scene, {}


ONE_EACH = ((9, 1, 20), (1, 1, 1))
CASES: dict[str, Callable[[], tuple[Scene, dict[str, Any]]]] = {
    "extend: MHA": lambda: (Scene(heads=(2, 2)), {}),
    "extend: GQA": lambda: (Scene(), {}),
    "extend: MLA": lambda: (Scene(**MLA), {}),
    "extend: no prefix, and a pool of other widths": _without_slots,
    "extend: all see all": lambda: (Scene(), {"is_causal": False}),
    "extend: tree": _tree,
    "extend: mask over the prefix": lambda: _tree(skip_prefix_custom_mask=False),
    "extend: window": lambda: (Scene(), {"sliding_window_size": 4}),
    "extend: tree in a window": lambda: _tree((3, 0, 11, 0), sliding_window_size=4),
    "decode: MHA": lambda: (Scene(*ONE_EACH, heads=(2, 2)), {}),
    "decode: GQA": lambda: (Scene(*ONE_EACH), {}),
    "decode: MLA": lambda: (Scene(*ONE_EACH, **MLA), {}),
}
# What `plain_attention` does not compute.
CASES_OF_KERNELS: dict[str, dict[str, Any]] = {
    "extend: cap": {"logit_cap": 30.0},
    "extend: sinks": {"sinks": torch.zeros(4)},
    "extend: temperature": {"xai_temperature_len": 5},
    "extend: symmetric window": {"is_causal": False, "sliding_window_size": 4},
    "decode: cap": {"logit_cap": 30.0},
}


def _in_place_of(function: Callable[..., None], called: list[bool]) -> Callable[..., None]:
    """Notes that it was called, and does nothing. It has the arguments of `function`."""

    def note(*_: Any, **__: Any) -> None:
        called.append(True)

    note.__signature__ = inspect.signature(function)
    return note


def _kernel(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The kernel's own function, as the warm host has found it, and what stands in for it."""
    installed = getattr(kernels_of(name), f"{name}_fwd")
    return installed.__wrapped__, getattr(plain_attention, name)


def compare(case: str) -> float:
    """The greatest difference between the kernel and plain torch, which did not call it."""
    phase = case.partition(":")[0]
    kernel, plain = _kernel(f"{phase}_attention")
    scene, more = CASES[case]()
    called: list[bool] = []
    alone = plain_where_it_says_all(_in_place_of(kernel, called), plain)
    run = getattr(scene, phase)
    expected, found = run(kernel, **more), run(alone, **more)
    if called or bool((expected == UNTOUCHED).all()):
        raise ValueError(f"{case}: the kernel was called in place of torch, or not at all")
    return float((expected.float() - found.float()).abs().max())


def runs_on_the_kernel(case: str) -> bool:
    phase = case.partition(":")[0]
    kernel, plain = _kernel(f"{phase}_attention")
    called: list[bool] = []
    attend = plain_where_it_says_all(_in_place_of(kernel, called), _in_place_of(plain, []))
    getattr(Scene(*(ONE_EACH if phase == "decode" else MIXED)), phase)(
        attend, **CASES_OF_KERNELS[case]
    )
    return bool(called)
