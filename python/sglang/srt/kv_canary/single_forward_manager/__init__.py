"""One forward: its phases, its plan, its launches."""

from sglang.srt.kv_canary.single_forward_manager.manager import SingleForwardManager
from sglang.srt.kv_canary.single_forward_manager.phases import Phase, PhaseTracker

__all__ = ["Phase", "PhaseTracker", "SingleForwardManager"]
