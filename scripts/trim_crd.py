"""Write the part of a CRD's schema that checks some manifests: `python scripts/trim_crd.py CRD.yaml
MANIFESTS.yaml… > tests/data/dgd_schema.json`.

The schema of a DynamoGraphDeployment has 1.6 MB, nearly all of it Kubernetes' own pods. What the
manifests use is kept as it is; of other fields only the names, so that a field that does not exist
is still found. Descriptions and CEL rules are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
_KEPT = ("type", "enum", "pattern", "required", "anyOf", "minimum", "maximum", "maxItems", "format")


def trim(schema: Schema, examples: list[Any]) -> Schema:
    """Return the schema of what the examples have, and the names of what they have not."""
    out: Schema = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
    objects = [example for example in examples if isinstance(example, dict)]
    if properties := schema.get("properties"):
        out["properties"] = {
            name: trim(part, found) if (found := [o[name] for o in objects if name in o]) else {}
            for name, part in properties.items()
        }
        out["additionalProperties"] = False  # an API server drops such a field, or refuses it
    elif isinstance(values := schema.get("additionalProperties"), dict):
        out["additionalProperties"] = trim(values, [v for o in objects for v in o.values()])
    if items := schema.get("items"):
        entries = [e for example in examples if isinstance(example, list) for e in example]
        out["items"] = trim(items, entries)
    return out


def main() -> None:
    crd, *files = map(Path, sys.argv[1:])
    definition = yaml.safe_load(crd.read_text())
    group, kind = definition["spec"]["group"], definition["spec"]["names"]["kind"]
    objects = [o for file in files for o in yaml.safe_load_all(file.read_text())]
    schemas = {}
    for version in definition["spec"]["versions"]:
        name = f"{group}/{version['name']}"
        examples = [o for o in objects if o["kind"] == kind and o["apiVersion"] == name]
        if examples:
            schema = trim(version["schema"]["openAPIV3Schema"], examples)
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[name] = schema
    json.dump(schemas, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
