"""Export to PyTorch's distributed checkpoint: its own loader reads it back."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from checkpoint.shards import shards_of
from checkpoint.worlds import random_tensor, same_state, save_by_all, shards_from
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.dcp import export_dcp
from phalanx.checkpoint.tiers.disk import DiskTier

STATE = {
    "model/w": random_tensor((8, 6), torch.bfloat16, 0),
    "optimizer/exp_avg/w": random_tensor((8, 6), torch.float32, 1),
    "optimizer/step": torch.tensor(3),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_an_exported_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "ours")
    boxes = [shard.box for shard in shards_of(STATE)]
    save_by_all(
        tier,
        4,
        [
            shards_from(STATE, [boxes[0].rows(0, 3), boxes[1]]),
            shards_from(STATE, [boxes[0].rows(3, 8), boxes[2]]),
        ],
    )
    export_dcp(tier, 4, tmp_path / "dcp")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    torch_dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same_state(loaded, STATE)


def test_an_export_does_not_write_into_a_folder_in_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        export_dcp(DiskTier(tmp_path / "ours"), 4, tmp_path)
