"""Names that SGLang imports for host-device KV transfers; calling any of them raises."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.startswith("transfer_kv_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.kvcacheio.{name} needs the real sgl_kernel; "
            "here only the stand-in from tools/cpu_sgl_kernel is installed"
        )

    unavailable.__name__ = name
    return unavailable
