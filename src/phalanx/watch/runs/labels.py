"""Tags and a note that people give to a run: ``labels.json`` in its directory.

They lie beside what they describe, so they are copied, moved and removed with the run; the index of runs only repeats them. Two people may
write at once: the file is replaced whole, and the later one wins.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.run.directory.durable import write_atomically
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.directory.plain_json import plain_json
from phalanx.run.directory.regular_file import read_small

_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 64, 64, 10_000
_TAG = re.compile(r"[^\s,\x00-\x1f\x7f]+")


class LabelError(ValueError):
    """A tag or a note cannot be kept; the message says why."""


@dataclass(frozen=True)
class Labels:
    """What people say of a run."""

    tags: tuple[str, ...] = ()
    """Sorted, each once."""
    note: str = ""

    def tagged(self, *tags: str) -> Labels:
        """These labels with further tags. Raises ``LabelError``."""
        return _checked(Labels((*self.tags, *tags), self.note))

    def untagged(self, *tags: str) -> Labels:
        """These labels without some tags; those that are not there do not matter."""
        return Labels(tuple(tag for tag in self.tags if tag not in tags), self.note)

    def noted(self, note: str) -> Labels:
        """These labels with another note. Raises ``LabelError``."""
        return _checked(Labels(self.tags, note))


def read_labels(run_dir: Path) -> Labels:
    """The labels of the run in ``run_dir``: none if the file is missing; of a damaged one what can be read."""
    try:
        found = plain_json(read_small(RunDirectory(run_dir).labels))
    except (OSError, ValueError, RecursionError):
        return Labels()
    if not isinstance(found, dict):
        return Labels()
    tags, note = found.get("tags"), found.get("note")
    kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Labels(
        tuple(sorted(set(kept)))[:_MOST_TAGS], note[:_LONGEST_NOTE] if isinstance(note, str) else ""
    )


def write_labels(run_dir: Path, labels: Labels) -> None:
    """Replaces the labels of the run in ``run_dir``. Raises ``LabelError``, ``OSError``."""
    kept = _checked(labels)
    content = json.dumps({"tags": list(kept.tags), "note": kept.note}, indent=1, ensure_ascii=False) + "\n"
    write_atomically(RunDirectory(run_dir).labels, content.encode(errors="backslashreplace"))


def _checked(labels: Labels) -> Labels:
    tags = tuple(sorted(set(labels.tags)))
    for tag in tags:
        if not _TAG.fullmatch(tag) or len(tag) > _LONGEST_TAG:
            raise LabelError(
                f"{tag!r} is no tag: one has 1 to {_LONGEST_TAG} characters, without spaces and commas"
            )
    if len(tags) > _MOST_TAGS:
        raise LabelError(f"{len(tags)} tags are more than a run may have, which is {_MOST_TAGS}")
    if len(labels.note) > _LONGEST_NOTE:
        raise LabelError(f"a note of {len(labels.note):,} characters is longer than {_LONGEST_NOTE:,}")
    return Labels(tags, labels.note)
