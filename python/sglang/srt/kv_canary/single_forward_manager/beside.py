"""What captured graphs may run on a second branch beside the layers."""

from __future__ import annotations

from enum import Enum


class BesideLayers(Enum):
    NOTHING = "nothing"
    CHECK = "TAIL's check of the prefixes"
    HEAD_AND_CHECK = "HEAD, then TAIL's check of the prefixes"
