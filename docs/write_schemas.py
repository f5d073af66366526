"""Writes the JSON schemas of the records from their dataclasses: ``python docs/write_schemas.py``, when a
record changes.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

from structattn.typed_records import typed_fields
from structattn_lab.records import (
    CachesRecord,
    ComparisonRecord,
    FitsRecord,
    MupRecord,
    RunRecord,
    ScoreRecord,
    SweepRecord,
)

FOLDER = Path(__file__).parent / "schemas"
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SIGNATURE = {"description": "SHA-256 of all other bytes of the file.", "type": "string"}


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of each file by its name."""
    found = {
        "run.json": json_schema(RunRecord),
        "scores.json": json_schema(ScoreRecord),
        "results.json": json_schema(ComparisonRecord),
        "fits.json": json_schema(FitsRecord),
        "caches.json": json_schema(CachesRecord),
        "mup.json": json_schema(MupRecord),
        "sweep.json": json_schema(SweepRecord),
    }
    for name in ("run.json", "scores.json"):
        found[name]["properties"]["signature"] = _SIGNATURE
    return found


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what ``read_as`` accepts for a dataclass; descriptions are those of
    the docstrings.
    """
    definitions: dict[str, Any] = {}
    root = _object_schema(kind, definitions)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": kind.__name__}
    return {**head, **root, "$defs": dict(sorted(definitions.items()))}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(arg, definitions) for arg in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is tuple and args[-1] is ...:
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is tuple:
        entries = [_schema(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": entries, "minItems": len(args), "maxItems": len(args)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if dataclasses.is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object_schema(typing.cast(type, kind), definitions)
        return {"$ref": f"#/$defs/{name}"}
    return {"type": "null" if kind is type(None) else _NAMES[kind]}


def _object_schema(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    fields, about = typed_fields(kind), _descriptions(kind)
    return {
        "description": about[""],
        "type": "object",
        "properties": {
            name: ({"description": about[name]} if name in about else {}) | _schema(field, definitions)
            for name, (field, _) in fields.items()
        },
        "required": [name for name, (_, is_required) in fields.items() if is_required],
        "additionalProperties": False,
    }


def _descriptions(kind: type) -> dict[str, str]:
    """The descriptions of fields in the docstrings of a dataclass and its bases; that of the dataclass under
    an empty name.
    """
    found = {}
    for own in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        head, _, listing = inspect.cleandoc(own.__doc__ or "").partition("\n\nAttributes:\n")
        found[""] = " ".join(head.split())
        for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.+(?:\n {5,}.+)*)", listing, flags=re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


if __name__ == "__main__":
    for name, schema in schemas().items():
        (FOLDER / name).write_text(json.dumps(schema, indent=1) + "\n")
