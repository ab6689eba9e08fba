"""Servers with HiCache on a small device pool, and prompts that it must load back from host memory."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from sglang_kv_canary.host_tier.record_files import KEY_PREFIX, REVOKED_PREFIX
from sglang_kv_canary.host_tier.stored_records import name_in
from sglang_kv_canary.testing.e2e import CanaryE2EBase
from sglang_kv_canary.testing.hicache_mode import FILL_INS, SMALL_POOL
from sglang_kv_canary.testing.serving import CanaryServer, Serving
from sglang_kv_canary.testing.traffic import random_tokens

PROMPT = 100
STORAGE = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
}
FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


def prompts(name: str, count: int, tokens: int = PROMPT) -> list[list[int]]:
    rng = random.Random(name)
    return [random_tokens(rng, tokens) for _ in range(count)]


def ask(serving: Serving, name: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """One request, and its whole answer."""
    assert isinstance(serving, CanaryServer)
    sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"rid": name, "input_ids": list(prompt), "sampling_params": sampling, **more}
    return serving.post("/generate", body)


def hits(answer: dict[str, Any], tier: str = "host") -> int:
    """Prompt tokens that came from `tier`."""
    return (answer["meta_info"].get("cached_tokens_details") or {}).get(tier, 0)


class Pages:
    """A folder of the storage backend `file`, for the time of a test class."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kv_canary_pages_"))
        self.env = {FOLDER: str(self.path)}

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def keys(self, prompt: Sequence[int], page_size: int = 1) -> list[str]:
        """The storage's keys of a prompt's full pages."""
        from sglang.srt.mem_cache.utils import get_hash_str

        keys, last = [], None
        for first in range(0, len(prompt) // page_size * page_size, page_size):
            last = get_hash_str(list(prompt[first : first + page_size]), last)
            keys.append(last)
        return keys

    def file(self, key: str) -> Path:
        (path,) = self.path.glob(f"{key}_*.bin")
        return path

    def num_recorded(self) -> int:
        """Pages with records."""
        return len(list(self.path.glob(f"{KEY_PREFIX}*.bin")))

    def num_usable(self) -> int:
        """Those whose records are not revoked."""
        found = [path.read_bytes() for path in self.path.glob(f"{KEY_PREFIX}*.bin")]
        revoked = {path.name for path in self.path.glob(f"{REVOKED_PREFIX}*")}
        return sum(f"{REVOKED_PREFIX}{name_in(data).hex()}" not in revoked for data in found)

    def have(self, keys: Sequence[str]) -> bool:
        return all([*self.path.glob(f"{key}_*.bin")] for key in keys)

    def flip(self, key: str, offset: int) -> None:
        """Change one bit of a stored page."""
        path = self.file(key)
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x01
        path.write_bytes(data)


def load_short_prefixes() -> None:
    """A plugin: SGLang loads no prefix below ten tokens, and fails a request of a decode server that promised one."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_init(_: Any, tree: Any, *__: Any, **___: Any) -> None:
        tree.load_back_threshold = 1

    target = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache"
    HookRegistry.register(target, after_init, HookType.AFTER)


class WithPages:
    """For a server class before its base class: a storage folder of its own."""

    env: ClassVar[Mapping[str, str]]
    pages: ClassVar[Pages]

    @classmethod
    def setup_class(cls) -> None:
        cls.pages = Pages()
        cls.env = {**cls.env, **cls.pages.env}
        super().setup_class()

    @classmethod
    def teardown_class(cls) -> None:
        super().teardown_class()
        cls.pages.remove()


STORAGE_PATH = "/hicache/storage-backend"


class AsAdmin:
    """For a server class before its base class. Attaching a backend takes a key, and then so does flushing."""

    key: ClassVar[str] = "attach-and-detach"
    url: str

    def admin(self, path: str, method: str, **body: Any) -> str:
        """The server's message."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()

    async def flush(self) -> bool:
        return "flushed" in self.admin("/flush_cache?timeout=60", "POST")


class HiCacheE2E(CanaryE2EBase):
    """Every byte is checked, wherever it is, and the server ends with the first violation."""

    flags: ClassVar = {
        "kv_canary": "raise",
        "kv_canary_real_data": "all",
        "kv_canary_sweep_interval": 1,
        **SMALL_POOL,
    }
    env: ClassVar = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all"}
    plugins: ClassVar = FILL_INS

    def ask(self, name: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        return ask(self.serving, name, prompt, **more)

    def push_out(self, name: str) -> None:
        """Other prompts fill the device pool, so that earlier ones remain in host memory only."""
        for i, prompt in enumerate(prompts(name, 4)):
            self.ask(f"{name}-{i}", prompt)

    def twice(self, name: str, count: int = 6) -> int:
        """Each prompt twice, with the others in between. Returns the tokens that came from host memory."""
        asked, found = prompts(name, count), 0
        first = [self.ask(f"{name}-{i}-a", p)["output_ids"] for i, p in enumerate(asked)]
        for i, prompt in enumerate(asked):
            answer = self.ask(f"{name}-{i}-b", prompt)
            assert answer["output_ids"] == first[i]
            found += hits(answer)
        return found

    def host_slots(self, what: str) -> dict[str, int]:
        """Slots of host memory that were `loaded` or `refused`, by pool kind, since the start."""
        counted = self.serving.send("counters").answer()["host"]
        return {kind: counts[what] for kind, counts in counted.items()}

    def assert_dropped(self, tag: str, **place: Any) -> None:
        """Damage on the device at `place` ends its reader. What that has computed is on neither tier then."""
        prompt, after = prompts("computed", 2)
        longer = prompt + after[:40]
        self.ask("computed-a", prompt)
        self.inject("flip_bytes", cached=prompt, **place).answer()
        self.generate("computed-b", longer, 1)
        self.assert_violation("CONTENT", tag, reader="computed-b")
        self.serving.wait_for(lambda: self.serving.events("containment"), "it was acted on")
        (action,) = self.serving.events("containment")
        assert action["answered"] == ["computed-b"]
        assert hits(self.ask("computed-c", longer), "device") == 0
        self.push_out("computed")
        assert hits(self.ask("computed-d", longer)) > 0


class SpeculativeTraffic:
    """For a server class with speculation, before its base classes: prefixes go to host memory between turns."""

    def test_traffic(self) -> None:
        for turn in range(2):
            self.converse(f"traffic{turn}")
            self.push_out(f"traffic{turn}")
        self.assert_clean()
