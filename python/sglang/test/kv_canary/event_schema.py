"""Validates events against the package's JSON Schema: as it is, and without fields that it does not describe."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import jsonschema

import sglang_kv_canary

SCHEMA_FILE = Path(sglang_kv_canary.__path__[0]) / "reports" / "events.schema.json"
# What a schema whose properties can be checked one by one has at the top.
NO_FIELD_DEPENDS_ON_ANOTHER = {
    "$schema",
    "$id",
    "$defs",
    "title",
    "description",
    "type",
    "required",
    "properties",
    "additionalProperties",
}


@cache
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA_FILE.read_text())


@cache
def kinds() -> tuple[str, ...]:
    """The kinds of events that the schema describes."""
    return tuple(rule["if"]["properties"]["event"]["const"] for rule in schema()["allOf"])


def problems_of(event: dict[str, Any]) -> list[str]:
    """What is wrong with `event`, undescribed fields included."""
    kind = event.get("event")
    if kind not in kinds():
        return [f"{kind}: {e.json_path}: {e.message}" for e in _whole().iter_errors(event)]
    found = [*_problems_of_names(kind, frozenset(event))]
    for name in event.keys() & _strict(kind).schema["properties"].keys():
        found += _problems_of_field(kind, name, json.dumps(event[name]))
    return [f"{kind}: {problem}" for problem in found]


# Most fields of an event are those of an earlier one.


@cache
def _problems_of_names(kind: str, names: frozenset[str]) -> tuple[str, ...]:
    strict = _strict(kind)
    described = dict.fromkeys(strict.schema["properties"], True)
    of_names = strict.evolve(schema={**strict.schema, "properties": described})
    errors = of_names.iter_errors(dict.fromkeys(names))
    return tuple(f"{error.json_path}: {error.message}" for error in errors)


@lru_cache(1 << 14)
def _problems_of_field(kind: str, name: str, value: str) -> tuple[str, ...]:
    strict = _strict(kind)
    of_field = strict.evolve(schema=strict.schema["properties"][name])
    errors = of_field.iter_errors(json.loads(value))
    return tuple(f"$.{name}{error.json_path[1:]}: {error.message}" for error in errors)


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
    if not whole.keys() <= NO_FIELD_DEPENDS_ON_ANOTHER:
        raise ValueError(f"fields are checked one by one, but the schema has {sorted(whole)}")
    return jsonschema.Draft202012Validator(whole)


def _close(part: Any) -> None:
    if isinstance(part, dict):
        if "properties" in part:
            part["additionalProperties"] = False
        for below in part.values():
            _close(below)
