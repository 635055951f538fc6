"""Checkpoints as format 1 had them: a JSON manifest beside each rank's file, and an index that lists the manifests."""

import shutil
from dataclasses import replace

from phalanx.checkpoint.format.manifest import checksum, encode_manifest, sealed
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.paths import CHECKPOINT_INDEX


def rewrite_as_format_1(tier: DiskTier, step: int) -> None:
    """Replace the catalogs of a committed step by the files that format 1 had in their place."""
    folder, index = tier.folder(step), tier.index(step)
    manifests: list[list[object]] = []
    for ref in index.catalogs:
        catalog = tier.catalog(step, ref)
        for image in catalog.images:
            flat = f"rank-{image.rank:05d}.safetensors"
            if image.file != flat:
                (folder / image.file).rename(folder / flat)
            data = encode_manifest(replace(catalog.manifest(image.rank), file=flat))
            (folder / f"rank-{image.rank:05d}.json").write_bytes(data)
            manifests.append([image.rank, f"rank-{image.rank:05d}.json", checksum(data), image.nbytes])
    content = {
        "version": 1,
        "step": index.step,
        "attempt": index.attempt,
        "world_size": index.world_size,
        "weights_sha256": index.weights_sha256,
        "extra": index.extra,
        "manifests": manifests,
    }
    (folder / CHECKPOINT_INDEX).write_bytes(sealed(content))
    for path in [*folder.glob("*.catalog"), *folder.glob("ranks-*/")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
