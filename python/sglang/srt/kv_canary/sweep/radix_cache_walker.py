"""Lists the slots that the prefix cache holds, with positions and predecessors, for the sweep.

The tree belongs to the scheduler thread and changes between two steps. So a pass is a depth-first walk that remembers
keys, not nodes. Each chunk looks up its nodes in the current tree, and reads their slots immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CanaryStartupError
from ..record import PREV_ANCHOR, PREV_UNREACHABLE
from .chunk import Chunk, Gatherer, RadixCacheWalkResult, WalkedNode, cut, refuse_limits
from .out_of_cache import is_out_of_cache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

__all__ = [
    "ONE_FIELD",
    "NamespaceOf",
    "RadixCacheWalker",
    "UnsupportedRadixCacheError",
]

# The namespace in a key of the tree. Most releases have LoRA id and cache salt in one field.
NamespaceOf = Callable[[Any], str | None]
ONE_FIELD: NamespaceOf = attrgetter("extra_key")

# Children listed at once, at most about 0.2 ms. Only a prefix cache with a huge fan-out has more.
_KEYS_PER_SLICE = 8_192


class UnsupportedRadixCacheError(CanaryStartupError):
    """A prefix cache whose slots the sweep cannot list."""


class RadixCacheWalker:
    """One pass over a prefix cache, in chunks, while the tree changes between them.

    A chunk lists only slots that the tree holds at the time of the call. Slots that stay in the tree during the whole
    pass are listed at least once, except below nodes that are merged in that time
    (SGLANG_OPT_SWA_RADIX_CACHE_COMPACT). A flush ends the pass. Chunk caches hold nothing.

    `unlocked_only` skips nodes that a request has locked. `swa_resident_only` skips nodes whose SWA slots are freed;
    in a tree without SWA every node counts as resident.

    CUDA: if the full-to-SWA mapping will translate the result, call this on the schedule stream. The scheduler
    allocates and frees on that stream, and the mapping changes there.
    """

    lists_at_once = False

    def __init__(
        self,
        radix_cache: BasePrefixCache,
        unlocked_only: bool,
        swa_resident_only: bool,
        namespace_of: NamespaceOf = ONE_FIELD,
    ) -> None:
        """Raises UnsupportedRadixCacheError for a cache class whose slots cannot be listed."""
        self._cache = unwrap(radix_cache)
        self._view = _view_of(self._cache)
        knows_anchors = self._view is None or self._view.knows_anchors
        self._namespace_of = namespace_of if knows_anchors else _no_namespace
        self._first = PREV_ANCHOR if knows_anchors else PREV_UNREACHABLE
        self._unlocked_only = unlocked_only
        self._tombstone = self._view.swa_tombstone if self._view and swa_resident_only else None
        self.device = device_of(self._cache)
        self._gatherer = Gatherer(self.device)
        self._chunks = 0
        self._root = self._cache.root_node if self._view else None
        self._frames = [_Frame(self._root, 0, 0, None, 0)] if self._view else []

    def next_chunk(
        self, max_slots: int | None = None, max_us: float | None = None
    ) -> RadixCacheWalkResult | None:
        """The next slots, or None after the end of the pass.

        Stops at `max_slots` slots, which may cut a node, and after about `max_us` microseconds of host time (at least
        one node). A chunk may be empty before the end of the pass. None means no limit. Raises ValueError for limits
        that are not positive.
        """
        refuse_limits(max_slots, max_us)
        self._forget_what_moved()
        if not self._frames:
            return None
        self._chunks += 1
        chunk = Chunk(self._chunks, max_slots, max_us)
        self._fill(chunk)
        return self._gatherer.gather(chunk)

    def refuse_pages_not_of(self, stride: int) -> None:
        """Raises UnsupportedRadixCacheError unless the tree's pages hold slots of `stride` tokens whole."""
        refuse_pages_not_of(self._cache, stride)

    def empty_result(self) -> RadixCacheWalkResult:
        """A chunk with n = 0."""
        return RadixCacheWalkResult.empty(self.device)

    def _forget_what_moved(self) -> None:
        """Drop frames that cannot be continued: all frames after a flush, and those of merged nodes."""
        if not self._frames:
            return
        if self._cache.root_node is not self._root:
            self._frames.clear()
        elif self._view.merges_nodes:
            ends = _ends_on_path(self._frames[-1].node, self._root)
            moved = (i for i, f in enumerate(self._frames) if ends.get(f.node) != f.end)
            del self._frames[next(moved, len(self._frames)) :]

    def _fill(self, chunk: Chunk) -> None:
        """Depth first, parents before children. The tree does not change during this call."""
        while self._frames:
            frame = self._frames[-1]
            if frame.keys is None:
                frame.list_keys()
            elif not frame.keys:
                self._frames.pop()
            else:
                # `get`: SGLang's children are defaultdicts, and [] would grow the tree.
                node = frame.node.children.get(frame.keys[-1])
                gone = node is None or is_out_of_cache(node)
                value = None if gone else self._view.value(node)
                if (
                    value is None
                ):  # evicted or dropped since, or only on the host, as are all nodes below
                    self._leave(frame)
                else:
                    self._visit(chunk, frame, node, value)
            if self._gatherer.is_over(chunk):
                return

    def _visit(self, chunk: Chunk, frame: _Frame, node: Any, value: torch.Tensor) -> None:
        """Takes a node's slots, as many as the chunk has room for. Descends once all are taken."""
        end, tail = frame.end + value.numel(), None
        first = max(frame.end, frame.resume)
        if first < end and self._is_wanted(node):
            stop = min(end, first + chunk.room)
            prev = self._prev_of(chunk, frame, value, first)
            piece = cut(value, first - frame.end, stop - frame.end)
            walked = WalkedNode(self._namespace_of(node.key), node.id, self._view.lock(node))
            chunk.add(walked, piece, first, prev)
            if stop < end:
                frame.resume = stop
                return
            tail = chunk.num_slots - 1
        resume = frame.resume
        self._leave(frame)
        if node.children:
            self._frames.append(_Frame(node, end, resume, tail, chunk.serial))

    def _leave(self, frame: _Frame) -> None:
        """Finish the frame's current key. An exhausted frame is dropped immediately: chains may be deep."""
        frame.keys.pop()
        frame.resume = frame.floor
        if not frame.keys:
            self._frames.pop()

    def _is_wanted(self, node: Any) -> bool:
        if self._unlocked_only and self._view.lock(node) > 0:
            return False
        return self._tombstone is None or not self._tombstone(node)

    def _prev_of(self, chunk: Chunk, frame: _Frame, value: torch.Tensor, first: int) -> int:
        """Reference (see Chunk) to the predecessor of position `first` of the frame's current node."""
        if first > frame.end:
            offset = first - frame.end
            return chunk.add_outside(value[offset - 1 : offset])
        if frame.node is self._root:
            return self._first
        if frame.tail is None or frame.tail_chunk != chunk.serial:
            frame.tail = self._outside_tail(chunk, frame.node)
            frame.tail_chunk = chunk.serial
        return frame.tail

    def _outside_tail(self, chunk: Chunk, parent: Any) -> int:
        value = self._view.value(parent)
        if value is None or (self._tombstone is not None and self._tombstone(parent)):
            return PREV_UNREACHABLE
        return chunk.add_outside(value[-1:])


