"""One forward: its phases, its plan, its launches."""

from .beside import BesideLayers
from .late_content import content_can_wait
from .late_head import head_can_wait
from .late_work import LateWork
from .manager import SingleForwardManager
from .phases import Phase, PhaseTracker

__all__ = [
    "BesideLayers",
    "LateWork",
    "Phase",
    "PhaseTracker",
    "SingleForwardManager",
    "content_can_wait",
    "head_can_wait",
]
