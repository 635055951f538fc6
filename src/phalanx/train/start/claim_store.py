"""Makes sure whose the checkpoints in a store are, before a rank is started that could restore them or add to them.

A run writes down in ``ROOT/run.json`` who it is: the resolved run file and the fingerprint of its data, by an object that is created
only if absent. Whoever comes later compares. So a run that has lost its disk goes on from the store under the same URL, and another run
that names the same URL by mistake is refused. The store is probed first: it must refuse to create what is there.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.object_tier import ObjectTier, require_conditional_store
from phalanx.run.directory.paths import RunDirectoryError
from phalanx.run.identity import differences, layout_changes
from phalanx.run.read import spec_from_table, to_table
from phalanx.store.errors import MissingObjectError, StoreError, UnavailableError
from phalanx.store.open_store import open_store

if TYPE_CHECKING:
    from phalanx.run.spec import RunSpec

_log = logging.getLogger(__name__)

OWNER = "run.json"


def claim_store(spec: RunSpec, fingerprint: str, *, begun: bool = False) -> list[str]:
    """Takes ``checkpoint.store`` for a resolved run on the data of ``fingerprint``; returns what of its layout has changed since.

    A run that has ``begun`` has checkpoints on disk, and needs no store that cannot be reached now. Raises ``RunDirectoryError`` if it holds
    another run's checkpoints, cannot commit, or cannot be reached.
    """
    url = spec.checkpoint.store
    try:
        store = open_store(url)
        require_conditional_store(store)
        try:
            owner = store.get(OWNER)
        except MissingObjectError:
            if ObjectTier(store).steps():
                raise RunDirectoryError(
                    f"checkpoint.store = {url} holds checkpoints, but no {OWNER} says of which run; give an empty place. To begin from "
                    "one of them: `phalanx checkpoint copy`, and checkpoint.init_from"
                ) from None
            owner = (
                json.dumps({"data_fingerprint": fingerprint, "run": to_table(spec)}, indent=1) + "\n"
            ).encode()
            store.create(OWNER, owner)
    except (StoreError, CheckpointError) as error:
        if begun and isinstance(error.__cause__ or error, UnavailableError):
            _log.warning("checkpoint.store: %s; the run goes on with its checkpoints on disk", error)
            return []
        raise RunDirectoryError(f"checkpoint.store: {error}") from error
    return _changes(url, owner, spec, fingerprint)


def _changes(url: str, owner: bytes, spec: RunSpec, fingerprint: str) -> list[str]:
    """What of the layout is another than the owner's, whose own words these are."""
    try:
        table = json.loads(owner)
        run = table["run"]
        owners, problems = spec_from_table({**run, "model": {**run.get("model", {}), "preset": ""}}, {})
        recorded = str(table["data_fingerprint"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(f"{url}/{OWNER} is damaged: {error!r}") from error
    if owners is None:
        raise RunDirectoryError(f"{url}/{OWNER} was written by another version: {problems[0]}")
    changes = layout_changes(owners, spec)
    found = [line for line in differences(owners, spec) if line not in changes]
    if recorded != fingerprint:
        found.append(f"the data: {recorded[:12]} != {fingerprint[:12]}")
    if found:
        raise RunDirectoryError(
            f"checkpoint.store = {url} holds the checkpoints of another run; give another URL:\n"
            + "\n".join(f"  {line}" for line in found)
        )
    return changes
