"""The host's loops over tokens and launch arguments: in C where a compiler is, else in Python. And room for frames.

Data goes in, data comes out. It knows nothing of SGLang and of the canary but the words of a record. `twins` says what
each function does. Both do the same (`test_host_code.py`).
"""

from .compiled import begin_to_compile, wait_for_compiled
from .frame_room import with_room_for_frames
from .interface import HOST

__all__ = ["HOST", "begin_to_compile", "wait_for_compiled", "with_room_for_frames"]
