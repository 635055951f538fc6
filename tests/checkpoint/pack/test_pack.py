"""Packs: their content, their origin, and that no damage goes unseen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.format.errors import CorruptError, NoSuchStepError, StorageFullError
from phalanx.checkpoint.format.image import PAGE_BYTES
from phalanx.checkpoint.pack.layout import CHUNK_BYTES, PackError, PackFormat, lay_out
from phalanx.checkpoint.pack.reader import damage, open_pack, read_section
from phalanx.checkpoint.pack.writer import narrowed, pack, widened, write_wide
from phalanx.checkpoint.tiers.disk import DiskTier
from serve.packed_runs import DENSE, MIXTURE, make_pack, make_run, random_model


def test_a_pack_in_fp32_holds_every_weight_bit_for_bit(tmp_path: Path) -> None:
    file = open_pack(make_pack(tmp_path, MIXTURE, "fp32"))
    expected = random_model(MIXTURE, 1).state_dict()
    weights = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    for number, section in enumerate(file.index.sections):
        stored = torch.from_numpy(read_section(file, number))
        for place in section.tensors:
            target = weights[section.prefix + place.name]
            write_wide(stored, place, target if section.expert < 0 else target[section.expert])
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@given(
    st.sampled_from(["fp32", "bf16", "fp8", "int8"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3000),
)
def test_sections_do_not_overlap_and_begin_where_they_can_be_read_directly(
    form: PackFormat, layers: int, experts: int, width: int
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (100, width), "norm.weight": (width,)}
    for layer in range(layers):
        shapes[f"blocks.{layer}.attention.query.weight"] = (width, width)
        shapes[f"blocks.{layer}.ffn.experts.up"] = (experts, 3, width)
    end = PAGE_BYTES
    for section in lay_out(shapes, form):
        assert section.start >= end
        assert section.start % (CHUNK_BYTES if section.nbytes >= CHUNK_BYTES else PAGE_BYTES) == 0
        end = section.start + section.nbytes


def test_a_pack_names_the_run_the_step_and_the_hash_of_the_weights_it_was_made_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE, (3, 7))
    path, index = pack(run, 3, tmp_path / "x.pack", "bf16")
    assert open_pack(path).index == index
    assert (index.step, index.format) == (3, "bf16")
    assert index.weights_sha256 == digest_checkpoint(DiskTier(run / "checkpoints"), 3)
    assert str(run) in index.run


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 2.0**-7), (torch.float8_e4m3fn, 2.0**-4)])
@pytest.mark.parametrize("columns", [8, 32, 200])
def test_a_narrow_element_differs_by_less_than_a_step_of_the_largest_beside_it(
    dtype: torch.dtype, most: float, columns: int
) -> None:
    weights = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    back = torch.empty_like(weights)
    widened(*narrowed(weights, dtype), back)
    for start in range(0, columns, 32):
        part = weights[:, start : start + 32]
        error = (back[:, start : start + 32] - part).abs().amax(1)
        assert (error <= most * part.abs().amax(1)).all()


def test_the_recorded_rounding_is_that_of_the_weights(tmp_path: Path) -> None:
    exact = make_pack(tmp_path, DENSE, "fp32")
    rounded = make_pack(tmp_path, DENSE, "bf16")
    assert open_pack(exact).index.rounding.relative_error == 0
    weights = torch.cat([value.flatten() for value in random_model(DENSE, 1).state_dict().values()])
    error = (weights - weights.bfloat16().float()).norm() / weights.norm()
    assert open_pack(rounded).index.rounding.relative_error == pytest.approx(float(error), rel=1e-3)


@pytest.mark.parametrize("where", ["header", "index", "section"])
def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path, where: str) -> None:
    path = make_pack(tmp_path, DENSE, "bf16")
    data = bytearray(path.read_bytes())
    section = open_pack(path).index.sections[2]
    data[{"header": 20, "index": len(data) - PAGE_BYTES, "section": section.start + 5}[where]] ^= 1
    path.write_bytes(data)
    if where == "section":
        (report,) = damage(open_pack(path), lambda *_: None)
        assert "chunk 0" in report
        assert "blocks.0." in report
    else:
        with pytest.raises(CorruptError, match=str(path)):
            open_pack(path)


def test_a_pack_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = make_pack(tmp_path, DENSE, "bf16")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CorruptError, match="cut off"):
        open_pack(path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = make_run(tmp_path / "run", DENSE), []

    write = os.pwrite

    def full(descriptor: int, data: memoryview, start: int) -> int:
        calls.append(start)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageFullError, match="No files remain"):
        pack(run, None, tmp_path / "out" / "x.pack")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_packing_left_is_removed_by_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE)
    (tmp_path / ".x.pack.99999999.partial").write_bytes(b"half")
    pack(run, None, tmp_path / "x.pack")
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob(".*.partial"))


def test_a_pack_is_never_written_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE)
    pack(run)
    with pytest.raises(PackError, match="exists"):
        pack(run)
    with pytest.raises(NoSuchStepError):
        pack(run, 9)
