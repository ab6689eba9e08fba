"""Processes of SGLang that are forked from one that has imported it: milliseconds instead of ten seconds each.

`host.py` is that one. It has loaded no plugin, started no thread and read no environment but what imports read.
"""

from .processes import FreshServer, WarmProcess, WarmProcesses, shared

__all__ = ["FreshServer", "WarmProcess", "WarmProcesses", "shared"]
