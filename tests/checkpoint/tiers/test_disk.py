"""The disk tier when things go wrong: damage, missing files, full and forbidden storage."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from checkpoint.shards import shards_of
from checkpoint.worlds import box_of, save_by_all, save_state, shards_from
from phalanx.checkpoint.committed.copying import verify
from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.blocks import explain, page_aligned, verified_blocks, write_blocks
from phalanx.checkpoint.format.errors import (
    CorruptError,
    FormatVersionError,
    MissingFileError,
    NoSuchStepError,
    NotCoveredError,
    StorageError,
    StorageFullError,
)
from phalanx.checkpoint.format.manifest import decode_index, sealed
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import Draft, StepRecord, never
from phalanx.run.directory.paths import CHECKPOINT_INDEX
from small_disks import small_disk

STATE = {f"model/w{i}": torch.arange(300.0) + i for i in range(8)}


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    made = DiskTier(tmp_path / "checkpoints", block_bytes=4096)
    save_state(made, 100, STATE, {"tokens": 1})
    return made


def restored(tier: DiskTier) -> dict[str, torch.Tensor]:
    state = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    restore(DiskTier(tier.root), 100, shards_of(state))
    return state


def flip(path: Path, position: int, mask: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


@pytest.fixture(params=[1, 3], ids=["one catalog", "two catalogs"])
def spread(request: pytest.FixtureRequest, tmp_path: Path) -> DiskTier:
    """The state by as many ranks, two to a catalog."""
    tier = DiskTier(tmp_path / "checkpoints", block_bytes=4096, catalog_ranks=2)
    wholes = [box_of(name, tensor) for name, tensor in STATE.items()]
    rows = 300 // request.param
    shares = [[box.rows(rank * rows, (rank + 1) * rows) for box in wholes] for rank in range(request.param)]
    save_by_all(tier, 100, [shards_from(STATE, share) for share in shares])
    return tier


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bits_in_any_file_are_found_by_verify_and_by_a_full_restore(
    spread: DiskTier, data: st.DataObject
) -> None:
    tier = spread
    files = [path for path in tier.folder(100).rglob("*") if path.is_file()]
    path = data.draw(st.sampled_from(sorted(files)))
    position = data.draw(st.integers(0, path.stat().st_size - 1))
    mask = data.draw(st.integers(1, 255))
    flip(path, position, mask)
    try:
        findings = verify(tier.root)
        assert findings, f"{path.name} byte {position}"
        assert all(finding.place in str(finding.error) for finding in findings)
        in_header = path.suffix == ".safetensors" and position < 4096
        if not in_header:
            with pytest.raises((CorruptError, FormatVersionError)):
                restored(tier)
    finally:
        flip(path, position, mask)
    assert verify(tier.root) == []


def test_damage_is_reported_with_file_block_and_tensors(tier: DiskTier) -> None:
    flip(tier.folder(100) / "rank-00000.safetensors", 4096 + 1200 * 2, 1)
    with pytest.raises(
        CorruptError, match=r"rank-00000\.safetensors, block 1 .*model/w2.*Restore another step"
    ):
        restored(tier)


def test_damage_that_a_restore_does_not_touch_does_not_stop_it(tier: DiskTier) -> None:
    flip(tier.folder(100) / "rank-00000.safetensors", 4096 + 1200 * 8 - 1, 1)
    first = torch.empty(300)
    restore(tier, 100, shards_of({"model/w0": first}))
    assert torch.equal(first, STATE["model/w0"])


@pytest.mark.parametrize("keep_bytes", [0, 100, 4096, 9000])
def test_a_truncated_file_is_found(tier: DiskTier, keep_bytes: int) -> None:
    os.truncate(tier.folder(100) / "rank-00000.safetensors", keep_bytes)
    with pytest.raises(CorruptError, match=f"the file ends at byte {keep_bytes:,} of"):
        restored(tier)
    assert any("in its manifest" in str(finding) for finding in verify(tier.root))


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "ranks-00000.catalog"])
def test_a_missing_file_is_named(tier: DiskTier, name: str) -> None:
    (tier.folder(100) / name).unlink()
    with pytest.raises(MissingFileError, match=name):
        restored(tier)
    assert [Path(finding.place).name for finding in verify(tier.root)] == [name]


def test_a_folder_without_an_index_is_not_a_checkpoint(tier: DiskTier) -> None:
    (tier.folder(100) / CHECKPOINT_INDEX).unlink()
    assert tier.steps() == []
    with pytest.raises(NoSuchStepError, match="committed: none"):
        restored(tier)


def test_another_format_version_is_refused_by_number(tier: DiskTier) -> None:
    path = tier.folder(100) / CHECKPOINT_INDEX
    content = json.loads(path.read_bytes())["content"]
    path.write_bytes(sealed({**content, "version": 99}))
    with pytest.raises(FormatVersionError, match="version 99; this version of Phalanx reads 1 and 2"):
        restored(tier)


def test_a_renamed_checkpoint_is_found_by_verify(tier: DiskTier) -> None:
    tier.folder(100).rename(tier.folder(200))
    assert "of step 100: the folder was renamed" in str(verify(tier.root)[0])


def test_the_index_carries_what_was_saved_with_the_step(tier: DiskTier) -> None:
    index = decode_index((tier.folder(100) / CHECKPOINT_INDEX).read_bytes(), "index")
    assert (index.step, index.world_size, index.extra) == (100, 1, {"tokens": 1})


def test_a_rank_file_opens_with_the_safetensors_library(tier: DiskTier) -> None:
    with safe_open(tier.folder(100) / "rank-00000.safetensors", "pt") as file:
        assert set(file.keys()) == set(STATE)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 50_000, 65_536])
@pytest.mark.parametrize("offset", [0, 3])
def test_blocks_of_any_size_and_alignment_come_back_as_written(
    tmp_path: Path, nbytes: int, offset: int
) -> None:
    data = page_aligned(nbytes + offset)[offset:]
    data[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    written = write_blocks(tmp_path / "f", data, block_bytes=8192, cancelled=never)
    assert (tmp_path / "f").read_bytes() == data.tobytes()
    assert len(written.checksums) == -(-nbytes // 8192)
    assert offset == 0 or nbytes == 0 or not written.direct
    assert list(verified_blocks([])) == []


# Storage that refuses


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "4m") as mount:
        yield mount


def test_a_checkpoint_that_was_deleted_while_it_is_read_is_distinguished_from_a_lost_file(
    tmp_path: Path,
) -> None:
    error, file = FileNotFoundError(errno.ENOENT, "No such file"), "rank-00000.safetensors"
    (tmp_path / "step-00000002").mkdir()
    lost = explain(error, tmp_path / "step-00000002" / file, 0)
    deleted = explain(error, tmp_path / "step-00000001" / file, 0)
    assert isinstance(lost, MissingFileError)
    assert isinstance(deleted, MissingFileError)
    assert "checkpoint.keep_last" in str(deleted)
    assert "checkpoint.keep_last" not in str(lost)


def test_a_full_disk_fails_the_save_but_neither_training_nor_older_checkpoints(small_disk: Path) -> None:
    tier = DiskTier(small_disk)
    save_state(tier, 1, STATE)
    saver = AsyncSaver(tier, 0, 1, attempt=1)
    saver.save(2, shards_of({"big": torch.zeros(1 << 21)}), {})
    saver.wait()
    (full,) = saver.poll()
    assert isinstance(full.error, StorageFullError)
    assert "8,392,704 bytes needed" in str(full.error)
    assert "earlier ones, if there are any, are intact" in str(full.error)
    saver.save(3, shards_of(STATE), {})
    saver.close()
    assert [outcome.status for outcome in saver.poll()] == ["committed"]
    assert verify(small_disk) == []
    assert sorted(path.name for path in small_disk.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_disk_without_room_for_another_file_is_reported_as_full_of_files(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "4m,nr_inodes=2") as mount:
        (mount / "f").touch()
        with pytest.raises(StorageFullError, match=r"it has all of its 2 files"):
            write_blocks(mount / "g", page_aligned(1 << 20), block_bytes=1 << 20, cancelled=never)


def test_a_disk_that_fills_up_while_writing_is_reported_with_the_bytes_needed(small_disk: Path) -> None:
    with pytest.raises(StorageFullError, match=r"No space left.*8,388,608 bytes needed"):
        write_blocks(small_disk / "f", page_aligned(8 << 20), block_bytes=1 << 20, cancelled=never)


def test_too_many_open_files_are_the_processs_and_not_the_disks() -> None:
    error = explain(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), Path("step-1/rank-0"), 1)
    assert "ulimit -n" in str(error)
    assert "disk" not in str(error)


def test_a_file_size_limit_is_named_with_its_bytes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            StorageFullError, match=r"262,144 bytes needed, and a file may have at most 65,536 \(ulimit -f\)"
        ):
            write_blocks(tmp_path / "f", page_aligned(1 << 18), block_bytes=1 << 14, cancelled=never)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_run_whose_folder_is_renamed_saves_nothing_until_it_is_moved_back(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    tier = DiskTier(run / "checkpoints")
    saver = AsyncSaver(tier, 0, 1, attempt=1)
    run.rename(elsewhere)
    saver.save(1, shards_of(STATE), {})
    saver.wait()
    (failed,) = saver.poll()
    assert isinstance(failed.error, StorageError)
    assert f"{run}: is gone, renamed or removed" in str(failed.error)
    elsewhere.rename(run)
    saver.save(2, shards_of(STATE), {})
    saver.close()
    assert [outcome.status for outcome in saver.poll()] == ["committed"]


def test_a_failure_that_cannot_be_read_ends_the_commit_with_a_clear_error(tier: DiskTier) -> None:
    draft = Draft(300, 0)
    tier.fail(draft, 1, "its disk is full")
    (failure,) = tier.draft_folder(draft).glob("*.failed")
    failure.unlink()
    failure.mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        tier.commit(draft, StepRecord(300, 2, {}), timeout_s=3600)


def test_a_half_made_folder_in_a_steps_place_is_moved_aside_and_the_step_is_saved(tier: DiskTier) -> None:
    half_made = tier.folder(300)
    half_made.mkdir()
    (half_made / "rank-00000.safetensors").write_bytes(b"half")
    save_state(tier, 300, STATE)
    assert tier.has(300)
    (aside,) = tier.root.glob(".damaged-step-00000300-*")
    assert (aside / "rank-00000.safetensors").read_bytes() == b"half"


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        DiskTier(tmp_path / "file" / "checkpoints")


def test_a_root_that_was_removed_costs_what_was_in_it_and_no_later_save(tier: DiskTier) -> None:
    saver = AsyncSaver(tier, 0, 1, attempt=0, timeout_s=30)
    shutil.rmtree(tier.root)
    saver.save(109, shards_of({"w": torch.ones(3)}), {})
    saver.close()
    assert [outcome.status for outcome in saver.poll()] == ["committed"]
    assert tier.steps() == [109]


def test_a_file_that_goes_while_the_bytes_of_a_step_are_counted_is_none_of_them(tier: DiskTier) -> None:
    nbytes = tier.data_bytes(100)
    (tier.folder(100) / "gone").symlink_to("nowhere")  # a name that is listed, and no file that has a size
    assert tier.data_bytes(100) == nbytes


def test_verify_reports_progress_up_to_every_byte(tier: DiskTier) -> None:
    save_state(tier, 200, STATE)
    reports: list[tuple[int, int]] = []
    assert verify(tier.root, progress=lambda done, total: reports.append((done, total))) == []
    files = sum(path.stat().st_size for path in tier.root.glob("step-*/*.safetensors"))
    assert reports[-1] == (files, files)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_verify_looks_at_the_named_step_alone(tier: DiskTier) -> None:
    save_state(tier, 200, STATE)
    flip(tier.folder(100) / "rank-00000.safetensors", 5000, 1)
    assert verify(tier.root, 200) == []
    assert [finding.step for finding in verify(tier.root)] == [100]
    with pytest.raises(NoSuchStepError, match="step 300"):
        verify(tier.root, 300)


def test_every_damaged_block_is_found_not_only_the_first(tier: DiskTier) -> None:
    for position in (5000, 10_000, 12_500):
        flip(tier.folder(100) / "rank-00000.safetensors", position, 1)
    assert [str(finding).split(", ")[1].split(" (")[0] for finding in verify(tier.root)] == [
        "block 1",
        "block 2",
        "block 3",
    ]


@pytest.mark.parametrize(
    "state", [{"w": torch.zeros(8)}, STATE], ids=["half a tensor", "half of the tensors"]
)
def test_a_checkpoint_that_lacks_what_rank_0_holds_is_not_committed(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    tier = DiskTier(tmp_path)
    saver = AsyncSaver(tier, 0, 1, replica=0, replicas=2)  # The other replica is not there to write its half.
    saver.save(1, shards_of(state), {})
    saver.close()
    assert isinstance(saver.poll()[0].error, NotCoveredError)
    assert tier.steps() == []
