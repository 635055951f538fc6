"""Where a run's endpoints are: a small file of each in the run directory, in the form of Prometheus' file service discovery.

``RUN/targets/NAME.json`` is written by the process that listens and removed when it ends in good order; one that was killed leaves its file behind, and
Prometheus then says that the target is down, which is true. So ``file_sd_configs`` can read the folder of any number of runs as it is, and the coordinator
and ``phalanx ui`` serve the same lists over HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.directory.files import plain_json, read_small, write_atomically
from phalanx.run.directory.paths import RunDirectory

COORDINATOR = "coordinator"
_ATTEMPT = "__meta_phalanx_attempt"
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Target:
    """One endpoint."""

    address: str
    """ "host:port"."""
    run: str
    node: str
    """Empty for the coordinator."""
    attempt: int

    @property
    def entry(self) -> dict[str, object]:
        """In the form of Prometheus' service discovery. A label that begins with ``__meta_`` is dropped by Prometheus itself."""
        labels = {"run": self.run, **({"node": self.node} if self.node else {}), _ATTEMPT: str(self.attempt)}
        return {"targets": [self.address], "labels": labels}


def _path(directory: RunDirectory, name: str) -> Path:
    # A node's name may be any word; a file's may not.
    plain = re.sub(r"[^\w.-]", "_", name)
    return directory.targets / f"{plain}.json"


def announce(directory: RunDirectory, target: Target) -> None:
    """Writes the target's file. Raises ``OSError``."""
    directory.targets.mkdir(parents=True, exist_ok=True)
    content = json.dumps([target.entry], indent=1) + "\n"
    write_atomically(_path(directory, target.node or COORDINATOR), content.encode())


def withdraw(directory: RunDirectory, target: Target) -> None:
    """Removes the target's file, unless another process has taken its name since."""
    path = _path(directory, target.node or COORDINATOR)
    with suppress(OSError, ValueError):
        if plain_json(read_small(path, _MOST_BYTES)) == [target.entry]:
            path.unlink()


def withdraw_earlier(directory: RunDirectory, attempt: int) -> None:
    """Removes the files that an earlier start of the run has left."""
    for path in sorted(directory.targets.glob("*.json")):
        for entry in _entries(path):
            labels = entry.get("labels")
            before = labels.get(_ATTEMPT) if isinstance(labels, dict) else None
            if isinstance(before, str) and before.isdecimal() and int(before) < attempt:
                path.unlink(missing_ok=True)


def targets(directories: Iterable[Path]) -> list[Mapping[str, object]]:
    """All targets of runs, as Prometheus' HTTP service discovery takes them."""
    folders = (RunDirectory(path).targets for path in directories)
    return [entry for folder in folders for path in sorted(folder.glob("*.json")) for entry in _entries(path)]


def _entries(path: Path) -> list[dict[str, object]]:
    """The entries of one file; none of a file that is not one of ours."""
    try:
        found = plain_json(read_small(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in found if _is_entry(entry)] if isinstance(found, list) else []


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict):
        return False
    addresses, labels = entry.get("targets"), entry.get("labels")
    return (
        isinstance(addresses, list)
        and all(isinstance(address, str) for address in addresses)
        and isinstance(labels, dict)
        and all(isinstance(word, str) for pair in labels.items() for word in pair)
    )
