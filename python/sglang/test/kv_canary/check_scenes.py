"""What the tests of single checks share: the shapes that they run on, and what they say of themselves."""

from __future__ import annotations

import pytest
import torch

from sglang_kv_canary.record import Reason

from .backends import INTERPRETER, available_backends
from .scene import assert_violation
from .world import RingViolation, WorldSpec

MHA = WorldSpec()
SHAPES = {
    "mha": MHA,
    "mha, int32 inputs": WorldSpec(index_dtype=torch.int32),
    "mla": WorldSpec(has_v=False, k_shapes="three sectors"),
    "paged rows": WorldSpec(k_shapes="paged", v_shapes="odd bytes"),
}
SWA_SHAPES = {
    "swa": WorldSpec(swa_slots=48, window=4),
    "swa, int32 mapping": WorldSpec(swa_slots=48, window=4, lut_dtype=torch.int32),
}
WRITES = ("HEAD",)
READS = ("HEAD", "TAIL")
TREE = (-1, 0, 0, 1)  # a root, two children of it, and a child of the first


def fires(*reasons: Reason):
    """Says that a test makes these reasons fire; `test_checks_reasons.py` reads it."""
    return lambda test: test


def scenes(shapes: dict[str, WorldSpec]):
    """Parameters of a fixture: every shape on every backend, but one on the interpreter, which is slow."""
    pairs = [
        (name, backend)
        for name in shapes
        for backend in available_backends()
        if backend is not INTERPRETER or name in ("mha", "swa")
    ]
    return [pytest.param((shapes[n], b), id=f"{n}-{b.name}") for n, b in pairs]


def beside_the_row(found: list[RingViolation], position: int) -> list[RingViolation]:
    """What is found beside that the row, whose last token is at `position`, no longer leads to its own prefix."""
    row = [v for v in found if Reason.ROW_CHAIN in v.reasons]
    assert_violation(row, Reason.ROW_CHAIN, ["HEAD_K_FULL"], expected_position=position)
    return [v for v in found if Reason.ROW_CHAIN not in v.reasons]
