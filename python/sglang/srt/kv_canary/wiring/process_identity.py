"""Names the process and deployment of an event file, for event files of many servers in one place."""

from __future__ import annotations

import os
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def process_identity(server_args: Any) -> dict[str, Any]:
    """JSON-ready: host, process, model and versions."""
    import sglang.version

    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "model": server_args.model_path,
        "served_model": server_args.served_model_name,
        "sglang_version": sglang.version.__version__,
        "canary_version": _canary_version(),
    }


def _canary_version() -> str | None:
    """None if the package runs from a source tree without installation."""
    try:
        return version("sglang-kv-canary")
    except PackageNotFoundError:
        return None
