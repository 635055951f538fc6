"""A file of a user's own fields that is merged into the pod template: annotations, volumes, a runtime class, host network, limits of CPU.

Tables are merged field by field, and null removes a field (RFC 7386, JSON merge patch). Of lists whose entries have a ``name``, such as
containers, volumes and env, entries of one name are merged, as kubectl's strategic merge does; other lists are appended. Fields without
which a fleet cannot form are refused.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from phalanx.launch.engines.tools import EngineError
from phalanx.run.directory.files import read_small

_OWNED = (
    ("metadata", "labels", "phalanx.run/name"),
    ("spec", "restartPolicy"),
    ("spec", "containers", "agent", "command"),
    ("spec", "containers", "agent", "startupProbe"),
    ("spec", "containers", "agent", "livenessProbe"),
)
"""Fields that a patch may not name; entries of lists by their names."""


def read_pod_patch(path: Path) -> dict[str, object]:
    """Read ``launch.pod_patch``. Raises ``EngineError`` naming what is wrong with it."""
    try:
        text = read_small(path.expanduser(), follow=True).decode()
        patch: object = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"launch.pod_patch: cannot read {path}: {error}") from error
    if not isinstance(patch, dict) or not patch.keys() <= {"metadata", "spec"}:
        raise EngineError(
            f"launch.pod_patch: {path} has other fields than metadata and spec of a pod template"
        )
    for owned in _OWNED:
        if _has(patch, owned):
            raise EngineError(
                f"launch.pod_patch: {path} changes {'.'.join(owned)}, which is the launcher's; take it out"
            )
    return patch


def merged(table: Mapping[str, object], patch: Mapping[str, object]) -> dict[str, object]:
    """Return a table of a manifest with a patch merged into it."""
    fields = dict(table)
    for key, part in patch.items():
        if part is None:
            fields.pop(key, None)
        else:
            fields[key] = _merged(fields.get(key), part)
    return fields


def _merged(value: object, patch: object) -> object:
    if isinstance(value, dict) and isinstance(patch, dict):
        return merged(value, patch)
    if not isinstance(value, list) or not isinstance(patch, list):
        return patch
    named = {entry["name"]: entry for entry in patch if isinstance(entry, dict) and "name" in entry}
    kept = [
        merged(entry, named.pop(entry["name"]))
        if isinstance(entry, dict) and entry.get("name") in named
        else entry
        for entry in value
    ]
    unnamed = [entry for entry in patch if not isinstance(entry, dict) or "name" not in entry]
    return [*kept, *unnamed, *named.values()]


def _has(value: object, path: tuple[str, ...]) -> bool:
    if not path:
        return True
    if isinstance(value, list):
        return any(
            _has(entry, path[1:])
            for entry in value
            if isinstance(entry, dict) and entry.get("name") == path[0]
        )
    return isinstance(value, dict) and path[0] in value and _has(value[path[0]], path[1:])
