"""The ports of the servers of tests: none that another process takes at random before the server binds it."""

from __future__ import annotations

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.testing.serving import (
    MOONCAKE_PORTS,
    PORTS,
    SERVER_PORT_OFFSETS,
    SERVER_PORTS,
)

register_cpu_ci(est_time=1, suite="stage-a-test-cpu")

LAST_OF_MOONCAKE = (
    17_000  # seen: a prefill server's Mooncake listened there before a decode server bound it
)
FIRST_OF_LINUX = 32_768  # net.ipv4.ip_local_port_range


def test_no_port_is_one_that_mooncake_or_linux_takes() -> None:
    bound = {*PORTS, *(port + offset for port in SERVER_PORTS for offset in SERVER_PORT_OFFSETS)}
    assert LAST_OF_MOONCAKE in MOONCAKE_PORTS
    assert bound.isdisjoint(MOONCAKE_PORTS)
    assert max(bound) < FIRST_OF_LINUX


def test_servers_share_no_port() -> None:
    bound = [port + offset for port in SERVER_PORTS for offset in SERVER_PORT_OFFSETS]
    assert len(bound) == len(set(bound))
