"""Packs event files and what else an issue needs into one archive."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..reports.event_loader import Problem, Watch, event_files, load_events, read_events
from .overview import Overview
from .redaction import Redaction
from .text import as_text

FOLDER = "kv-canary-bundle"  # in the archive
MANIFEST = "manifest.json"
VERSION = 1  # of the manifest
MOST_CAUSES = 200
WIDTH = 120


@dataclass(slots=True)
class Manifest:
    """What the archive holds. `lines_left_out`: those that are no events."""

    created: str  # UTC
    token_ids: bool
    names: bool
    bundle: int = VERSION
    events: int = 0
    lines_left_out: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)


def write_bundle(
    path: Path,
    output: Path,
    redaction: Redaction,
    texts: Mapping[str, str],
    watch: Watch | None = None,
) -> Manifest:
    """Packs the event files at `path`, a report about them, and `texts` by file name, into the archive `output`.

    Only its owner may read the archive. Raises FileNotFoundError without event files, and OSError.
    """
    manifest = Manifest(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        token_ids=not redaction.token_ids,
        names=not redaction.names,
    )
    files = event_files(path)
    with TemporaryDirectory() as scratch:
        copies = [_copied(file, Path(scratch), redaction, manifest, watch) for file in files]
        report = as_text(
            Overview.of({"": load_events(Path(scratch))}),
            most_causes=MOST_CAUSES,
            width=WIDTH,
            colour=False,
        )
        packed = {"report.txt": "\n".join(report) + "\n", **texts}
        with _private(output) as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for copy in copies:
                _add(archive, f"events/{copy.name}", copy.read_bytes(), manifest)
            for name, text in packed.items():
                _add(archive, name, text.encode("utf-8", "backslashreplace"), manifest)
            listed = json.dumps(asdict(manifest), indent=2) + "\n"
            _put(archive, MANIFEST, listed.encode())
    return manifest


def _copied(
    file: Path, folder: Path, redaction: Redaction, manifest: Manifest, watch: Watch | None
) -> Path:
    """An unpacked copy of an event file in `folder`, redacted."""
    copy = folder / file.name.removesuffix(".gz")
    lines: Iterable[Any] = read_events(file)
    with copy.open("w") as out:
        for found in lines if watch is None else watch(lines, file):
            if isinstance(found, Problem):
                manifest.lines_left_out += 1
                continue
            manifest.events += 1
            out.write(json.dumps(redaction.apply(found.fields)) + "\n")
    return copy


def _private(path: Path) -> io.BufferedWriter:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)  # it may have been there
    return os.fdopen(descriptor, "wb")


def _add(archive: tarfile.TarFile, name: str, data: bytes, manifest: Manifest) -> None:
    digest = hashlib.sha256(data).hexdigest()
    manifest.files.append({"name": name, "bytes": len(data), "sha256": digest})
    _put(archive, name, data)


def _put(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))
