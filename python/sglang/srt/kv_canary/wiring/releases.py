"""The SGLang release that is installed, chosen once by its version. Nothing else asks for a version.

What differs between releases is in one folder per family of releases, as `v0_5_12` or `v0_5_22`. Each has a `RELEASE`.
`until_0_5_17`, `from_0_5_17` and `from_0_5_21` hold what families share. `v0_5_18` to `v0_5_20` take those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..seam_guard import is_set

if TYPE_CHECKING:
    import torch

    from ..pool_patcher.registry import PoolSupport
    from ..runner.ranks import Ranks
    from .allocator_parts import AllocatorParts
    from .path_support import PathSupport
    from .refusals import Refusal
    from .transfer_answers import TransferAnswers

__all__ = [
    "FAMILIES",
    "NEWEST_FAMILY",
    "SUPPORTED_SGLANG_VERSIONS",
    "UNTESTED_ENV",
    "Release",
    "found_later",
    "release",
]

# Release of SGLang -> folder of its family.
FAMILIES = {
    "0.5.12.post1": "v0_5_12",
    "0.5.17": "v0_5_17",
    "0.5.18": "v0_5_18",
    "0.5.19": "v0_5_19",
    "0.5.20": "v0_5_20",
    "0.5.21": "v0_5_21",
    "0.5.22": "v0_5_22",
    "0.5.23": "v0_5_22",
}
SUPPORTED_SGLANG_VERSIONS = tuple(FAMILIES)
NEWEST_FAMILY = FAMILIES[SUPPORTED_SGLANG_VERSIONS[-1]]
# A release that nobody has tried gets the newest family. Hooks that find no target refuse it by name.
UNTESTED_ENV = "SGLANG_KV_CANARY_ALLOW_UNTESTED_RELEASE"


@dataclass(frozen=True, slots=True)
class Release:
    """What the rest of `wiring/` must know of a family of releases."""

    # Modules with HOOKS, relative to `wiring`. Later hooks on one target wrap earlier ones.
    hook_modules: tuple[str, ...]
    has_own_canary: bool  # SGLang's, which our plugin replaces
    check: Callable[
        [], None
    ]  # raises CanaryStartupError for a build that is not this release's own
    served: Callable[[], tuple[PathSupport, ...]]  # paths that are covered
    # What is done for each pool class, by qualified name. None: what the registry of attachers says.
    known_pools: Callable[[], Mapping[str, PoolSupport] | None]
    refusals: Callable[[], tuple[Refusal, ...]]  # setups that cannot be protected
    install_flags: Callable[
        [], None
    ]  # makes --kv-canary reach us; called once, before hooks are registered
    # A request's row of req_to_token. None: it has none.
    row_of: Callable[[Any], int | None]
    # A request's own list of tokens, prompt and answer, and how many it has computed once its next forward is done.
    # No copy: of a mixed batch, a few tokens of each list are needed.
    tokens_of: Callable[[Any], tuple[Sequence[int], int]]
    namespace_of: Callable[
        [Any], str | None
    ]  # of a request: what else than tokens tells its prefixes apart
    # The same for a key of a prefix cache.
    namespace_of_key: Callable[[Any], str | None]
    # Full slots of the longest prefix of some tokens that a prefix cache holds in the default namespace.
    cached_slots: Callable[[Any, Sequence[int]], list[int]]
    ranks_of: Callable[[Any], Ranks]  # of a model runner
    # Public methods of slot allocators that were read: all of them that free slots are hooked.
    allocator_methods: frozenset[str]
    swa_allocator_methods: frozenset[str]  # the same, of the SWA allocator
    # Whether an allocator's free() is seen later: at the end of its free group, or page by page.
    queues_frees: Callable[[Any], bool]
    swa_location: torch.dtype  # of the SWA slots in which attention stores new tokens
    draft_ids: torch.dtype  # of the token ids that draft-extend is fed
    # A ServerArgs as it is after all defaults are resolved.
    settled: Callable[[Any], Any]
    server_args: Callable[[], Any]  # those of a scheduler process, settled
    # Name of the pool class with an indexer that SGLang builds for a Hugging Face config. None: without.
    indexer_pool_of: Callable[[Any], str | None]
    decode_graphs_of: Callable[[Any], Any]  # a model runner's graph runner of decode, None without
    # Of settled arguments: requests in the largest decode graph (0: there is none), and the dtype of lengths there.
    captured: Callable[[Any], tuple[int, torch.dtype]]
    cuts_decode_graphs: Callable[[Any], bool]  # into several, at some layers
    pads_to_other_ranks: Callable[[Any], bool]  # whether all ranks agree on batch sizes
    # Scheduler processes that this node launches, over all data parallel ranks.
    schedulers_here: Callable[[Any], int]
    # Of settled arguments: whether sub-pools share one buffer, whose records a hook of the release leaves room for.
    shares_buffer: Callable[[Any], bool] = lambda _: False
    # Of prefill-decode disaggregation. None: it is refused.
    transfers: TransferAnswers | None = None
    # The StateWatch that follows states of linear-attention layers. None: they are not checked.
    states: Callable[[], type[Any]] | None = None
    # Allocators with parts, by class name, beside SWATokenToKVPoolAllocator.
    allocator_parts: Mapping[str, AllocatorParts] = field(default_factory=dict)


def found_later(family: str, module: str, name: str) -> Callable[[], Any]:
    """What `module` of `family` has as `name`. It imports SGLang, so it is imported when it is asked for."""
    return lambda: getattr(import_module(f"{family}.{module}"), name)


@cache
def release() -> Release:
    """The installed release's family. Raises KeyError for a release that `check_sglang` refuses."""
    import sglang.version

    version = sglang.version.__version__
    untested = is_set(UNTESTED_ENV) and version not in FAMILIES
    family = NEWEST_FAMILY if untested else FAMILIES[version]
    return import_module(f".{family}", __package__).RELEASE
