"""The end-to-end harness for your own tests: real engines with tiny models, traffic, and fault injection."""

from .e2e import CanaryE2EBase
from .mode_config import MODES, ModeConfig
from .serving import CanaryEngine, CanaryServer, Injection, Serving
from .traffic import TrafficReport, TrafficShape, drive

__all__ = [
    "MODES",
    "CanaryE2EBase",
    "CanaryEngine",
    "CanaryServer",
    "Injection",
    "ModeConfig",
    "Serving",
    "TrafficReport",
    "TrafficShape",
    "drive",
]
