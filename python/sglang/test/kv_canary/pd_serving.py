"""A prefill and a decode server of one model on this machine: KV travels over Mooncake's TCP transport, or over NIXL.

Both are real SGLang servers with the real transport. Newer releases also need what HiCache needs on a CPU: a decode
server keeps retracted requests in its host pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

import sglang.version
from sglang_kv_canary.testing import CanaryServer, hicache_mode
from sglang_kv_canary.testing.mode_config import ModeConfig
from sglang_kv_canary.testing.serving import free_port
from sglang_kv_canary.wiring.releases import release

from . import nixl_transport
from .arrival_order import ORDER_FILE
from .checkout import REPO
from .cpu_cores import bind_each_rank
from .sent_before_freed import sent_before_freed

HOST = "127.0.0.1"
NO_TRANSFER = "2.2.2.2"  # SGLang's name for no decode server at all
LIBRARIES = REPO / ".transport"
# In the order in which they need each other.
_NEEDED = ("nl-3.so.200", "nl-route-3.so.200", "ibverbs.so.1", "rdmacm.so.1", "numa.so.1")
REQUIRED = "KV_CANARY_REQUIRE_TRANSPORT"
STATES = "states of linear-attention layers"  # in what a server says at its start
BACKEND = "KV_CANARY_TEST_TRANSPORT"  # of tests that name none
# 0.5.22 would send a cached prefix that HiCache still loads. The canary refuses that.
NO_EARLY_PREFIXES = (
    {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}
    if sglang.version.__version__ == "0.5.22"
    else {}
)
_ENGINES = {"mooncake": "mooncake.engine", "nixl": "nixl._api"}


def load_transport() -> None:
    """A plugin: finds what the transport's engine links to where `make transport` has put it."""
    for name in _NEEDED:
        library = LIBRARIES / f"lib{name}"
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def need_transport(backend: str = "mooncake") -> None:
    """A skip without the transport, which KV_CANARY_REQUIRE_TRANSPORT=1 turns into a failure."""
    import pytest  # here, because servers load this module as a plugin

    load_transport()
    try:
        importlib.import_module(_ENGINES[backend])
    except ImportError as error:
        missing = f"the transport {backend} cannot be loaded ({error}); see `make transport`"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing} ({REQUIRED}=1)")
        pytest.skip(missing)


