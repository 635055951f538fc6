"""Images: valid safetensors files, with every box at its place in the layout."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from checkpoint.worlds import DTYPES, box_of, grids, random_tensor, same_bits, shapes, shards_from, states
from phalanx.checkpoint.committed.restore import Shard
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.format.image import PAGE_BYTES, image_layout, spans, view_of
from phalanx.checkpoint.save.staging import StagingBuffers


@given(st.data())
def test_the_safetensors_library_reads_back_every_tensor_and_part(data: st.DataObject) -> None:
    state = data.draw(states())
    boxes = [cell for name, tensor in state.items() for cell in data.draw(grids(box_of(name, tensor)))]
    shards = shards_from(state, boxes)
    image = StagingBuffers().stage(shards).wait()
    loaded = load(image.data[: image.layout.nbytes].tobytes())
    assert loaded.keys() == {str(box) for box in boxes}
    assert all(same_bits(loaded[str(shard.box)], shard.tensor) for shard in shards)


@pytest.mark.parametrize(
    "dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.complex64]
)
def test_every_dtype_round_trips(dtype: torch.dtype) -> None:
    tensor = random_tensor((3, 5), dtype, 1)
    image = StagingBuffers().stage([Shard(box_of("t", tensor), tensor)]).wait()
    assert same_bits(load(image.data[: image.layout.nbytes].tobytes())["t"], tensor)


@given(states())
def test_data_begins_on_a_page_and_every_box_is_aligned(state: dict[str, torch.Tensor]) -> None:
    layout = image_layout([box_of(name, tensor) for name, tensor in state.items()])
    assert len(layout.header) % PAGE_BYTES == 0
    assert all(entry.start % entry.box.itemsize == 0 for entry in layout.entries)


def test_the_same_box_twice_is_refused() -> None:
    box = full_box("t", "float32", (2,))
    with pytest.raises(ValueError, match="given twice"):
        image_layout([box, box])


@given(st.data(), shapes, st.integers(1, 64))
def test_spans_hold_exactly_the_part_and_stay_within_the_limit(
    data: st.DataObject, shape: tuple[int, ...], limit_bytes: int
) -> None:
    full = full_box("t", "float32", shape)
    numbers = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    stored = numbers.reshape(-1).view(np.uint8)
    for part in data.draw(grids(full)):
        out = np.full(part.shape, -1, np.int64)
        for span in spans(full, part, limit_bytes):
            assert span.stop - span.start <= max(limit_bytes, 4)
            out[span.part.slices_in(part)] = view_of(full, span, stored[span.start : span.stop])
        assert (out == numbers[part.slices_in(full)]).all()


def test_an_image_written_to_a_file_opens_with_safetensors(tmp_path: Path) -> None:
    tensor = torch.arange(10.0)
    image = StagingBuffers().stage([Shard(box_of("t", tensor), tensor)]).wait()
    (tmp_path / "t.safetensors").write_bytes(image.data[: image.layout.nbytes].tobytes())
    from safetensors import safe_open

    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("t"), tensor)
