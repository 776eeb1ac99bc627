"""The part of JSON Schema that open_api.json uses: check a value, and make values."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
TYPES: dict[str, Any] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: (
        isinstance(v, int | float) and not isinstance(v, bool) and float(v).is_integer()
    ),
}
KNOWN = {
    "$ref", "type", "const", "enum", "anyOf", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "items", "required", "properties", "additionalProperties",
    "maxProperties", "propertyNames", "description", "default",
}  # fmt: skip


class Schemas:
    """Schemas of one document, with its references."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def resolve(self, schema: Schema) -> Schema:
        assert set(schema) <= KNOWN, f"this reader does not know {set(schema) - KNOWN}"
        if "$ref" not in schema:
            return schema
        found: Any = self._document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return self.resolve(found)

    def holds(self, schema: Schema, value: Any) -> bool:
        schema = self.resolve(schema)
        kinds = schema.get("type", [])
        if kinds and not any(
            TYPES[k](value) for k in ([kinds] if isinstance(kinds, str) else kinds)
        ):
            return False
        if "const" in schema and value != schema["const"]:
            return False
        if "enum" in schema and value not in schema["enum"]:
            return False
        if "anyOf" in schema and not any(self.holds(choice, value) for choice in schema["anyOf"]):
            return False
        if TYPES["number"](value):
            return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
        if isinstance(value, str):
            return bool(
                schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
            )
        if isinstance(value, list):
            few = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
            return few and all(self.holds(schema.get("items", {}), item) for item in value)
        return not isinstance(value, dict) or self._holds_object(schema, value)

    def _holds_object(self, schema: Schema, value: dict[str, Any]) -> bool:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        if not set(schema.get("required", [])) <= set(value):
            return False
        if len(value) > schema.get("maxProperties", 1 << 30):
            return False
        for name, item in value.items():
            if "propertyNames" in schema and not name.isdecimal():  # the only pattern there is
                return False
            if name not in properties and others is False:
                return False
            if not self.holds(properties.get(name, others or {}), item):
                return False
        return True

    def make(self, schema: Schema, chance: random.Random) -> Any:
        """Return a value that holds; integers without a maximum stay below 200."""
        schema = self.resolve(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if "anyOf" in schema and "type" not in schema:
            return self.make(chance.choice(schema["anyOf"]), chance)
        kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
        low, high = schema.get("minimum", 0), schema.get("maximum", 199)
        if kind == "boolean":
            return chance.random() < 0.5
        if kind == "integer":
            return chance.choice([low, high, chance.randint(low, high)])
        if kind == "number":
            return chance.choice([low, high, chance.uniform(low, high)])
        if kind == "string":
            size = chance.randint(schema.get("minLength", 0), min(schema.get("maxLength", 20), 20))
            return "".join(chance.choice('abc é😀\n"\\{}') for _ in range(size))
        if kind == "array":
            size = chance.randint(schema.get("minItems", 0), min(schema.get("maxItems", 5), 5))
            return [self.make(schema["items"], chance) for _ in range(size)]
        return self._make_object(schema, chance)

    def _make_object(self, schema: Schema, chance: random.Random) -> dict[str, Any]:
        if "propertyNames" in schema:
            ids = chance.sample(range(200), chance.randint(0, 5))
            return {str(i): self.make(schema["additionalProperties"], chance) for i in ids}
        if "anyOf" in schema:
            branch = self.resolve(chance.choice(schema["anyOf"]))
            schema = {
                **schema,
                "required": [*schema.get("required", []), *branch.get("required", [])],
                "properties": {**schema.get("properties", {}), **branch.get("properties", {})},
            }
        return {
            name: self.make(item, chance)
            for name, item in schema.get("properties", {}).items()
            if name in schema.get("required", []) or chance.random() < 0.5
        }
