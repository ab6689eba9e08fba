"""Which paths of SGLang the canary covers, as printed by `kv-canary pools`. `refusals` lists what is refused."""

from __future__ import annotations

from dataclasses import dataclass

from ..pool_patcher.registry import Coverage
from .releases import release


@dataclass(frozen=True, slots=True)
class PathSupport:
    """One way in which SGLang computes, moves or frees KV."""

    name: str
    status: Coverage
    note: str = ""


def paths() -> tuple[PathSupport, ...]:
    """The paths of the installed release, refused ones last."""
    refused = (PathSupport(case.name, Coverage.REFUSED, case.why) for case in release().refusals())
    return (*release().served(), *refused)
