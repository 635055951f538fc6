"""Export checkpoints as ``torch.distributed.checkpoint`` folders, for tools that read that format.

One process has the full tensors in memory; runs do not save themselves this way. Names stay unchanged (``model/<parameter>``,
``optimizer/<state>/<parameter>``); ``extra`` is stored under the key "extra".
"""

import json
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.format.shards import Shard, torch_dtype
from phalanx.checkpoint.tiers.tier import Tier

EXTRA = "extra"


def export_dcp(tier: Tier, step: int, out_dir: Path | str) -> None:
    """Write committed ``step`` to the new folder ``out_dir`` in PyTorch's distributed-checkpoint format.

    Needs host memory for all tensors. ``extra`` is stored as JSON text. Raises CheckpointError if ``out_dir`` exists and is not empty, and
    the errors of ``restore``.
    """
    out = Path(out_dir)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: is not empty; name a new folder")
    shards = empty_shards(tier, step)
    extra = restore(tier, step, shards)
    state: dict[str, object] = {shard.box.name: shard.tensor for shard in shards}
    state[EXTRA] = json.dumps(extra)
    save(state, checkpoint_id=out, no_dist=True)


def empty_shards(tier: Tier, step: int) -> list[Shard]:
    """Return full, uninitialized CPU tensors for every tensor of committed ``step``, sorted by name."""
    boxes = {stored.box.name: stored.box for stored in tier.boxes(step)}
    return [
        Shard(
            full_box(name, box.dtype, box.global_shape),
            torch.empty(box.global_shape, dtype=torch_dtype(box.dtype)),
        )
        for name, box in sorted(boxes.items())
    ]