class _Frame:
    """A node whose children are still to be visited. A key stays valid when its child is split or evicted."""

    __slots__ = (
        "_count",
        "_last",
        "_listed",
        "_listing",
        "_slice",
        "end",
        "floor",
        "keys",
        "node",
        "resume",
        "tail",
        "tail_chunk",
    )

    def __init__(self, node: Any, end: int, floor: int, tail: int | None, tail_chunk: int) -> None:
        self.node = node
        self.end = (
            end  # position after the node's last slot; a split of the node does not change it
        )
        self.floor = floor  # for every key, positions before this one have been yielded
        self.resume = floor  # the same for the current key: where the budget cut it
        self.tail = tail  # reference to the node's last slot, in the chunk `tail_chunk` only
        self.tail_chunk = tail_chunk
        # Keys of the children, the current one last; None while they are being listed.
        is_wide = len(node.children) > _KEYS_PER_SLICE
        self.keys: list[Any] | None = None if is_wide else list(node.children)
        self._listing: Any = None
        self._slice = 0

    def list_keys(self) -> None:
        """List a slice of many keys. If the children change during this, start again with longer slices."""
        children = self.node.children
        # What comes in is last. It is a new node, even if its key was there before.
        count, last = len(children), next(reversed(children.values()), None)
        if self._listing is None or count != self._count or last is not self._last:
            self._slice = 2 * self._slice or _KEYS_PER_SLICE
            self._listed, self._listing, self._count, self._last = [], iter(children), count, last
        expected = min(len(self._listed) + self._slice, count)
        try:
            self._listed += islice(self._listing, self._slice)
        except RuntimeError:  # keys have been replaced
            self._listed.clear()
        if len(self._listed) < expected:
            self._listing = None  # what came and went has moved the others, and some were missed
        elif expected == count:
            self.keys, self._listing, self._last = self._listed, None, None


@dataclass(frozen=True, slots=True)
class _TreeView:
    """Where one family of trees keeps the node data that the walk reads."""

    value: Callable[[Any], torch.Tensor | None]  # device slots, None when evicted to the host
    lock: Callable[[Any], int]  # requests that use the node
    swa_tombstone: Callable[[Any], bool] | None = None  # None: the tree has no SWA
    merges_nodes: bool = False
    # Whether chains start from the anchors of their nodes' keys. Streaming sessions of trees with a core may put the KV
    # of a turn under the key of a later one
    knows_anchors: bool = True


