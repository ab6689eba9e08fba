"""Every kernel compiles for a GPU, on a machine that has none: what the interpreter accepts, the compiler may not."""

import subprocess
import sys
from collections import Counter

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing import consts
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume

register_cpu_ci(est_time=60, suite="stage-a-test-cpu")

# In a process of its own, because the kernels are defined for the compiler there, not for the interpreter.
PROGRAM = """
import re
from dataclasses import replace

import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

torch.cuda.is_available, has_gpu = lambda: True, torch.cuda.is_available
import sglang_kv_canary.kernels.triton.jit
torch.cuda.is_available = has_gpu

ALL_OF_THEM, seen = True, set()

def compile_only(self, *args, grid, warmup, **keywords):
    names = [parameter.name for parameter in self.params]
    values = dict(zip(names, args)) | {k: v for k, v in keywords.items() if k in names}
    options = {k: v for k, v in keywords.items() if k not in names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = [["tt.divisibility", 16]]
    kinds = {(self.__name__, *item, repr(constants.get(item[0]))) for item in signature.items()}
    if kinds <= seen and not ALL_OF_THEM:
        return
    seen.update(kinds)
    source = ASTSource(self, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", AHEAD.target, 32), options=options)
    ptx = kernel.asm["ptx"]
    accesses = re.findall(r"(?:st|ld[.]volatile)[.]global[.][a-z0-9.]+", ptx)
    overlap = re.findall(r"griddepcontrol[.](wait|launch)", ptx)
    says = [values[name] for name in ("BEGINS_EARLY", "NEXT_MAY_BEGIN") if name in names]
    print(self.__name__, len(kernel.asm["cubin"]), *accesses, "|", *says, *dict.fromkeys(overlap))

JITFunction.run = compile_only

from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.event_slots import SlotTable
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.endpoint import Part
from sglang_kv_canary.kernels import triton as triton_backend
from sglang_kv_canary.kernels.triton import launch
from sglang_kv_canary.kernels.triton.compile_ahead import AHEAD
from sglang_kv_canary.plan.plan_input import SweepVerifyPlan
from sglang_kv_canary.slot_event import SlotEventKind
from sglang_kv_canary_rigs.kernel_cases import ContentShape, Pool, make_group, make_state

launch.sm_count = lambda device: 132
device = torch.device("cpu")
state, pool = make_state(device), Pool(device, 200, 100, 8)
group = make_group(200, device=device, content=ContentShape((64, 64)))
listed = torch.arange(100)
sweep = SweepVerifyPlan(listed, listed, listed)
prefill, decode = pool.extend({1: 9, 2: 1}), pool.decode([1, 2], known=True)
tree = pool.tree_verify([1, 2], [[-1, 0, 0], [-1, 0, 1]])

triton_backend.check_and_write(prefill, group, Side.HEAD, state)
for part in (Part.ALL, Part.VERIFY, ~Part.VERIFY, ~Part.WRITE):
    triton_backend.check_and_write(decode, group, Side.TAIL, state, part)
lut = torch.zeros(200, dtype=torch.int32)
swa = make_group(200, device=device, halves="K", window=8, swa_index_lut=lut)
triton_backend.check_and_write(tree, swa, Side.HEAD, state)
for plan in (prefill, decode):
    located = replace(plan.write, swa_out_cache_loc=plan.write.out_cache_loc.int())
    triton_backend.check_and_write(replace(plan, write=located), swa, Side.HEAD, state)
draft = make_group(200, device=device, chain_source=group.k_head)
for part in (Part.ALL, Part.WRITE):
    triton_backend.check_and_write(decode, draft, Side.HEAD, state, part)
triton_backend.check_and_write(prefill, draft, Side.HEAD, state)
triton_backend.check_and_write(decode, group, Side.HEAD, state)
for counts in (None, listed.int()):
    triton_backend.note_next_tokens(listed, listed.int(), counts, (group, swa), state)
    triton_backend.note_next_tokens(listed, listed.int(), counts, (group, swa), state, listed.int())
padded = replace(tree, verify=replace(tree.verify, padded=True))
triton_backend.check_and_write(padded, group, Side.TAIL, state)

strided = make_group(
    50, device=device, halves="K", stride=4, chain_base=swa, content=ContentShape((64, 64))
)
for side in (Side.HEAD, Side.TAIL):
    triton_backend.check_and_write(prefill, strided, side, state)
triton_backend.check_and_write(decode, strided, Side.HEAD, state)
for part in (Part.VERIFY, ~Part.VERIFY):
    triton_backend.check_and_write(decode, strided, Side.TAIL, state, part)
triton_backend.check_and_write_content(decode, strided, state, ContentMode.ALL, 8)
triton_backend.check_and_write_content(prefill, strided, state, ContentMode.ALL, 8)
triton_backend.check_list(sweep, strided, state)
triton_backend.apply_slot_event(SlotEventKind.FREE, listed, strided, state, 16)
triton_backend.apply_slot_event(SlotEventKind.FREE, listed, strided, state, 16, listed.int())

for mode in (ContentMode.ALL, ContentMode.PARTIAL):
    triton_backend.check_and_write_content(decode, group, state, mode, 8)
    triton_backend.write_content(prefill, group, state, mode)
triton_backend.content_fingerprint(group.k_content, listed, ContentMode.ALL)
runs = make_group(200, device=device, content=ContentShape((32, 4), page_size=16, run_slots=4))
triton_backend.content_fingerprint(runs.k_content, listed, ContentMode.ALL)
moving = make_group(200, device=device, content=ContentShape((64, 64), page_size=16, moves=True))
for mode in (ContentMode.ALL, ContentMode.PARTIAL):
    triton_backend.check_and_write_content(decode, moving, state, mode, 8)
triton_backend.content_fingerprint(moving.k_content, listed, ContentMode.ALL)
triton_backend.check_list_content(sweep, moving, state, ContentMode.ALL)
triton_backend.check_list(sweep, group, state)
triton_backend.check_list_content(sweep, group, state, ContentMode.ALL)
triton_backend.renew_content(group, listed, ContentMode.ALL, only_unknown=True)
for some in (listed, listed.int()):
    triton_backend.renew_content(group, some, ContentMode.PARTIAL)

triton_backend.apply_slot_event(SlotEventKind.FREE, listed, group, state)
triton_backend.apply_slot_event(SlotEventKind.FREE, listed, group, state, 16)
turns = [(SlotEventKind.FREE, 50), (SlotEventKind.ALLOC, 50)]
triton_backend.apply_slot_runs(turns, listed, group, state)
for calls in (None, listed.int()):
    triton_backend.apply_slot_runs(turns, listed, group, state, 16, calls)
    triton_backend.apply_slot_runs(turns, listed, strided, state, 16, calls)
for kind in (SlotEventKind.ALLOC, SlotEventKind.UNFILL):
    triton_backend.apply_slot_event(kind, listed.int(), group, state)
triton_backend.apply_slot_event(SlotEventKind.CLEAR, None, group, state)
triton_backend.copy_records(group, listed, listed)
triton_backend.publish(state)
for inputs in (listed, listed.int()):
    triton_backend.keep_inputs(inputs, inputs, inputs, state)

table = SlotTable(pinned=False)
table.fill([listed])
for ring in (None, listed):
    triton_backend.join_slots(table, listed, ring, 3)

AHEAD.target = 80  # its launches do not overlap, and its compiler knows no such thing
state.prepared.clear()
triton_backend.check_and_write(decode, group, Side.TAIL, state)
triton_backend.check_and_write_content(decode, group, state, ContentMode.ALL, 8)
triton_backend.publish(state)
"""

