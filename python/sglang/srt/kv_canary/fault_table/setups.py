"""The servers of the table. Faults that need the same server arguments share one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..testing.eagle_mode import V2  # adds the mode
from ..testing.hicache_mode import FILL_INS, SMALL_POOL
from ..testing.mode_config import MODES, ModeConfig
from ..testing.quick_interpreter import quick_interpreter
from ..testing.scripted_models import write_scripted_eagle
from ..testing.serving import CanaryServer
from ..testing.spec_fill_ins import INTERPRETED
from ..testing.tiny_models import write_tiny_llama_checkpoint
from .desk import stage_faults
from .traffic import STORAGE_FOLDER

__all__ = ["SETUPS", "Setup"]

FLAGS = {"kv_canary": "log", "kv_canary_real_data": "all", "kv_canary_sweep_interval": 1}
ENV = {"SGLANG_KV_CANARY_TOKEN_CHECK": "all", "SGLANG_KV_CANARY_STALE_WEIGHTS": "report"}


@dataclass(frozen=True, slots=True)
class Setup:
    """One server: a mode of the harness, and what is added to it. `pool` is the table's column.

    `storage` gives HiCache a folder for its pages, `draft` writes a draft model.
    """

    name: str
    pool: str
    mode: ModeConfig
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[Callable[[], None], ...] = ()
    storage: bool = False
    draft: bool = False

    def server(self) -> CanaryServer:
        plugins = (*self.plugins, stage_faults)
        env = {**ENV, **self.env}
        serving = CanaryServer(self.mode, {**FLAGS, **self.flags}, env, plugins)
        if self.storage:
            pages = serving.folder / "pages"
            pages.mkdir()
            serving.env[STORAGE_FOLDER] = str(pages)
        if self.draft:
            path = write_scripted_eagle(serving.folder / "draft")
            serving.server_args["speculative_draft_model_path"] = path
        return serving


# Real weights, which an update can replace.
_MHA = replace(
    MODES["mha"],
    write_model=partial(write_tiny_llama_checkpoint, seed=1),
    server_args={**MODES["mha"].server_args, "load_format": "auto"},
)
_FILE = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": '{"prefetch_threshold": 16}',
}
SETUPS: dict[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("mha", "MHA", _MHA),
        Setup(
            "paged",
            "MHA, pages of 16",
            MODES["mha"],
            {"page_size": 16},
            INTERPRETED,  # SGLang's page allocator is a Triton kernel
            (quick_interpreter,),
        ),
        Setup("mla", "MLA", MODES["mla"]),
        Setup("swa", "SWA", MODES["swa"], {"disable_overlap_schedule": True}),
        Setup("hicache", "MHA, HiCache", MODES["mha"], SMALL_POOL, plugins=FILL_INS),
        Setup(
            "storage",
            "MHA, HiCache, files",
            MODES["mha"],
            {**SMALL_POOL, **_FILE},
            plugins=FILL_INS,
            storage=True,
        ),
        Setup("eagle", "MHA, EAGLE draft", MODES["eagle"], V2, INTERPRETED, draft=True),
    )
}