def _radix_view(cache: Any) -> _TreeView:
    return _TreeView(attrgetter("value"), attrgetter("lock_ref"))


def _mamba_view(cache: Any) -> _TreeView:
    return _TreeView(attrgetter("value"), attrgetter("full_lock_ref"))


def _swa_view(cache: Any) -> _TreeView:
    from sglang.srt.environ import envs

    return _TreeView(
        attrgetter("value"),
        attrgetter("full_lock_ref"),
        attrgetter("swa_tombstone"),
        merges_nodes=envs.SGLANG_OPT_SWA_RADIX_CACHE_COMPACT.get(),
    )


def _unified_view(cache: Any) -> _TreeView:
    """From 0.5.17 on the nodes belong to the cache's core."""
    if hasattr(cache, "tree_core"):
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        components = cache.tree_core.components_by_type
    else:
        from sglang.srt.mem_cache.unified_cache_components import ComponentType

        components = cache.tree_components
    full, swa = int(ComponentType.FULL), int(ComponentType.SWA)
    has_swa = ComponentType.SWA in components
    return _TreeView(
        lambda node: node.component_data[full].value,
        lambda node: node.component_data[full].lock_ref,
        (lambda node: node.component_data[swa].value is None) if has_swa else None,
        knows_anchors=not hasattr(cache, "tree_core"),
    )


def _no_namespace(_: Any) -> None:
    return None


# By qualified name, so that only the tree in use is imported. Subclasses follow their base class.
_VIEWS: dict[str, Callable[[Any], _TreeView | None]] = {
    "sglang.srt.mem_cache.radix_cache.RadixCache": _radix_view,
    "sglang.srt.mem_cache.swa_radix_cache.SWARadixCache": _swa_view,
    "sglang.srt.mem_cache.mamba_radix_cache.MambaRadixCache": _mamba_view,
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache": _unified_view,
    "sglang.srt.mem_cache.chunk_cache.ChunkCache": lambda cache: None,
}
_REFUSED: dict[str, str] = {
    "sglang.srt.mem_cache.radix_cache_cpp.RadixCacheCpp": (
        "its C++ nodes cannot be listed from Python; unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"
    ),
}
_WRAPPER = "sglang.srt.session.streaming_session.StreamingSession"
_CORE_WITH_NODES = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore"


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def unwrap(cache: Any) -> Any:
    """A streaming session wraps a tree. The slots that it keeps besides belong to no prefix."""
    while _name(type(cache)) == _WRAPPER:
        cache = cache.inner
    return cache


def lists_at_once(cache: Any) -> bool:
    """Whether `cache` has a core whose nodes Python cannot visit, such as SGLang's in Rust. It lists all its slots."""
    core = getattr(unwrap(cache), "tree_core", None)
    return core is not None and all(_name(cls) != _CORE_WITH_NODES for cls in type(core).__mro__)


def device_of(cache: Any) -> torch.device:
    """Where its slots are. Some caches have no allocator, and others do not say it themselves."""
    own = getattr(cache, "device", None)
    return torch.device(cache.token_to_kv_pool_allocator.device if own is None else own)


def _view_of(cache: Any) -> _TreeView | None:
    """The view for `cache`. None for a cache that holds no prefixes."""
    for cls in type(cache).__mro__:
        if _name(cls) in _REFUSED:
            raise unsupported(cache, _REFUSED[_name(cls)])
        if _name(cls) in _VIEWS:
            return _VIEWS[_name(cls)](cache)
    known = ", ".join(sorted(name.rpartition(".")[2] for name in _VIEWS))
    raise unsupported(cache, f"the sweep knows {known} and their subclasses")


def refuse_pages_not_of(cache: Any, stride: int) -> None:
    """Raises UnsupportedRadixCacheError unless pages of `cache` hold slots of `stride` tokens whole."""
    page_size = cache.page_size
    if page_size % stride:
        raise unsupported(
            cache,
            f"the model's pools have slots that stand for {stride} tokens, and its pages of {page_size} cut them",
        )


def unsupported(cache: Any, why: str) -> UnsupportedRadixCacheError:
    return UnsupportedRadixCacheError(
        f"kv-canary cannot sweep the prefix cache {type(cache).__qualname__}: {why}, "
        "or start without --kv-canary-sweep-interval"
    )


def _ends_on_path(node: Any, root: Any) -> dict[Any, int]:
    """Position after the last slot of each node from `root` down to `node`."""
    path: list[Any] = []
    while node is not root:
        path.append(node)
        node = node.parent
    ends, end = {root: 0}, 0
    for node in reversed(path):
        end += node.value.numel()
        ends[node] = end
    return ends