# Variants of each. By default those with a type or a compile-time value that none before has.
KERNELS = {
    "forward_kernel": volume(7, 14),
    "next_tokens_kernel": volume(3, 4),
    "strided_kernel": 5,
    "content_kernel": volume(6, 7),
    "content_write_kernel": 2,
    "fingerprint_kernel": 3,
    "renew_kernel": 3,
    "list_kernel": 2,
    "content_list_kernel": 2,
    "slot_event_kernel": volume(6, 7),
    "slot_runs_kernel": volume(4, 5),
    "copy_kernel": 1,
    "publish_kernel": 2,
    "keep_inputs_kernel": 1,
    "join_slots_kernel": 2,
}


def test_compiles_for_gpus(tmp_path):
    pytest.importorskip("triton.backends.nvidia")
    script = tmp_path / "compile.py"
    script.write_text(
        PROGRAM.replace("ALL_OF_THEM, seen = True", f"ALL_OF_THEM, seen = {FULL_VOLUME}")
    )
    command = [sys.executable, "-W", "ignore", str(script)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=consts.PROCESS_TIMEOUT_S
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [line.partition("|") for line in result.stdout.splitlines()]
    kernels = [(line.split(), overlap.split()) for line, _, overlap in lines]
    assert Counter(line[0] for line, _ in kernels) == KERNELS
    # What the host reads at any time is one store of 8 bytes, through the caches. What it tells comes past them, too.
    loads, stores = ["ld.volatile.global.b64"] * 2, ["st.global.b64", "st.global.wt.b64"]
    published = [line[2:] for line, _ in kernels if line[0] == "publish_kernel"]
    assert published == [[*loads, *stores]] * 2
    found = {(line[0], *overlap) for line, overlap in kernels if overlap}
    assert found == OVERLAPS


# (kernel, whether it overlaps, what it says to the GPU)
OVERLAPS = {
    ("forward_kernel", "True", "launch"),  # TAIL's writes
    ("forward_kernel", "False"),
    ("strided_kernel", "True", "launch"),
    ("strided_kernel", "False"),
    ("content_kernel", "True", "launch", "wait"),
    ("content_kernel", "False"),
    ("publish_kernel", "True", "wait"),
    ("publish_kernel", "False"),
}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
