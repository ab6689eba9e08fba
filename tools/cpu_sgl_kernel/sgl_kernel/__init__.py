"""Lets SGLang's CPU engine start without sgl_kernel, of which no CPU build is published.

SGLang 0.5.12.post1 imports `sgl_kernel.kvcacheio` on every CPU start, before plugins load, and calls none of it there.
Newer releases also import CPU kernels by name, `*_cpu`, and call none of them with the backends used here. Only for
machines without a GPU: elsewhere use the real sgl_kernel.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs the real sgl_kernel; "
            "here only the stand-in from tools/cpu_sgl_kernel is installed"
        )

    unavailable.__name__ = name
    return unavailable
