"""What a scene says beyond records: tokens, where KV came from, the prefix cache, and which word has changed."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.buffer_group import ContentSource
from sglang_kv_canary.config import ContentMode
from sglang_kv_canary.kernels.reference.content import content_fingerprint
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.record import WORD_CONTENT, WORD_IDENTITY
from sglang_kv_canary.reports.scene import Scene
from sglang_kv_canary.runner.changed_words import Word, _inverse, explaining_words, row_of
from sglang_kv_canary.sweep.orchestrator import SweepOrchestrator
from sglang_kv_canary.wiring import surroundings
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary_rigs.on_releases import LISTS_AT_ONCE
from sglang_kv_canary_rigs.tree_requests import key_of
from sglang_kv_canary_rigs.tree_rig import TreeRig

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

pytestmark = pytest.mark.usefixtures("sweeps_never_rest")

PROMPT = list(range(100, 120))


def serving(kind: str = "mha", **kw: Any) -> TreeRig:
    rig = TreeRig(kind, content=ContentMode.ALL, **kw)
    context.add(rig.manager, rig)
    rig.manager.attach_radix_cache(rig.tree)
    return rig


def scene_of(rig: TreeRig, number: int = 1) -> Scene:
    rig.settle()
    causes = rig.manager.violations._reporter._causes.values()
    (scene,) = (cause.scene for cause in causes if cause.number == number)
    assert Scene.from_event(scene.as_dict(with_records=True)) == scene
    return scene


def lines_of(rig: TreeRig) -> dict[str, str]:
    return dict(scene_of(rig).lines())


def in_node(node: Any, rest: str) -> str:
    """What is said of `node`. A unified tree lists its slots without nodes."""
    number = getattr(node, "id", node)  # newer trees name nodes by their numbers
    return "" if LISTS_AT_ONCE else f", in node {number} with {rest}"


def reading_half_a_cached_prompt(kind: str = "mha") -> tuple[TreeRig, Any]:
    """A request whose first 8 tokens are cached, and used by nobody else."""
    rig = serving(kind)
    rig.serve(PROMPT)
    return rig, rig.admit([*PROMPT[:8], *range(300, 310)])


# How the reader came by its KV, and what the prefix cache holds


def test_a_damaged_cached_slot_says_whose_prefix_it_is() -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    lines = lines_of(rig)
    assert lines["filled"] == (
        "positions 0 to 7 from the prefix cache, positions 8 to 17 by prefills; position 5 is cached"
    )
    node = in_node(req.last_node, "positions 0 to 7, used by 1 request")
    assert lines["cached"] == f"in the prefix cache at position 5{node}"


def test_one_position_is_no_range() -> None:
    rig = serving()
    rig.serve(PROMPT)
    req = rig.admit([*PROMPT[:8], 300])
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    assert lines_of(rig)["filled"].startswith(
        "positions 0 to 7 from the prefix cache, position 8 by prefills; "
    )


@pytest.mark.parametrize(
    ("position", "place"), [(12, "was prefilled"), (18, "was decoded")], ids=str
)
def test_a_slot_of_the_requests_own_is_in_no_cache(position: int, place: str) -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.decode_request(req, 7)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), position)] += 1
    rig.decode_request(req, 8)
    lines = lines_of(rig)
    assert lines["filled"].endswith(f"; position {position} {place}")
    assert lines["cached"] == "not in the prefix cache"


def test_a_swa_slot_is_found_through_the_mapping() -> None:
    rig = serving("swa")
    rig.serve(PROMPT)
    req = rig.admit([*PROMPT[:18], 300])
    slot = rig.slot(rig.row(req), 16)
    swa_slot = int(rig.pool.full_to_swa_index_mapping[slot])
    for buffer in rig.pool.swa_kv_pool.k_buffer:
        buffer[swa_slot] += 1
    rig.decode_request(req, 7)
    assert scene_of(rig).slot == swa_slot
    node = "" if LISTS_AT_ONCE else ", in node"
    assert f"in the prefix cache at position 16{node}" in lines_of(rig)["cached"]


def test_the_sweep_says_which_node_it_read() -> None:
    rig = serving(sweep_interval=1)
    sweep = SweepOrchestrator(rig.manager.config, rig.manager.groups, rig.manager.sink)
    rig.manager.observers.append(sweep)
    sweep.attach_radix_cache(rig.tree)
    rig.serve(PROMPT)
    (slot,) = rig.cached_slots(PROMPT)[4:5]
    rig.manager.groups[0].records("K", Side.HEAD)[slot, WORD_IDENTITY] ^= 1 << 40
    rig.idle(20)
    found = rig.tree.match_prefix(MatchPrefixParams(key=key_of(PROMPT)))
    node = in_node(found.last_device_node, "positions 0 to 19, used by 0 requests")
    assert lines_of(rig)["cached"] == f"in the prefix cache at position 4{node}"


def test_a_large_prefix_cache_is_searched_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "LISTING_US", 1e-3)  # one node
    rig = serving()
    for first in range(10):
        rig.serve([first, *PROMPT])
    req = rig.admit([*range(300, 310)])
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    searched = "" if LISTS_AT_ONCE else "part of the "  # it is listed at once
    expected = f"not in the {searched}prefix cache{' that was searched' if searched else ''}"
    assert lines_of(rig)["cached"] == expected


def test_a_cache_that_cannot_be_listed_is_not_searched() -> None:
    rig = serving()
    req = rig.admit(PROMPT)
    rig.manager.radix_cache = SimpleNamespace(device="cpu")
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    lines = lines_of(rig)
    assert "filled" in lines
    assert "cached" not in lines


def test_without_a_scheduler_nothing_is_said() -> None:
    rig = TreeRig(content=ContentMode.ALL, surroundings=None)
    req = rig.admit(PROMPT)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    assert {"filled", "cached"}.isdisjoint(lines_of(rig))


# The first diverging position and the host's own tokens


def test_a_wrong_token_is_shown_beside_the_requests_own() -> None:
    rig = serving()
    req = rig.admit(PROMPT)
    slot = rig.slot(rig.row(req), 5)
    for half in ("K", "V"):
        for side in (Side.HEAD, Side.TAIL):
            rig.manager.groups[0].records(half, side)[slot, WORD_IDENTITY] ^= 1
    rig.decode_request(req, 7)
    row = rig.row(req)
    assert lines_of(rig)["diverges"] == (
        f"position 5 leads to slot {slot}, which holds token {PROMPT[5] ^ 1} instead of {PROMPT[5]}, of row {row} "
        "(forward 1)"
    )


def test_the_whole_row_is_compared_and_not_only_what_is_near() -> None:
    rig = serving()
    req, other = rig.admit(range(500, 560)), rig.admit(PROMPT)
    rig.rows.req_to_token[rig.row(req), 2] = rig.slot(rig.row(other), 2)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 50)] += 1
    rig.decode_request(req, 7)
    causes = rig.settle() and rig.manager.violations._reporter._causes.values()
    far = [c.scene for c in causes if c.scene.position == 50]
    assert [s.diverges.split(",")[0] for s in far] == [
        f"position 2 leads to slot {rig.slot(rig.row(other), 2)}"
    ]
    assert "holds token 102 instead of 502" in far[0].diverges


def test_a_row_as_it_should_be_diverges_nowhere() -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 7)
    assert scene_of(rig).diverges == ""


def test_a_decode_before_has_read_the_position() -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.decode_request(req, 7)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] += 1
    rig.decode_request(req, 8)
    assert lines_of(rig)["last read"] == (
        "forward 3 of the request read position 5, too, without this finding"
    )


def test_a_prefill_before_may_not_have_read_it() -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 12)] += 1
    rig.decode_request(req, 7)
    assert "last read" not in lines_of(rig)


def test_a_decoded_position_may_be_newer_than_the_decode_before() -> None:
    rig, req = reading_half_a_cached_prompt()
    rig.decode_request(req, 7)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 18)] += 1
    rig.decode_request(req, 8)
    assert "last read" not in lines_of(rig)


# Which word of the bytes changed


def test_a_flipped_bit_is_found() -> None:
    rig = serving()
    req = rig.admit(PROMPT)
    slot = rig.slot(rig.row(req), 5)
    row = rig.pool.v_buffer[1][slot].view(torch.int32).reshape(-1)
    was = int(row[3]) & 0xFFFFFFFF
    row[3] ^= 1 << 9
    rig.decode_request(req, 7)
    scene = scene_of(rig)
    assert [w.text() for w in scene.changed] == [
        f"one word explains it: V buffer 1, byte 12: 0x{was:08x} became 0x{was ^ 512:08x} (1 bit)"
    ]
    assert scene.zero_buffers == ()


def test_two_words_are_explained_by_none() -> None:
    rig = serving()
    req = rig.admit(PROMPT)
    row = rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)].view(torch.int32).reshape(-1)
    row[3] ^= 1 << 9
    row[0] ^= 1 << 9
    rig.decode_request(req, 7)
    assert scene_of(rig).changed == ()


def test_bytes_that_are_right_again_are_explained_by_none() -> None:
    """They change back between the check and the scene."""
    rig = serving()
    req = rig.admit(PROMPT)
    row = rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)].view(torch.int32).reshape(-1)
    row[3] ^= 1 << 9
    rig.decode_request(req, 7)
    row[3] ^= 1 << 9
    assert scene_of(rig).changed == ()


def test_a_layer_that_is_zero_is_named() -> None:
    rig = serving()
    req = rig.admit(PROMPT)
    rig.pool.k_buffer[1][rig.slot(rig.row(req), 5)] = 0
    rig.decode_request(req, 7)
    layers = rig.pool.layer_num
    assert lines_of(rig)["zero"] == f"K of the slot is all zero in 1 of {layers} buffers: 1"
    assert layers > 1


def test_a_damaged_fingerprint_is_not_blamed_on_the_bytes() -> None:
    """One bit of the record alone would be explained by a word only if its key were a power of two."""
    rig = serving()
    req = rig.admit(PROMPT)
    slot = rig.slot(rig.row(req), 5)
    rig.manager.groups[0].records("K", Side.TAIL)[slot, WORD_CONTENT] ^= 1 << 45
    rig.decode_request(req, 7)
    assert scene_of(rig).changed == ()


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_inverses(values: list[int]) -> None:
    odd = torch.tensor(values) | 1
    assert (odd * _inverse(odd) == 1).all()


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["all", "partial"]), st.booleans())
def test_every_single_word_is_found_and_no_other(
    rng: random.Random, mode: str, in_bytes: bool
) -> None:
    """Rows of 33 bytes are hashed byte by byte."""
    width, dtype = (33, torch.uint8) if in_bytes else (24, torch.int32)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    layers = [torch.randint(0, 200, (6, width), dtype=dtype, generator=generator) for _ in range(3)]
    sources = tuple(map(ContentSource.of_rows, layers))
    slot, content = rng.randrange(6), ContentMode(mode)
    written = _fingerprint(sources, slot, content)
    layer, word = rng.randrange(3), rng.randrange(width)
    was = int(layers[layer][slot, word])
    now = layers[layer][slot, word] = (was + rng.randrange(1, 200)) % 256
    rows = tuple(row_of(source, slot) for source in sources)
    found = explaining_words(rows, sources, content, slot, written)
    seen = _fingerprint(sources, slot, content) != written
    assert seen or mode == "partial"
    assert found == ((Word(layer, word * dtype.itemsize, int(now), was),) if seen else ())


def _fingerprint(sources: tuple[ContentSource, ...], slot: int, mode: ContentMode) -> int:
    return int(content_fingerprint(sources, torch.tensor([slot]), mode))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
