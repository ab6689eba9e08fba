"""Counts the bytes that a prefill server sends: those of KV, and those that the canary adds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_kv_canary.transfer.layout import TransferLayout
from sglang_kv_canary.transfer.notice import Notice

from . import nixl_transport
from .nixl_transport import Blocks

WIRE_FILE = "KV_CANARY_WIRE_FILE"  # a line for each part of a transfer: its name and bytes
KV, RECORDS, NOTICES, OTHERS = "kv", "records", "notices", "others"
_SENDS = "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager._transfer_data"
_to_wire = Notice.to_wire


def count_bytes() -> None:
    """A plugin: notes what SGLang, and the canary, give to the transport."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_SENDS, _note_transfer, HookType.BEFORE)
    nixl_transport.damage_in_transit(_note_blocks)
    Notice.to_wire = _note_notice


def _note_transfer(kv_manager: Any, _: str, blocks: Sequence[tuple[int, int, int]]) -> None:
    _note_blocks(kv_manager.kv_args, list(blocks))


def _note_blocks(args: Any, blocks: Blocks) -> Blocks:
    """Returns `blocks` as they are."""
    ranges = _ranges(args)
    sent: Counter[str] = Counter()
    for source, _, size in blocks:
        sent[next((part for part, p, n in ranges if p <= source < p + n), OTHERS)] += size
    _note(sent)
    return blocks


def _note_notice(notice: Notice) -> bytes:
    data = _to_wire(notice)
    _note({NOTICES: len(data)})
    return data


def _note(sent: dict[str, int]) -> None:
    with open(os.environ[WIRE_FILE], "a") as file:  # short lines of several threads stay whole
        file.write("".join(f"{part} {size}\n" for part, size in sent.items()))


def _ranges(args: Any) -> list[tuple[str, int, int]]:
    """(part, address, bytes) of the sender's buffers. Records are the state's last component, with a layout."""
    kv = zip(args.kv_data_ptrs, args.kv_data_lens, strict=True)
    found = [(KV, pointer, size) for pointer, size in kv]
    layouts = args.state_dim_per_tensor
    for i, (pointers, sizes) in enumerate(
        zip(args.state_data_ptrs, args.state_data_lens, strict=True)
    ):
        is_records = i == len(layouts) - 1 and TransferLayout.from_wire(layouts[i]) is not None
        part = RECORDS if is_records else KV
        found += [(part, pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
    return found


def bytes_sent(path: Path) -> Counter[str]:
    """Bytes of each part so far."""
    sent: Counter[str] = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        part, size = line.split()
        sent[part] += int(size)
    return sent
