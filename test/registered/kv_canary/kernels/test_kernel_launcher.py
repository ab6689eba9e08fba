"""Which launches are of one compiled variant, and that a variant does the same when Triton's look-up is skipped."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.host_code import HOST
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.layout import VERIFY_BLOCK
from sglang_kv_canary.kernels.triton import kernel_launcher
from sglang_kv_canary.kernels.triton.device.next_tokens_kernel import next_tokens_kernel
from sglang_kv_canary.kernels.triton.kernel_launcher import (
    FixedArguments,
    KernelLauncher,
    Pointer,
    variant_of,
)
from sglang_kv_canary.kernels.triton.launch import part_arguments
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary_rigs.kernel_cases import ContentShape, Pool, make_group, make_state

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")
register_cuda_ci(est_time=30, suite="stage-b-test-1-gpu-small")

WORDS = torch.zeros(64, dtype=torch.int64)


def _variant(*values: object, only_types: tuple[bool, ...] | None = None) -> tuple:
    return variant_of(values, only_types or (False,) * len(values))[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (WORDS, WORDS.int()),
        (WORDS, WORDS[1:]),
        (WORDS, None),
        (3, 4),
        (0, None),
        (True, False),
    ],
    ids=["dtype", "alignment", "no tensor", "constant", "no constant", "flag"],
)
def test_what_triton_compiles_for_tells_variants_apart(one: object, other: object) -> None:
    assert _variant(WORDS, one) != _variant(WORDS, other)


def test_launches_that_differ_in_addresses_and_lengths_only_are_of_one_variant() -> None:
    assert _variant(WORDS, None, 256) == _variant(WORDS.clone(), None, 256)
    assert _variant(WORDS) == _variant(WORDS[2:])


def test_an_integer_that_is_compiled_for_its_type_counts_by_its_width() -> None:
    small, large, wide = (_variant(value, only_types=(True,)) for value in (1, 2**31 - 1, 2**31))
    assert small == large != wide
    assert _variant(-(2**31), only_types=(True,)) == small


def test_pointers_become_integers_and_nothing_else_changes() -> None:
    _, plain = variant_of((WORDS, None, 7, True), (False,) * 4)
    assert plain == [WORDS.data_ptr(), None, 7, True]


@pytest.mark.parametrize("tensor", [WORDS, WORDS[1:], WORDS.int()], ids=["", "unaligned", "int"])
def test_a_pointer_stands_for_its_tensor(tensor: torch.Tensor) -> None:
    pointer, nothing = HOST.pointers_to(Pointer, (tensor, None))
    values, pointers = (WORDS, tensor, None, 7), (WORDS, pointer, nothing, 7)
    assert variant_of(values, (False,) * 4) == variant_of(pointers, (False,) * 4)


def test_a_plan_is_looked_at_once_for_all_of_its_launches(monkeypatch) -> None:
    pool, state = Pool(torch.device("cpu"), num_slots=64, context=16, rows=4), make_state("cpu")
    plan = pool.extend({1: 5, 2: 3}, known=True)
    group = make_group(64, device=pool.device, content=ContentShape((64, 64)))
    given: list[dict[str, object]] = []
    monkeypatch.setattr(KernelLauncher, "__call__", lambda *launched: given.append(launched[3]))
    triton_backend.check_and_write(plan, group, Side.HEAD, state)
    triton_backend.check_and_write(plan, group, Side.TAIL, state)
    triton_backend.check_and_write_content(plan, group, state, ContentMode.ALL, 8)
    triton_backend.write_content(plan, group, state, ContentMode.ALL)
    assert len(given) == 4
    assert all(arguments is plan.prepared for arguments in given)
    tensors = [name for name, value in plan.prepared.items() if isinstance(value, Pointer)]
    assert set(tensors) >= {
        "rows",
        "base_lens",
        "starts",
        "out_cache_loc",
        "input_ids",
        "known_spans",
    }
    assert plan.prepared["input_ids"].tensor is plan.write.input_ids
    assert replace(plan).prepared is None


def test_triton_says_which_integers_it_compiles_for_their_type_only() -> None:
    """Read from a compiled kernel's own parameters, as on a GPU."""
    import triton

    kernel = triton.JITFunction(next_tokens_kernel.fn, do_not_specialize=["batch_size"])
    only_types = dict(zip(kernel.arg_names, kernel_launcher._only_types(kernel), strict=True))
    assert [name for name, only in only_types.items() if only] == ["batch_size"]


def test_fixed_arguments_win_over_those_of_a_launch(monkeypatch) -> None:
    """What a kernel does not read of a batch would make variants of it."""
    import triton

    monkeypatch.setattr(kernel_launcher, "CAN_SKIP", True)  # as on a GPU
    launch = KernelLauncher(triton.JITFunction(next_tokens_kernel.fn))
    rest = kernel_launcher._Rest(launch, {**_SAME, "counts": None, "num_tokens": 0}, _BATCH)
    seen = [
        HOST.launch_arguments(*rest.shape, 4, {**_BATCH, "counts": counts, "num_tokens": tokens})
        for counts, tokens in ((None, 8), (WORDS, 9))
    ]
    assert seen[0] == seen[1]
    filled = dict(zip(launch.names, seen[0][1], strict=True))
    assert (filled["counts"], filled["num_tokens"], filled["batch_size"]) == (None, 0, 8)


