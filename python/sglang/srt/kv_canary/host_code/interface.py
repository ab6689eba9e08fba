"""What the hot path uses. It is looked up at each use, because it is exchanged while the server runs."""

from __future__ import annotations

from types import ModuleType

from . import twins

NAMES = (
    "Hooked",
    "HostClock",
    "are_equal",
    "call_from",
    "caller",
    "carry_over",
    "chain_of_tokens",
    "count_pairs",
    "describe_pages",
    "fingerprint_rows",
    "keys_of_rows",
    "lacking",
    "launch",
    "launch_arguments",
    "leading",
    "look_up",
    "pack_lists",
    "pointers_to",
    "prepared_for",
)


class HostCode:
    """What `twins` has, or the compiled module."""

    __slots__ = (*NAMES, "in_c")

    def __init__(self) -> None:
        self.use(twins)

    def use(self, module: ModuleType) -> None:
        """Take all of it from `module`. A call under way goes on with what it has, objects stay what they are."""
        for name in NAMES:
            setattr(self, name, getattr(module, name))
        self.in_c = module is not twins


HOST = HostCode()
