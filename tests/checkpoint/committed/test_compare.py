"""Two checkpoints of a step, bit by bit: differences are named, in any division among the ranks."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.memory_tier import MemoryTier
from checkpoint.worlds import State, folder_in_memory, holdings, same_bits, save_by_all, shards_from, states
from phalanx.checkpoint.committed.digest import compare_step, numbers
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Tier


def saved(tier: Tier, state: State, data: st.DataObject) -> Tier:
    save_by_all(tier, 1, [shards_from(state, part) for part in data.draw(holdings(state, 2))])
    return tier


@settings(max_examples=30)
@given(st.data())
def test_the_tensors_that_differ_are_named_with_their_first_element(data: st.DataObject) -> None:
    state = {name: t for name, t in data.draw(states()).items() if t.numel()} or {"model/t": torch.ones(2)}
    other = {name: tensor.clone() for name, tensor in state.items()}
    touched = data.draw(st.sampled_from(sorted(state)))
    flat = other[touched].view(-1)
    place = data.draw(st.integers(0, len(flat) - 1))
    raw = flat[place : place + 1].view(torch.uint8)
    raw[0] ^= 1
    with folder_in_memory() as folder:
        stored = saved(DiskTier(folder, block_bytes=4096), state, data)
        assert compare_step(stored, saved(MemoryTier(), state, data), 1) == []
        (difference,) = compare_step(stored, saved(MemoryTier(), other, data), 1)
    shape = tuple(state[touched].shape)
    assert (difference.name, difference.elements) == (touched, 1)
    assert difference.first == tuple(int(at) for at in np.unravel_index(place, shape))
    assert not same_bits(state[touched], other[touched])


def test_weights_come_before_other_state_and_layers_in_their_order() -> None:
    names = ["optimizer/blocks.0.w", "model/blocks.10.w", "model/blocks.2.w"]
    tiers = []
    for value in (1.0, 1.5):
        tiers.append(MemoryTier())
        save_by_all(tiers[-1], 1, [shards_from_whole({name: torch.full((3,), value) for name in names})])
    differences = compare_step(*tiers, 1)
    assert [difference.name for difference in differences] == names[2:] + names[1:2] + names[:1]
    assert differences[0].description == "3 of 3 elements differ, by up to 0.5; the first is [0]"


def test_tensors_that_one_side_lacks_or_has_in_another_shape_are_named() -> None:
    tiers = []
    for state in ({"model/a": torch.ones(2), "model/b": torch.ones(2)}, {"model/a": torch.ones(3)}):
        tiers.append(MemoryTier())
        save_by_all(tiers[-1], 1, [shards_from_whole(state)])
    assert [(difference.name, difference.description) for difference in compare_step(*tiers, 1)] == [
        ("model/a", "float32 [2] is not float32 [3]"),
        ("model/b", "only the first has it"),
    ]


def shards_from_whole(state: State) -> list:  # type: ignore[type-arg]
    from checkpoint.shards import shards_of

    return shards_of(state)


def test_raw_elements_of_a_format_that_numpy_lacks_have_their_values() -> None:
    values = torch.tensor([1.5, -2.0, 3e38, 0.0], dtype=torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    assert numbers(bits, "bfloat16").tolist() == values.double().tolist()