_SAME = {"row_words": WORDS, "sampled": WORDS, "num_rows": 64, "KINDS": 1}
_BATCH = {
    "rows": WORDS,
    "tokens": WORDS,
    "places": None,
    "counts": None,
    "batch_size": 8,
    "tokens_each": 1,
    "num_tokens": 8,
    "BLOCK": 128,
    "not in the kernel": 3,
}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": WORDS.int()},
        {"rows": WORDS[1:]},
        {"rows": WORDS[2:]},
        {"counts": WORDS},
        {"places": WORDS},
        {"batch_size": 9},
        {"batch_size": 2**31},
        {"tokens_each": 2},
        {"BLOCK": 64},
    ],
    ids=[
        "dtype",
        "alignment",
        "address",
        "tensor",
        "places",
        "length",
        "width",
        "constant",
        "block",
    ],
)
def test_fixed_arguments_change_neither_the_launch_nor_its_variant(change, monkeypatch) -> None:
    import triton

    monkeypatch.setattr(kernel_launcher, "CAN_SKIP", True)  # as on a GPU
    integers = ["batch_size", "num_rows"]
    launch = KernelLauncher(triton.JITFunction(next_tokens_kernel.fn, do_not_specialize=integers))
    rest = kernel_launcher._Rest(launch, _SAME, _BATCH)
    seen = []
    for batch in (_BATCH, {**_BATCH, **change}):
        whole = {**_SAME, **batch}
        variant, plain = variant_of([whole[name] for name in launch.names], launch.only_types)
        key, filled = HOST.launch_arguments(*rest.shape, 4, batch)
        assert filled == plain
        assert HOST.launch_arguments(*rest.shape, 8, batch)[0] != key
        seen.append((variant, key))
    (variant, key), (other_variant, other_key) = seen
    assert (key == other_key) is (variant == other_variant)


def test_parts_are_intersected_as_their_bits_are() -> None:
    for one in map(Part, range(16)):
        for other in range(16):
            for found in (one & Part(other), one & other, other & one):
                assert (type(found), found) == (Part, Part(int(one) & other))
        assert one & ~Part.WRITE == int(one) & ~2
        assert (Part.WRITE in one) is bool(int(one) & 2)


def test_what_is_prepared_for_a_budget_is_not_used_for_another() -> None:
    """What arrives is checked without a budget, on a state that differs from that of the forwards in this alone."""
    state = make_state("cpu")
    capacities = replace(state.capacities, verify_budget_slots=2 * VERIFY_BLOCK)
    others = (state, replace(state, capacities=capacities))
    assert others[0].summary is others[1].summary
    budgets = []
    for each in others:
        arguments = partial(part_arguments, each, Side.TAIL, Part.ALL)
        fixed = HOST.prepared_for(each.prepared, "forward", (WORDS,), arguments)
        assert fixed == arguments()
        budgets.append(fixed["budget_blocks"])
    assert budgets[1] == 2 != budgets[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_launch_with_fixed_arguments_is_looked_up_once_and_does_the_same(monkeypatch) -> None:
    launch = KernelLauncher(next_tokens_kernel)
    arguments = _sampled_tokens(block=128)
    names = ("row_words", "sampled", "num_rows", "KINDS", "BLOCK")
    fixed = FixedArguments({name: arguments.pop(name) for name in names})
    launch((1,), 4, arguments, fixed)
    first = fixed.arguments["sampled"].clone()
    assert first.any()
    fixed.arguments["sampled"].zero_()
    monkeypatch.setattr(type(launch._kernel), "run", _not_again)
    launch((1,), 4, arguments, fixed)
    assert torch.equal(fixed.arguments["sampled"], first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_variant_that_has_run_is_launched_without_the_lookup_and_does_the_same(
    monkeypatch,
) -> None:
    launch = KernelLauncher(next_tokens_kernel)
    outcomes = []
    for turn in range(3):
        arguments = _sampled_tokens(block=128)
        if turn == 1:
            monkeypatch.setattr(type(launch._kernel), "run", _not_again)
        launch((1,), 4, arguments)
        outcomes.append((arguments["row_words"].cpu(), arguments["sampled"].cpu()))
    assert len(launch._compiled) == 1
    assert outcomes[0][1].any()
    for words, sampled in outcomes[1:]:
        assert torch.equal(words, outcomes[0][0])
        assert torch.equal(sampled, outcomes[0][1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_launch_finds_what_was_compiled_ahead(monkeypatch) -> None:
    launch = KernelLauncher(next_tokens_kernel)
    arguments = _sampled_tokens(block=16)  # a variant of this test's own
    with triton_backend.compiling_ahead():
        launch((1,), 4, arguments)
    torch.cuda.synchronize()
    assert not arguments["sampled"].any()
    (begun,) = launch._begun.values()
    with begun.at_hand():
        pass
    monkeypatch.setattr(type(next_tokens_kernel), "_do_compile", _not_again)
    launch((1,), 4, arguments)
    triton_backend.finish_compiling()
    assert arguments["sampled"].any()
    assert not launch._begun


def _sampled_tokens(block: int) -> dict[str, object]:
    """Arguments, by name, that note one token for each of eight rows."""
    return {
        "row_words": torch.ones(64, 8, dtype=torch.int64, device="cuda"),
        "sampled": torch.zeros(64, dtype=torch.int64, device="cuda"),
        "rows": torch.arange(8, device="cuda"),
        "tokens": torch.arange(8, device="cuda") + 100,
        "places": None,
        "counts": None,
        "batch_size": 8,
        "num_rows": 64,
        "tokens_each": 1,
        "num_tokens": 8,
        "KINDS": 1,
        "BLOCK": block,
    }


def _not_again(*_: object, **__: object) -> None:
    raise AssertionError("Triton looks the kernel up or compiles it again")


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
