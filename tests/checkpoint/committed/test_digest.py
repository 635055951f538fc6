"""The weights' digest: against a few lines of hashlib, and independent of sharding."""

import hashlib

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.memory_tier import MemoryTier
from checkpoint.worlds import State, folder_in_memory, holdings, save_by_all, shards_from, states
from phalanx.checkpoint.committed.digest import combine, digest_checkpoint, tensor_digest
from phalanx.checkpoint.committed.restore import dtype_name
from phalanx.checkpoint.tiers.disk import DiskTier


def digest_of_live(state: State) -> str:
    outer = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        shape = ",".join(str(n) for n in tensor.shape) or "()"
        outer.update(f"{name.removeprefix('model/')} {dtype_name(tensor.dtype)} {shape}\n".encode())
        outer.update(
            hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
        )
    return outer.hexdigest()


@settings(max_examples=40)
@given(st.data())
def test_a_checkpoint_on_any_layout_has_the_digest_of_the_live_weights(data: st.DataObject) -> None:
    state = {name: t for name, t in data.draw(states()).items() if t.numel()} or {"model/t": torch.ones(1)}
    boxes = data.draw(holdings(state, 2))
    optimizer = {"optimizer/exp_avg/t": torch.zeros(3)}
    with folder_in_memory() as folder:
        for tier in (DiskTier(folder, block_bytes=4096), MemoryTier()):
            ranks = [shards_from(state, part) for part in boxes]
            ranks[0] += shards_from(optimizer, [s.box for s in _shards(optimizer)])
            save_by_all(tier, 1, ranks)
            assert digest_checkpoint(tier, 1) == digest_of_live(state)


def _shards(state: State) -> list:  # type: ignore[type-arg]
    from checkpoint.shards import shards_of

    return shards_of(state)


def test_parts_of_a_tensor_hash_as_the_whole() -> None:
    data = bytes(range(100))
    assert tensor_digest("uint8", (100,), [data[:33], data[33:]]) == tensor_digest("uint8", (100,), [data])


def test_name_dtype_shape_and_data_all_count() -> None:
    base = tensor_digest("uint8", (2, 2), [b"abcd"])
    others = [
        {"b": base},
        {"a": tensor_digest("int8", (2, 2), [b"abcd"])},
        {"a": tensor_digest("uint8", (4,), [b"abcd"])},
        {"a": tensor_digest("uint8", (2, 2), [b"abce"])},
    ]
    assert len({combine({"a": base}), *map(combine, others)}) == 5
