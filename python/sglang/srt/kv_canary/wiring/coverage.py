"""Which paths of SGLang the canary covers, as printed by `kv-canary pools`. `refusals` lists what is refused."""

from __future__ import annotations

from ..pool_patcher.registry import Coverage
from .path_support import PathSupport
from .releases import release


def paths() -> tuple[PathSupport, ...]:
    """The paths of the installed release, refused ones last."""
    refused = (PathSupport(case.name, Coverage.REFUSED, case.why) for case in release().refusals())
    return (*release().served(), *refused)
