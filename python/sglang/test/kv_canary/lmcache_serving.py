"""A real LMCache server beside a server of SGLang, on one machine, and what SGLang's loads from it come to.

On a CPU the bytes go through the worker: its scatter into the pool is over when the load has been asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_kv_canary.testing.serving import free_port

from .pd_serving import LIBRARIES, REQUIRED, load_transport

__all__ = [
    "FAILED",
    "GIVEN_UP",
    "LOADED",
    "LOST",
    "SHARED_ENV",
    "declines_short_loads",
    "fails_after_admission",
    "gives_up_loads",
    "lmcache_server",
    "loses_track",
    "need_lmcache",
    "pool_in_shared_memory",
    "tells_loads",
]

LOADED = "LMCache has loaded tokens:"  # said on stderr each time
GIVEN_UP = "a load from LMCache is given up, tokens:"
FAILED = "a load from LMCache fails late, tokens:"
LOST = "loses-track"
_GIVES_UP_EVERY = 3
_TIMEOUT_S = 120.0
_BUILT = "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache"


def need_lmcache() -> None:
    """A skip without LMCache, or without what its server links to."""
    import pytest  # here, because servers load this module as a plugin

    load_transport()
    try:
        import lmcache.v1.multiprocess.transfer_context  # noqa: F401
    except ImportError as error:
        missing = f"LMCache cannot be loaded ({error}); see requirements/ and `make transport`"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing} ({REQUIRED}=1)", pytrace=False)
        pytest.skip(missing, allow_module_level=True)


@contextmanager
def lmcache_server(chunk: int = 16) -> Iterator[str]:
    """LMCache's server, which keeps chunks of so many tokens. Its configuration file for SGLang."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kv_canary_lmcache_") as folder:
        config, log = Path(folder, "lmcache.yaml"), Path(folder, "log")
        config.write_text(f"mp_host: 127.0.0.1\nmp_port: {port}\n")
        command = [
            *(sys.executable, "-m", "lmcache.v1.multiprocess.server"),
            *("--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(chunk)),
            *("--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--disable-observability"),
            *("--supported-transfer-mode", "auto", "--separate-object-groups"),
        ]
        paths = [str(LIBRARIES), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        env = {"LD_LIBRARY_PATH": os.pathsep.join(paths), "LMCACHE_TRACK_USAGE": "false"}
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}
            )
        try:
            _wait_until_ready(process, log)
            yield str(config)
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + _TIMEOUT_S
    while "cache server is running" not in log.read_text():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"LMCache's server does not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)


# Plugins, at LMCache's own interface: the connector that the prefix cache has.


def _with_tree(change: Callable[[Any], None]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after(result: Any, *_: Any, **__: Any) -> None:
        change(result.tree_cache)

    HookRegistry.register(_BUILT, after, HookType.AFTER)


def _with_connector(change: Callable[[Any], None]) -> None:
    _with_tree(lambda tree: change(tree.lmcache_connector))


def _say(what: str, load: Any) -> None:
    print(what, load.end - load.local_hit_tokens, file=sys.stderr, flush=True)


def tells_loads() -> None:
    """A plugin: loads that are over are told on stderr."""

    def change(connector: Any) -> None:
        complete = connector.complete_load

        def completed(load: Any, **more: Any) -> bool:
            done = complete(load, **more)
            if done:
                _say(LOADED, load)
            return done

        connector.complete_load = completed

    _with_connector(change)


def declines_short_loads() -> None:
    """A plugin: a request whose prefix has lost a part since SGLang asked LMCache goes on without a load.

    SGLang itself takes it for shorter than promised, and its scheduler ends ("load-back must commit all promised").
    """

    def change(tree: Any) -> None:
        start = tree._start_external_load

        def started(flow: Any, req: Any) -> int | None:
            loads = min(flow.total_hit, len(flow.key)) - flow.local_hit_tokens
            return start(flow, req) if loads >= req.host_hit_length else None

        tree._start_external_load = started

    _with_tree(change)


def gives_up_loads() -> None:
    """A plugin: every third load is refused once its bytes are in the slots, as when another rank's has failed."""

    def change(connector: Any) -> None:
        prepare, loads = connector.prepare_load_on_stream, []

        def prepared(load: Any, stream: Any) -> bool:
            loads.append(load)
            there = prepare(load, stream)
            if not there or len(loads) % _GIVES_UP_EVERY:
                return there
            _say(GIVEN_UP, load)
            load.lookup.locks_held, load.result = False, False
            connector._cleanup_lookup_result(load.lookup)
            return False

        connector.prepare_load_on_stream = prepared

    _with_connector(change)


def fails_after_admission() -> None:
    """A plugin: loads fail when their request is being served, as when another rank tells of it late."""

    def change(connector: Any) -> None:
        complete = connector.complete_load

        def completed(load: Any, **more: Any) -> bool:
            complete(load, **more)
            _say(FAILED, load)
            load.result = False
            return False

        connector.complete_load = completed

    _with_connector(change)


def loses_track() -> None:
    """A plugin: when a request named LOST has been stored, the canary loses track, as after an internal error."""

    def change(connector: Any) -> None:
        complete = connector.complete_store

        def completed(store: Any, **more: Any) -> bool:
            from sglang_kv_canary.wiring.context import context

            if store.request_id == LOST:
                context.target.lose_track()
            return complete(store, **more)

        connector.complete_store = completed

    _with_connector(change)


# A CPU worker of LMCache moves one group of buffers, and refuses sliding windows, states and indexers. So its server
# writes to the pool itself, as on a GPU.
SHARED_ENV = {"LMCACHE_MP_TRANSFER_MODE": "lmcache_driven"}
_POOLS = "sglang.srt.mem_cache.memory_pool"
_BUILD = ("MHATokenToKVPool._create_buffers_normal", "MLATokenToKVPool.__init__")
_BUILD_MORE = ("DSATokenToKVPool.__init__", "MambaPool.__init__")


def pool_in_shared_memory() -> None:
    """A plugin: the server maps the pool, as it maps a GPU's."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in (*_BUILD, *_BUILD_MORE):
        HookRegistry.register(f"{_POOLS}.{method}", _share_buffers, HookType.AFTER)


def _share_buffers(_: Any, pool: Any, *args: Any, **kwargs: Any) -> None:
    from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap

    states = getattr(pool, "mamba_cache", None)
    more = () if states is None else (*states.conv, states.temporal)
    names = ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer")
    for buffer in (*more, *(b for name in names for b in getattr(pool, name, None) or ())):
        migrate_to_shm_and_wrap(buffer)  # it is this tensor from now on
