"""`kv-canary selftest`: every check on a scratch pool of this machine's device, without a server."""

from .checks import Check, all_checks
from .run import Backend, Outcome, run_checks

__all__ = ["Backend", "Check", "Outcome", "all_checks", "run_checks"]
