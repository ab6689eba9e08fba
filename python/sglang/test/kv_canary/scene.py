"""Readable tests of single checks."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kv_canary import record
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import Reason
from sglang_kv_canary.selftest.scene import Scene
from sglang_kv_canary.selftest.scratch_pool import RingViolation, ScratchSpec

from .backends import Backend


class CheckScene(Scene):
    """The scene of a check on one backend."""

    def __init__(self, spec: ScratchSpec, backend: Backend) -> None:
        super().__init__(spec, backend.functions, backend.device)


def assert_clean(found: list[RingViolation]) -> None:
    assert not found, "expected no violation, got\n" + "\n".join(map(str, found))


def assert_violation(
    found: list[RingViolation], reasons: Reason, tags: Sequence[str], **values: int | None
) -> None:
    """Each of `tags` reports exactly once, with exactly these reasons and these values; nobody else reports."""
    listed = "\n".join(map(str, found))
    assert sorted(v.tag for v in found) == sorted(tags), f"expected {tags}, got\n{listed}"
    for violation in found:
        assert violation.reasons == reasons, f"expected {reasons!r}, got\n{listed}"
        shown = {name: violation.values[name] for name in values}
        assert shown == values, f"expected {values}, got\n{listed}"


def writer(scene: CheckScene, slot: int) -> tuple[int, int, int, int]:
    """(forward, row, mode, state) of a slot's HEAD_K record."""
    return record.unpack_writer(scene.records(scene.full, "K", Side.HEAD)[slot][3])


def chain_of(*tokens: int) -> int:
    chain = 0
    for position, token in enumerate(tokens):
        chain = record.chain_step(chain, token, position)
    return chain
