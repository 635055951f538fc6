"""Verification: reads committed steps back in full, and reports everything that is wrong with them.

Every byte is under a checksum that the index leads to; on top of that the boxes must cover their tensors. Streams
block by block with bounded memory, and needs no torch, so that it runs on a storage node.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.checkpoint.format.errors import CheckpointError, NoSuchStepError
from phalanx.checkpoint.format.index import CatalogRef
from phalanx.checkpoint.tiers.catalogued import CatalogReader, StepFiles
from phalanx.checkpoint.tiers.disk import DiskTier

VerifyProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a committed step: the file's path or URL, and what is wrong with the remedy."""

    step: int
    place: str
    error: CheckpointError

    def __str__(self) -> str:
        return f"step {self.step}: {self.error}"


class VerifiableTier(StepFiles, Protocol):
    """A tier whose committed steps have an index and catalogs."""

    @property
    def reader(self) -> CatalogReader:
        """Looks into the steps."""
        ...

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        ...


def silent(_done_bytes: int, _total_bytes: int) -> None:
    """A progress callback that does nothing."""


def verify(root: Path | str, step: int | None = None, *, progress: VerifyProgress = silent) -> list[Finding]:
    """``verify_tier`` of the checkpoints in the folder ``root``."""
    if not Path(root).is_dir():
        raise NoSuchStepError(f"{root}: no such folder")
    return verify_tier(DiskTier(root), str(root), step, progress=progress)


def verify_tier(
    tier: VerifiableTier, name: str, step: int | None = None, *, progress: VerifyProgress = silent
) -> list[Finding]:
    """Everything wrong with committed ``step`` of ``tier``, or with all of its steps where ``step`` is None.

    An empty list means that every byte is as it was written. ``progress(done_bytes, total_bytes)`` is called after
    each block; ``name`` is the tier's in messages. Raises NoSuchStepError where there is nothing to verify.
    """
    there = tier.steps()
    steps = there if step is None else [step]
    if not steps or not set(steps) <= set(there):
        raise NoSuchStepError(
            f"{name}: {f'step {step}' if step is not None else 'nothing'} is committed here"
        )
    findings: list[Finding] = []
    catalogs: list[tuple[int, CatalogRef]] = []
    for one in steps:
        try:
            good, wrong = tier.reader.wrong_catalogs(one)
        except CheckpointError as error:
            good, wrong = [], [("", error)]
        catalogs += [(one, ref) for ref in good]
        findings += [Finding(one, tier.place(one, file), error) for file, error in wrong]
    total_bytes = sum(ref.data_bytes for _, ref in catalogs)
    done_bytes = 0
    for one, ref in catalogs:
        catalog = tier.reader.catalog(one, ref)
        for image in catalog.images:
            place = tier.place(one, image.file)
            for looked_at_bytes, problem in tier.damage(one, catalog.manifest(image.rank)):
                if problem is None:
                    progress(done_bytes + looked_at_bytes, total_bytes)
                else:
                    findings.append(Finding(one, place, problem))
            done_bytes += image.nbytes
    return sorted(findings, key=lambda finding: (finding.step, finding.place))
