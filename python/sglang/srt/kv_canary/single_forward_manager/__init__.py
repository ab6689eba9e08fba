"""One forward: its phases, its plan, its launches."""

from .late_content import LateContent, content_can_wait
from .manager import SingleForwardManager
from .phases import Phase, PhaseTracker

__all__ = ["LateContent", "Phase", "PhaseTracker", "SingleForwardManager", "content_can_wait"]