def nothing_to_synchronize() -> None:
    """A plugin: SGLang waits for CUDA when it copies KV or its indices, which a torch without CUDA refuses."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_stream = lambda *_: None
        torch.cuda.Event = _Happened


class _Happened:
    """An event of a device that does everything at once."""

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


FILL_INS = (
    (*hicache_mode.FILL_INS, nothing_to_synchronize)
    if release().has_own_canary and hicache_mode.ON_CPU
    else ()
)
HOST_POOL = (
    {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"} if FILL_INS else {}
)
# SGLang drops an abort that overtakes its request, and never sends it again. The peer, where the abort has arrived, has
# ended the request then, so the other server waits until such a timeout, which is 300 by default.
_SECONDS_FOR_A_PEER = "100"
TRANSPORT = {
    "MC_FORCE_TCP": "1",
    "SGLANG_HOST_IP": HOST,
    "MC_LOG_LEVEL": "ERROR",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": _SECONDS_FOR_A_PEER,
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": _SECONDS_FOR_A_PEER,
}


def start_beside(
    server: CanaryServer, enter: Callable[[], object], leave: Callable[[], None]
) -> None:
    """Start `server`, and others by `enter` at the same time. They end by `leave` if it does not start."""
    with ExitStack() as unless_all_start:
        with server.starting():
            enter()
            unless_all_start.callback(leave)
        unless_all_start.pop_all()


class PdServing(CanaryServer):
    """The decode server, with the prefill server as `prefill`. Requests go to both, as a router sends them.

    `backend` is SGLang's name of the transport. `prefill_flags` and `decode_flags` are added to the flags of one of
    them, and `prefill_env` and `decode_env` to its environment.
    """

    backend: ClassVar[str] = os.environ.get(BACKEND, "mooncake")
    prefill_flags: ClassVar[Mapping[str, Any]] = {}
    decode_flags: ClassVar[Mapping[str, Any]] = {}
    prefill_env: ClassVar[Mapping[str, str]] = {}
    decode_env: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self,
        mode: ModeConfig,
        flags: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        plugins: Sequence[Callable[[], None]] = (),
    ) -> None:
        self.bootstrap_port = free_port()
        self._unanswered: dict[str, asyncio.Future[list[dict[str, Any]]]] = {}  # by request id
        both = {
            **HOST_POOL,
            **(flags or {}),
            "host": HOST,
            "disaggregation_transfer_backend": self.backend,
            "disaggregation_bootstrap_port": self.bootstrap_port,
        }
        self._faults = tempfile.TemporaryDirectory(prefix="kv_canary_transit_")
        self._fault_file = Path(self._faults.name) / "fault"
        env = {
            **TRANSPORT,
            **nixl_transport.ENV,
            FAULT_FILE: str(self._fault_file),
            **(env or {}),
        }
        # Hooks of host_memory and of faults come in this order.
        speculates = {**mode.server_args, **both}.get("speculative_algorithm")
        drafts = (sent_before_freed,) if speculates else ()
        plugins = (load_transport, nixl_transport.host_memory, *FILL_INS, *drafts, *plugins)
        prefill = {**both, "disaggregation_mode": "prefill", **self.prefill_flags}
        early = NO_EARLY_PREFIXES if prefill.get("enable_hierarchical_cache") else {}
        self.prefill = CanaryServer(mode, prefill, {**env, **early, **self.prefill_env}, plugins)
        decode = {**both, "disaggregation_mode": "decode", **self.decode_flags}
        self.order_file = Path(self._faults.name) / "order"  # see arrival_order.py
        env = {**env, ORDER_FILE: str(self.order_file)}
        super().__init__(mode, decode, {**env, **self.decode_env}, plugins)

    def __enter__(self) -> PdServing:
        start_beside(self.prefill, super().__enter__, super().__exit__)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.prefill.__exit__()
            self._faults.cleanup()

    @contextmanager
    def damaging(self, fault: str) -> Iterator[None]:
        """What the prefill server sends in here is damaged, if `transit_faults` is among the plugins."""
        self._fault_file.write_text(fault)
        try:
            yield
        finally:
            self._fault_file.unlink()

    async def with_late_loads(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of the prefill and of the decode server, which loads nothing back until all has been sent.

        `transit_faults` must be among the plugins.
        """
        of_prefill, of_decode = self.bodies(body)
        with self.damaging(HOLD_LOADS):
            decoded = asyncio.create_task(self._post(self, of_decode))
            sent = await self._post(self.prefill, of_prefill)
            await asyncio.sleep(0.2)  # until the decode server has heard of it
        return [sent, await decoded]

    def release_late_writes(self) -> None:
        """What was sent under the fault `again_later` is sent once more now."""
        self._fault_file.with_name(RELEASED).touch()

    @property
    def alive(self) -> bool:
        return super().alive and self.prefill.alive

    @property
    def stderr(self) -> str:
        return f"{super().stderr}\nthe prefill server:\n{self.prefill.stderr}"

    async def generate(
        self, request_id: str, input_ids: list[int], max_new_tokens: int, **more: Any
    ) -> list[int]:
        answer = await self.ask({**_asked(request_id, input_ids, max_new_tokens), **more})
        return answer.get("output_ids", [])

    async def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The decode server's answer to `body`, which both servers get."""
        return (await self.ask_both(body))[1]

    async def ask_both(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The answers of the prefill and of the decode server."""
        both = zip((self.prefill, self), self.bodies(body), strict=True)
        answers = asyncio.gather(*(self._post(server, whole) for server, whole in both))
        name = str(body.get("rid"))
        self._unanswered[name] = answers
        try:
            return await answers
        finally:
            self._unanswered.pop(name, None)

    async def exchange(self, body: Mapping[str, Any]) -> tuple[int, str]:
        """HTTP status and text of the decode server's answer to `body`, which both servers get."""

        async def told(server: CanaryServer, whole: Mapping[str, Any]) -> tuple[int, str]:
            async with self._session.post(f"{server.url}/generate", json=whole) as answer:
                return answer.status, await answer.text()

        of_prefill, of_decode = self.bodies(body)
        _, answer = await asyncio.gather(told(self.prefill, of_prefill), told(self, of_decode))
        return answer

    def bodies(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the prefill and the decode server get."""
        whole = {**body, **self.meeting()}
        return whole, whole

    async def foretell(self, body: Mapping[str, Any]) -> str:
        """The text of the prefill server's answer to `body`, for one token. Nothing is transferred."""
        whole = {**body, **self.meeting(), "bootstrap_host": NO_TRANSFER}
        async with self._session.post(f"{self.prefill.url}/generate", json=whole) as answer:
            return await answer.text()

    def meeting(self) -> dict[str, Any]:
        """What tells both servers where they meet for one request."""
        return {
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.randrange(1, 2**62),
        }

    async def _post(self, server: CanaryServer, body: Mapping[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{server.url}/generate", json=body) as answer:
            return await answer.json()

    async def stream(
        self, request_id: str, input_ids: list[int], max_new_tokens: int
    ) -> tuple[list[float], list[int]]:
        """Seconds until each part of the answer, and its tokens."""
        asked = _asked(request_id, input_ids, max_new_tokens)
        of_prefill, of_decode = self.bodies({**asked, "stream": True})
        start, times, tokens = time.perf_counter(), [], []

        async def read(server: CanaryServer, whole: Mapping[str, Any]) -> None:
            async with self._session.post(f"{server.url}/generate", json=whole) as answer:
                async for line in answer.content:
                    if server is self and line.startswith(b"data: {"):
                        times.append(time.perf_counter() - start)
                        tokens[:] = json.loads(line[len(b"data: ") :])["output_ids"]

        await asyncio.gather(read(self.prefill, of_prefill), read(self, of_decode))
        return times, tokens

    async def generate_together(
        self, requests: Sequence[tuple[str, list[int], int]]
    ) -> list[list[int]]:
        return list(await asyncio.gather(*(self.generate(*request) for request in requests)))

    async def abort(self, request_id: str) -> None:
        """Each second until both have answered: a server ignores it that does not know the request yet."""
        answers = self._unanswered.get(request_id)
        while True:
            for server in (self.prefill, self):
                url = f"{server.url}/abort_request"
                async with self._session.post(url, json={"rid": request_id}):
                    pass
            if answers is None or (await asyncio.wait([answers], timeout=1))[0]:
                return

    async def flush(self) -> bool:
        flushed = True
        for server in (self.prefill, self):
            flushed = await self.flush_one(server) and flushed
        return flushed

    async def flush_one(self, server: CanaryServer) -> bool:
        async with self._session.post(f"{server.url}/flush_cache?timeout=60") as answer:
            return answer.status == 200


def _asked(request_id: str, input_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    return {
        "rid": request_id,
        "input_ids": input_ids,
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        },
    }


class CachingServing(PdServing):
    """The decode server keeps prefixes, and only what follows them is sent."""

    decode_flags: ClassVar[Mapping[str, Any]] = {"disaggregation_decode_enable_radix_cache": True}


class AfterThePrefill(PdServing):
    """The decode server allocates slots when the prefill has ended, and all chunks are sent then."""

    prefill_flags: ClassVar = {"disaggregation_decode_allocation_policy": "prefill_complete"}
    decode_flags: ClassVar = prefill_flags


_REPLICAS = {"dp_size": 2, "nccl_port": None}  # each has a port of its own


class Replicas(PdServing):
    """Replicas of the model behind one front end."""

    prefill_flags: ClassVar = _REPLICAS
    # SGLang takes each replica for rank 0 and fails requests of others, unless it may not trust the room.
    prefill_env: ClassVar = {
        **bind_each_rank(2),
        "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": "1",
    }
    decode_flags: ClassVar = _REPLICAS
    decode_env: ClassVar = bind_each_rank(2)


HOLD_S = 3.0  # longer than a prefill server takes to send a prompt
_RECEIVERS = {"mooncake": "mooncake.conn.MooncakeKVReceiver", "nixl": "nixl.conn.NixlKVReceiver"}


def no_early_reuse() -> None:
    """A plugin for decode servers: slots of a transfer that fails stay its own until nothing more can arrive.

    SGLang frees them while the prefill server may still write to them (sgl#24527), which damages the KV of others.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    receiver = _RECEIVERS[PdServing.backend]
    target = f"sglang.srt.disaggregation.{receiver}.poll"
    HookRegistry.register(target, _poll_with_patience, HookType.AROUND)


def _poll_with_patience(original: Callable[[Any], int], receiver: Any) -> int:
    from sglang.srt.disaggregation.base import KVPoll

    status = original(receiver)
    if status != KVPoll.Failed or receiver.init_time is None:  # it has not told where to write
        return status
    since = receiver.__dict__.setdefault("_kv_canary_failed_since", time.monotonic())
    return status if time.monotonic() - since > HOLD_S else KVPoll.Transferring


# Transit faults. A file names the fault; what is sent while it exists is damaged.

FAULT_FILE = "KV_CANARY_TRANSIT_FAULT_FILE"
DAMAGES = ("drop_layer", "shift_layer", "reverse_slots", "drop_records", "drop_all")
DROP_FIRST_TOKEN = "drop_first_token"  # of the answer: what an earlier request left there is read
DROP_WINDOW = "drop_window"  # of layers with a sliding window, whose KV is SGLang's first state
DROP_KEYS = DROP_WINDOW  # of an indexer: the same
LOSE_KEYS, LOSE_KEY_RECORDS = "lose_keys", "lose_key_records"  # Mooncake says: not sent
# By component of the state and buffer. Records of latent rows are the first of SGLang's last component
_LOST = {LOSE_KEYS: (0, 0), LOSE_KEY_RECORDS: (-1, 1)}
AGAIN_LATER, RELEASED = "again_later", "released"
HOST_COPY, HOST_KEYS = "host_copy", "host_keys"
HOLD_LOADS = "hold_loads"  # of HiCache
Blocks = list[tuple[int, int, int]]  # (source, target, bytes)


def transit_faults() -> None:
    """A plugin: between SGLang, or the canary, and the transport."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager._transfer_data"
    HookRegistry.register(target, _damaged_in_transit, HookType.AROUND)
    nixl_transport.damage_in_transit(
        lambda args, blocks: damaged(_fault()[1], args, blocks), _send_again_later
    )
    resumed = "sglang.srt.managers.schedule_batch.Req.load_kv_cache"
    HookRegistry.register(resumed, _damage_host_copy, HookType.BEFORE)
    if release().has_own_canary:
        resumed = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.restore_kv_cache"
        HookRegistry.register(resumed, _damage_host_pool, HookType.BEFORE)
        may_load = (
            "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.has_free_load_back_slot"
        )
        HookRegistry.register(may_load, _may_load, HookType.AROUND)


def states_of_some_bytes() -> None:
    """A plugin: leaves out a part of LFM2's states that has no bytes on 0.5.12.post1.

    Mooncake refuses all of a state with it. SGLang does not look, so no state arrives.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registers = (
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.register_buffer_to_engine"
    )
    HookRegistry.register(registers, _leave_out_nothing, HookType.BEFORE)


def _leave_out_nothing(kv_manager: Any) -> None:
    register, send = kv_manager.engine.batch_register, kv_manager._transfer_data

    def register_some(pointers: Sequence[int], lengths: Sequence[int]) -> int:
        some = [pair for pair in zip(pointers, lengths, strict=True) if pair[1]]
        return register(*map(list, zip(*some, strict=True)))

    def send_some(session: str, blocks: Blocks) -> int:
        return send(session, [block for block in blocks if block[2]])

    kv_manager.engine.batch_register, kv_manager._transfer_data = register_some, send_some


def _damaged_in_transit(
    original: Callable[..., int], kv_manager: Any, session: str, blocks: Blocks
) -> int:
    _send_again_later(functools.partial(original, kv_manager, session, list(blocks)))
    if _are_lost(kv_manager.kv_args, blocks):
        return -1
    return original(kv_manager, session, damaged(_fault()[1], kv_manager.kv_args, blocks))


def _are_lost(args: Any, blocks: Blocks) -> bool:
    if (fault := _fault()[1]) not in _LOST:
        return False
    component, buffer = _LOST[fault]
    start, size = args.state_data_ptrs[component][buffer], args.state_data_lens[component][buffer]
    return any(start <= source < start + size for source, _, _ in blocks)


def _send_again_later(send: Callable[[], Any]) -> None:
    """A write that a transport has under way when its request ends."""
    path, fault = _fault()
    if fault == AGAIN_LATER:
        threading.Thread(target=_when_released, args=(path, send), daemon=True).start()


def _damage_host_copy(request: Any, *_: Any) -> None:
    """One value of the KV, or of the index keys, that wait in host memory while their request is retracted."""
    what = {HOST_COPY: "kv", HOST_KEYS: "index_k"}.get(_fault()[1])
    if what is None:
        return
    is_newer = release().has_own_canary
    part = request.kv.retraction_backup.cpu_tensors if is_newer else request.kv_cache_cpu
    part = part[what] if isinstance(part, dict) else part
    while not torch.is_tensor(part):
        part = part[0]
    part.view(-1)[0] += 1


def _damage_host_pool(tree: Any, _: Any, backup: Any) -> None:
    """The same, where the copy is in the host pool."""
    if _fault()[1] == HOST_COPY:
        keys = tree.host_pool_group.kv_buffer[0]  # [layers, slots, ...]
        keys[0, backup.host_indices[0]].view(-1)[0] += 1


def _may_load(original: Callable[[Any], bool], tree: Any) -> bool:
    return _fault()[1] != HOLD_LOADS and original(tree)


def _fault() -> tuple[Path, str]:
    path = Path(os.environ[FAULT_FILE])
    return path, path.read_text() if path.exists() else ""


def _when_released(path: Path, send: Callable[[], Any]) -> None:
    while not path.with_name(RELEASED).exists():
        time.sleep(0.01)
    send()


def damaged(fault: str, args: Any, blocks: Blocks) -> Blocks:
    """What arrives of `blocks`. `args`: SGLang's KVArgs of the sender."""

    def in_buffers(address: int, pointers: Sequence[int], lengths: Sequence[int]) -> bool:
        return any(p <= address < p + n for p, n in zip(pointers, lengths, strict=True))

    def is_kv(block: tuple[int, int, int]) -> bool:
        return in_buffers(block[0], args.kv_data_ptrs, args.kv_data_lens)

    def is_record(block: tuple[int, int, int]) -> bool:
        return in_buffers(block[0], args.state_data_ptrs[-1], args.state_data_lens[-1])

    def is_last_layer(block: tuple[int, int, int]) -> bool:
        return in_buffers(block[0], args.kv_data_ptrs[-1:], args.kv_data_lens[-1:])

    if fault == "drop_layer":
        return [block for block in blocks if not is_last_layer(block)]
    if fault == "shift_layer":
        size = args.kv_item_lens[-1]
        return [(s, t + size, n) if is_last_layer((s, t, n)) else (s, t, n) for s, t, n in blocks]
    if fault == DROP_FIRST_TOKEN:
        tokens = (args.aux_data_ptrs[:1], args.aux_data_lens[:1])
        return [block for block in blocks if not in_buffers(block[0], *tokens)]
    if fault == DROP_WINDOW:
        window = (args.state_data_ptrs[0], args.state_data_lens[0])
        return [block for block in blocks if not in_buffers(block[0], *window)]
    if fault == "drop_records":
        return [block for block in blocks if not is_record(block)]
    if fault == "drop_all":
        return [block for block in blocks if not (is_kv(block) or is_record(block))]
    if fault == "reverse_slots":
        return [part for block in blocks for part in _reversed(block, args, is_kv, is_record)]
    return blocks


def _reversed(
    block: tuple[int, int, int],
    args: Any,
    is_kv: Callable[..., bool],
    is_record: Callable[..., bool],
) -> Blocks:
    """The block's pages in the opposite order. Records follow their bytes, as if SGLang had swapped the pages."""
    source, target, size = block
    item = args.kv_item_lens[0] if is_kv(block) else args.state_item_lens[-1][0]
    if not (is_kv(block) or is_record(block)) or size <= item:
        return [block]
    count = size // item
    return [(source + i * item, target + (count - 1 - i) * item, item) for i in range(count)]


class OverMooncake(PdServing):
    backend: ClassVar = "mooncake"


class OverNixl(PdServing):
    backend: ClassVar = "nixl"


class ServesPair:
    """For a test class before its base class: that serves with the decode server, and the prefill server is checked."""

    transport: ClassVar = PdServing
    serving: ClassVar[PdServing]
    _seen_on_prefill: ClassVar[int]

    @classmethod
    def setup_class(cls) -> None:
        need_transport(cls.transport.backend)
        cls._seen_on_prefill = 0
        super().setup_class()

    def teardown_method(self) -> None:
        super().teardown_method()
        assert self.found_on_prefill() == []

    def assert_clean_and_all_checked(self) -> None:
        """Nothing was found, each launch tag ran, and the decode server has left nothing unchecked."""
        self.assert_no_violations()
        self.assert_healthy()
        self.assert_all_checked()

    def assert_all_checked(self) -> None:
        """The servers have left nothing unchecked, but states of linear layers, which both say at their start."""
        left = [line for line in self.serving.stderr.splitlines() if "not checked" in line]
        of_states = [line for line in left if STATES in line]
        assert left == of_states
        assert len(of_states) == 2 * ("hybrid" in self.mode.name)

    def found_on_prefill(self) -> list[dict[str, Any]]:
        """What the prefill server has reported since the last call."""
        found = self.serving.prefill.events("violation")[self._seen_on_prefill :]
        type(self)._seen_on_prefill += len(found)
        return found

    def ask(self, request_id: str, prompt: list[int], count: int = 6, **more: Any) -> list[int]:
        return self.run(self.serving.generate(request_id, prompt, count, **more))
