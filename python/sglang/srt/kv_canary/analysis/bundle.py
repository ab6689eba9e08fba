"""Packs event files and what else an issue needs into one archive."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..reports.event_loader import (
    WHOLE_FILE,
    Event,
    EventReading,
    Problem,
    Watch,
    is_event_file_name,
    load_events,
)
from .output import PRIVATE, check_output, whole_file
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
    """What the archive holds. `lines_left_out`: those that are no events. `files_left_out`: those that are not read."""

    created: str  # UTC
    token_ids: bool
    names: bool
    bundle: int = VERSION
    events: int = 0
    lines_left_out: int = 0
    files_left_out: list[str] = field(default_factory=list)
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
    check_output(output, [path])
    manifest = Manifest(
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        token_ids=not redaction.token_ids,
        names=not redaction.names,
    )
    reading = EventReading(path, watch)
    with TemporaryDirectory() as scratch:
        copies: list[Path] = []
        for file, events in reading.files():
            copies.append(Path(scratch, _copy_name(file, copies)))
            manifest.events += _copied(events, copies[-1], redaction)
        left_out = reading.problems
        manifest.files_left_out = [each.file.name for each in left_out if each.line == WHOLE_FILE]
        manifest.lines_left_out = len(left_out) - len(manifest.files_left_out)
        packed = {"report.txt": _report(Path(scratch), left_out), **texts}
        with whole_file(output, PRIVATE) as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            for copy in copies:
                _add(archive, f"events/{copy.name}", copy.read_bytes(), manifest)
            for name, text in packed.items():
                _add(archive, name, text.encode("utf-8", "backslashreplace"), manifest)
            listed = json.dumps(asdict(manifest), indent=2) + "\n"
            _put(archive, MANIFEST, listed.encode())
    return manifest


def _copy_name(file: Path, copies: Sequence[Path]) -> str:
    """Name of an unpacked copy: that of an event file, and none of `copies` has it."""
    name = file.name.removesuffix(".gz")
    name = name if is_event_file_name(name) else f"{name}.jsonl"
    is_taken = any(copy.name == name for copy in copies)
    return f"{len(copies) + 1}-{name}" if is_taken else name


def _report(folder: Path, left_out: Iterable[Problem]) -> str:
    """About the copies in `folder`. It says what of the originals is not in them, and quotes nothing of that."""
    no_event = "left out of this archive: no event"
    problems = tuple(p if p.line == WHOLE_FILE else replace(p, what=no_event) for p in left_out)
    loaded = replace(load_events(folder), problems=problems)
    overview = Overview.of({"": loaded})
    lines = as_text(overview, most_causes=MOST_CAUSES, width=WIDTH, colour=False)
    return "\n".join(lines) + "\n"


def _copied(events: Iterable[Event], copy: Path, redaction: Redaction) -> int:
    """Writes an unpacked copy of an event file, redacted. Returns the number of its events."""
    number = 0
    with copy.open("w") as out:
        for event in events:
            number += 1
            out.write(json.dumps(redaction.apply(event.fields)) + "\n")
    return number


def _add(archive: tarfile.TarFile, name: str, data: bytes, manifest: Manifest) -> None:
    digest = hashlib.sha256(data).hexdigest()
    manifest.files.append({"name": name, "bytes": len(data), "sha256": digest})
    _put(archive, name, data)


def _put(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(f"{FOLDER}/{name}")
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))
