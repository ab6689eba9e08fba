"""One forward: its phases, its plan, its launches."""

from .manager import SingleForwardManager
from .phases import Phase, PhaseTracker

__all__ = ["Phase", "PhaseTracker", "SingleForwardManager"]
