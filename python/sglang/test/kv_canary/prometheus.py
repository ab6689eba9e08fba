"""Real Prometheus servers on loopback, and the Accept header of Prometheus 3 where there is no binary of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from .checkout import REPO

T = TypeVar("T")
FETCHED = REPO / ".prometheus"  # by `make prometheus`
REQUIRED = "KV_CANARY_REQUIRE_PROMETHEUS"
# What Prometheus 3.5.3 sends. The header of 2.42 has no `escaping`, for which prometheus_client writes underscores.
ACCEPT_OF_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PREFIX_IN = {2: "sglang_", 3: "sglang:"}  # how each major version stores SGLang's names
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Binaries:
    """The two programs of one release of Prometheus."""

    major: int
    prometheus: Path
    promtool: Path


def find_binaries(major: int) -> Binaries | None:
    """Those that `make prometheus` fetched, else those on PATH."""
    for folder in (str(FETCHED / str(major)), None):
        server, tool = (shutil.which(name, path=folder) for name in ("prometheus", "promtool"))
        if server and tool and _major_of(server) == major:
            return Binaries(major, Path(server), Path(tool))
    return None


def binaries(major: int = 2) -> Binaries:
    """`find_binaries`, or a skip, which KV_CANARY_REQUIRE_PROMETHEUS=1 turns into a failure."""
    found = find_binaries(major)
    if found is None:
        missing = f"no Prometheus {major} found; `make prometheus` fetches it where apt can"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing} ({REQUIRED}=1)")
        pytest.skip(missing)
    return found


def _major_of(server: str) -> int:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S)
    found = re.search(r"version (\d+)\.", done.stdout + done.stderr)
    return int(found[1]) if found else 0


class Prometheus:
    """A Prometheus that scrapes `target` ("host:port") every second and evaluates `rules`. A context manager."""

    def __init__(self, programs: Binaries, target: str, rules: Path) -> None:
        self._programs, self._target, self._rules = programs, target, rules
        self._port = 0

    def __enter__(self) -> Prometheus:
        self._folder = tempfile.TemporaryDirectory(prefix="kv_canary_prometheus_")
        folder = Path(self._folder.name)
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": [str(self._rules)],
            "scrape_configs": [
                {"job_name": "sglang", "static_configs": [{"targets": [self._target]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    str(self._programs.prometheus),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=log,
                cwd=folder,
            )
        try:
            self._port = self.wait_for(self._listening, "Prometheus listens")
            self.wait_for(self._ready, "Prometheus is ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        self._folder.cleanup()

    def _listening(self) -> int:
        found = re.search(r'"?Listening on"? .*address=127\.0\.0\.1:(\d+)', self._log.read_text())
        return int(found[1]) if found else 0

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=10):
                return True
        except OSError:
            return False

    def get(self, path: str, **params: str) -> Any:
        """`data` of the answer of the HTTP API; raises HTTPError where it refuses."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(params)}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of `expression`: dicts with `metric` (labels) and `value` (time, text)."""
        return self.get("query", query=expression)["result"]

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Labels of the firing alerts of this name."""
        alerts = self.get("alerts")["alerts"]
        return [
            a["labels"]
            for a in alerts
            if a["state"] == "firing" and a["labels"]["alertname"] == alert
        ]

    def wait_for(self, found: Callable[[], T], what: str) -> T:
        """What `found` returns once it is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            if value := found():
                return value
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(
                    f"timed out after {TIMEOUT_S:g} s: {what}\n{self._log.read_text()}"
                )
            time.sleep(0.2)


@contextmanager
def header_of_3(target: str) -> Iterator[str]:
    """An address that serves `target`'s metrics as they are served to Prometheus 3, to every client."""

    class Replay(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request = urllib.request.Request(
                f"http://{target}{self.path}", headers={"Accept": ACCEPT_OF_3}
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                body, kind = answer.read(), answer.headers["Content-Type"]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def scraping(major: int, target: str, rules: Path) -> Iterator[Prometheus]:
    """A running Prometheus `major` of `target`.

    Without a binary of 3, Prometheus 2 behind `header_of_3`, which is said in a warning.
    """
    programs = find_binaries(major)
    if programs is None and major == 3:
        message = "no Prometheus 3 found: its Accept header is replayed to Prometheus 2"
        warnings.warn(message, stacklevel=3)
        with header_of_3(target) as address, Prometheus(binaries(2), address, rules) as server:
            yield server
        return
    with Prometheus(programs or binaries(major), target, rules) as server:
        yield server
