"""The weights with which each forward of a model runner ran."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from .safe_text import safe_text

MAX_VERSIONS = 4096  # remembered; older ones are unknown
MAX_NAME = 1024  # characters of a name in an event


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """The weights between two updates."""

    number: int  # 0: the weights of the start
    name: str | None = None  # SGLang's weight_version, if one was given

    def text(self) -> str:
        name = "" if self.name is None else f' "{safe_text(self.name)}"'
        return f"version {self.number}{name}"

    def as_dict(self) -> dict:
        name = None if self.name is None else self.name[:MAX_NAME]
        return {"number": self.number, "name": name}


class WeightHistory:
    """The last MAX_VERSIONS weight versions of one model runner."""

    def __init__(self, name: str | None = None, max_versions: int = MAX_VERSIONS) -> None:
        self._max_versions = max_versions
        self._since = [0]  # last forward before each version, ascending
        self._versions = [WeightVersion(0, name)]

    def note_update(self, forward: int, name: str | None) -> None:
        """The weights change after `forward`. Updates without a forward in between count as one."""
        newest = self._versions[-1]
        if forward <= self._since[-1]:
            self._versions[-1] = WeightVersion(newest.number, newest.name if name is None else name)
            return
        self._since.append(forward)
        self._versions.append(WeightVersion(newest.number + 1, name))
        if len(self._versions) > self._max_versions:
            del self._since[0], self._versions[0]

    def at(self, forward: int) -> WeightVersion | None:
        """The version with which `forward` (numbered from 1) ran; None if no longer known."""
        index = bisect_left(self._since, forward) - 1
        return None if index < 0 else self._versions[index]


def describe_read(written: WeightVersion | None, read: WeightVersion | None) -> str:
    """Both sides of a read, in words."""
    return f"written by {_text(written)}, read by {_text(read)}"


def _text(version: WeightVersion | None) -> str:
    return "a version not on record" if version is None else version.text()
