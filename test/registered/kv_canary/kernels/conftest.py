"""Scenes of the tests of single checks: every shape on every backend."""

import pytest

from sglang_kv_canary_rigs.backends import Backend, available_backends
from sglang_kv_canary_rigs.check_scenes import MHA, SHAPES, SWA_SHAPES, scenes
from sglang_kv_canary_rigs.scene import CheckScene


@pytest.fixture(params=scenes(SHAPES))
def scene(request) -> CheckScene:
    return CheckScene(*request.param)


@pytest.fixture(params=scenes({"mha": MHA}))
def mha(request) -> CheckScene:
    return CheckScene(*request.param)


@pytest.fixture(params=scenes(SWA_SHAPES))
def swa(request) -> CheckScene:
    return CheckScene(*request.param)


@pytest.fixture(params=available_backends(), ids=lambda b: b.name)
def backend(request) -> Backend:
    return request.param
