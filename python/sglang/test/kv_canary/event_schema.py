"""Validates events against the package's JSON Schema: as it is, and without fields that it does not describe."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

import sglang_kv_canary

SCHEMA_FILE = Path(sglang_kv_canary.__path__[0]) / "reports" / "events.schema.json"


@cache
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_FILE.read_text())


def kinds() -> tuple[str, ...]:
    """The kinds of events that the schema describes."""
    return tuple(rule["if"]["properties"]["event"]["const"] for rule in schema()["allOf"])


def problems_of(event: dict[str, Any]) -> list[str]:
    """What is wrong with `event`, undescribed fields included."""
    kind = event.get("event")
    checks = [_strict(kind) if kind in kinds() else _whole()]
    return [
        f"{kind}: {error.json_path}: {error.message}"
        for v in checks
        for error in v.iter_errors(event)
    ]


def problems_of_snapshot(content: dict[str, Any]) -> list[str]:
    """What is wrong with the object of a snapshot file."""
    whole = json.loads(SCHEMA_FILE.read_text())
    for part in whole["$defs"].values():
        _close(part)
    validator = jsonschema.Draft202012Validator(
        {"$ref": "#/$defs/snapshot_file", "$defs": whole["$defs"]}
    )
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]


@cache
def _whole() -> Any:
    return jsonschema.Draft202012Validator(schema())


@cache
def _strict(kind: str) -> Any:
    """For events of one kind: all fields at the top and in the objects below must be described."""
    whole = json.loads(SCHEMA_FILE.read_text())
    for part in whole["$defs"].values():
        _close(part)
    of_kind = whole["$defs"].pop(kind)
    whole["properties"] |= of_kind["properties"]
    whole["required"] += of_kind["required"]
    whole["additionalProperties"] = False
    del whole["allOf"]
    return jsonschema.Draft202012Validator(whole)


def _close(part: Any) -> None:
    if isinstance(part, dict):
        if "properties" in part:
            part["additionalProperties"] = False
        for below in part.values():
            _close(below)
