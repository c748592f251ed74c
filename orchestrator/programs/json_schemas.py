"""JSON Schemas of what verbs print with `--json`, made from the types of these outputs."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from orchestrator.client.outline.outline import Outline
from orchestrator.core.codec import Json
from orchestrator.core.errors import UserError
from orchestrator.core.jobdir.status_file import FLATTENED_FIELDS, Status
from orchestrator.core.status_types import ReportedNumber
from orchestrator.programs import json_types
from orchestrator.spec.load import json_schema

OUTPUTS: dict[str, Any] = {
    "submit": json_types.Submitted,
    "run": json_types.Submitted,
    "status": list[Status],
    "why": json_types.Why,
    "wait": json_types.Outcome,
    "stacks": json_types.Stacks,
    "goodput": json_types.Goodput,
    "checkpoints": list[json_types.Save],
    "folder": json_types.Folders,
    "plan": Outline,
    "check": list[json_types.Finding],
    "nodes": list[json_types.Host],
}


class _Schemas(GenerateJsonSchema):
    """pydantic's schema generator, with a schema for `Measured`."""

    def is_instance_schema(self, schema: Any) -> Json:
        """Return the schema of a number that may be nan or infinite, as a text."""
        if schema["cls"] is not ReportedNumber:
            return super().is_instance_schema(schema)
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}


def make_schema(verb: str | None) -> Json:
    """Return the JSON Schema of a verb's JSON output; for None that of job files."""
    if verb is None:
        return json_schema()
    if verb not in OUTPUTS:
        fix = f"choose one of {', '.join(sorted(OUTPUTS))}; without a name it prints the schema of job files"
        raise UserError(f"{verb!r} has no JSON output", "orch schema", fix)
    config = ConfigDict(arbitrary_types_allowed=True) if verb == "status" else None
    schema = TypeAdapter(OUTPUTS[verb], config=config).json_schema(schema_generator=_Schemas)
    if verb == "status":
        _flatten(schema["$defs"])
    if verb == "plan":  # its JSON omits the exit code
        schema["properties"].pop("exit_code")
        schema["required"].remove("exit_code")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _flatten(types: Json) -> None:
    """Put the keys of a status's parts where its JSON has them."""
    parts = {name: types.pop(part.__name__)["properties"] for name, part in FLATTENED_FIELDS.items()}
    for holder in (types["Status"], types["RankStatus"]):
        properties, holder["properties"] = holder["properties"], {}
        for key, schema in properties.items():
            holder["properties"].update(parts.get(key, {key: schema}))
            holder["required"] += parts.get(key, ())
