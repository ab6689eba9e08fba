"""Servers of tests whose ranks need more GPUs than a machine has are skipped there, and not started."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.e2e import CanaryE2EBase, gpus_of

register_cpu_ci(est_time=1, suite="stage-a-test-cpu")


class TwoRanks(CanaryE2EBase):
    flags: ClassVar = {"kv_canary": "log", "tp_size": 2}


@pytest.mark.parametrize(
    ("server_args", "gpus"),
    [
        ({}, 1),
        ({"tp_size": 2, "pp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),
    ],
    ids=str,
)
def test_each_rank_takes_a_gpu(server_args: dict[str, Any], gpus: int) -> None:
    assert gpus_of(server_args) == gpus


def test_a_server_that_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of GPUs is made up: there is none here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(pytest.skip.Exception, match="needs 2 GPUs, this machine has 1"):
        TwoRanks.setup_class()
