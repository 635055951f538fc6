"""Checkpoints in object stores: copied there and back, committed once, and whole after a kill at any moment."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier, Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.worlds import (
    State,
    blank_shards,
    box_of,
    folder_in_memory,
    holdings,
    random_tensor,
    same_bits,
    save_by_all,
    save_state,
    shards_from,
    states,
)
from phalanx.checkpoint.committed.copying import (
    ObjectDraft,
    RateLimit,
    commit_copy,
    copy_share,
    copy_step,
    verify,
    verify_tier,
)
from phalanx.checkpoint.committed.restore import Shard, restore
from phalanx.checkpoint.format.errors import (
    AbandonedError,
    CorruptError,
    MissingFileError,
    NoSuchStepError,
    StorageError,
)
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import ObjectTier
from phalanx.store.open_store import open_store
from phalanx.store.store import HedgedReads, RetryPolicy
from store.faulty_proxy import Faults, faulty_proxy
from store.memory_store import MemoryStore
from store.servers import Server

FREE = RateLimit(0)


def small_state(seed: int = 0) -> State:
    return {"model/w": random_tensor((40, 30), torch.float32, seed), "optimizer/step": torch.tensor(seed)}


def disk_with(folder: Path, *steps: int, block_bytes: int = 4096) -> DiskTier:
    tier = DiskTier(folder, block_bytes=block_bytes)
    for step in steps:
        save_state(tier, step, small_state(step), {"tokens": step})
    return tier


def copied(disk: DiskTier, store: MemoryStore) -> ObjectTier:
    tier = ObjectTier(store)
    for step in disk.steps():
        copy_step(disk, step, tier)
    return tier


def loaded(tier: ObjectTier | DiskTier, step: int) -> State:
    blank = {name: torch.zeros_like(tensor) for name, tensor in small_state().items()}
    restore(tier, step, [Shard(box_of(name, tensor), tensor) for name, tensor in blank.items()])
    return blank


def test_a_tensor_of_another_format_gets_the_stored_numbers_rounded(tmp_path: Path) -> None:
    disk = disk_with(tmp_path, 7)
    stored = small_state(7)["model/w"]
    for tier in (disk, copied(disk, MemoryStore())):
        half = torch.zeros_like(stored, dtype=torch.bfloat16)
        restore(tier, 7, [Shard(box_of("model/w", stored), half)])
        torch.testing.assert_close(half, stored.bfloat16(), rtol=0, atol=0, equal_nan=True)


def step_files(disk: DiskTier, step: int) -> dict[str, bytes]:
    folder = disk.folder(step)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=40)
@given(data=st.data())
def test_a_step_that_several_ranks_copied_restores_on_any_layout_with_the_same_bits(
    data: st.DataObject,
) -> None:
    state, ranks = data.draw(states()), data.draw(st.integers(1, 3))
    saved = data.draw(holdings(state, ranks))
    catalog_ranks, shares = data.draw(st.sampled_from([1, 2, 256])), data.draw(st.integers(1, 4))
    with folder_in_memory() as folder:
        disk = DiskTier(folder, block_bytes=64, catalog_ranks=catalog_ranks)
        save_by_all(disk, 5, [shards_from(state, boxes) for boxes in saved], {"tokens": 9})
        tier = ObjectTier(MemoryStore())
        draft = ObjectDraft(tier, 5, disk.index_bytes(5), "1")
        for share in range(shares):
            assert tier.steps() == []
            copy_share(disk, 5, draft, share, shares, limit=FREE)
        assert commit_copy(disk, 5, draft, timeout_s=0)
    assert verify_tier(tier, "store") == []
    for rank, boxes in enumerate(data.draw(holdings(state, data.draw(st.integers(1, 3))))):
        shards = blank_shards(boxes)
        assert restore(tier, 5, shards, rank=data.draw(st.sampled_from([None, rank]))) == {"tokens": 9}
        for shard in shards:
            full = state[shard.box.name]
            assert same_bits(shard.tensor, full[shard.box.slices_in(box_of(shard.box.name, full))])


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> DiskTier:
    """A disk that is only read."""
    return disk_with(tmp_path_factory.mktemp("three") / "disk", 1, 2, 3, block_bytes=1024)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_after_a_kill_before_any_operation_every_committed_step_is_whole(
    three_steps: DiskTier, seed: int
) -> None:
    draw = random.Random(seed)
    objects: dict[str, bytes] = {}
    found_whole: dict[int, dict[str, bytes]] = {}
    for _ in range(12):
        store, left = MemoryStore(objects), draw.randrange(14)
        store.age = timedelta(days=2)

        def count(_operation: str, _key: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        tier = ObjectTier(store)
        before = set(tier.steps())
        store.before = count
        act, step = draw.choice(["copy", "copy", "delete", "sweep", "set aside"]), draw.choice([1, 2, 3])
        try:
            if act == "copy":
                copy_step(three_steps, step, tier)
            elif act == "sweep":
                tier.sweep("none")
            elif step in before:
                tier.delete(step) if act == "delete" else tier.set_aside(step)
        except Killed:
            pass
        fresh = ObjectTier(MemoryStore(objects))
        after = set(fresh.steps())
        assert after - before <= {step}
        assert before - after <= ({step} if act in ("delete", "set aside") else set())
        for committed in after:
            now = {key: content for key, content in objects.items() if f"{committed:08}" in key}
            if found_whole.get(committed) != now:
                require_whole(fresh, committed)
                found_whole[committed] = now
    for committed in after:  # also beside what the killed operations left
        require_whole(fresh, committed)


def require_whole(tier: ObjectTier, step: int) -> None:
    """Every byte of a step is as it was written, and it restores."""
    assert verify_tier(tier, "store", step) == []
    assert same_bits(loaded(tier, step)["model/w"], small_state(step)["model/w"])


def test_one_of_several_racing_attempts_at_a_step_commits_and_its_bytes_are_there(tmp_path: Path) -> None:
    store, racers = MemoryStore(), 6
    disks = []
    for seed in range(racers):
        disks.append(DiskTier(tmp_path / str(seed)))
        save_state(disks[-1], 7, small_state(seed))
    together = Barrier(racers)

    def race(number: int) -> bool:
        tier = ObjectTier(store)
        draft = ObjectDraft(tier, 7, disks[number].index_bytes(7), str(number))
        copy_share(disks[number], 7, draft, limit=FREE)
        together.wait()
        return commit_copy(disks[number], 7, draft, timeout_s=0)

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(race, range(racers)))
    assert won.count(True) == 1
    tier = ObjectTier(store)
    assert verify_tier(tier, "store") == []
    assert same_bits(loaded(tier, 7)["model/w"], small_state(won.index(True))["model/w"])


def test_attempts_that_differ_in_a_byte_or_in_their_tag_share_no_key(tmp_path: Path) -> None:
    first, other = disk_with(tmp_path / "a", 1), disk_with(tmp_path / "b")
    save_state(other, 1, small_state(99))
    tier = ObjectTier(MemoryStore())
    folders = {
        ObjectDraft(tier, 1, disk.index_bytes(1), tag).folder for disk in (first, other) for tag in "12"
    }
    assert len(folders) == 4


def test_a_commit_waits_for_the_other_ranks_files_and_names_those_that_are_not_there(tmp_path: Path) -> None:
    disk = disk_with(tmp_path)
    state = {"w": torch.randn(4)}
    box = box_of("w", state["w"])
    save_by_all(disk, 1, [shards_from(state, [box.rows(0, 2)]), shards_from(state, [box.rows(2, 4)])])
    tier = ObjectTier(MemoryStore())
    draft = ObjectDraft(tier, 1, disk.index_bytes(1), "1")
    copy_share(disk, 1, draft, 0, 2, limit=FREE)
    with pytest.raises(AbandonedError, match=r"1 of 3 files .*rank-00001"):
        commit_copy(disk, 1, draft, timeout_s=0.01)
    assert tier.steps() == []


def test_a_file_of_another_size_is_not_committed_and_is_copied_again(tmp_path: Path) -> None:
    disk, store = disk_with(tmp_path, 1), MemoryStore()
    tier = ObjectTier(store)
    draft = ObjectDraft(tier, 1, disk.index_bytes(1), "1")
    copy_share(disk, 1, draft, limit=FREE)
    store.objects[data_key(store, ".safetensors")] += b"x"
    with pytest.raises(AbandonedError, match="1 of 2 files"):
        commit_copy(disk, 1, draft, timeout_s=0)
    copy_share(disk, 1, draft, limit=FREE)
    assert commit_copy(disk, 1, draft, timeout_s=0)
    assert verify_tier(tier, "store") == []


def test_what_a_broken_upload_has_brought_is_not_copied_again(tmp_path: Path) -> None:
    disk, tier = disk_with(tmp_path, 1), ObjectTier(MemoryStore())
    draft = ObjectDraft(tier, 1, disk.index_bytes(1), "1")
    first = copy_share(disk, 1, draft, limit=FREE)
    again = copy_share(disk, 1, draft, limit=FREE)
    assert again < first - 4096


def test_damage_on_the_disk_is_found_and_never_copied(tmp_path: Path) -> None:
    disk, tier = disk_with(tmp_path, 1), ObjectTier(MemoryStore())
    path = disk.folder(1) / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="rank-00000"):
        copy_step(disk, 1, tier)
    assert tier.steps() == []


def test_a_step_is_copied_once(tmp_path: Path) -> None:
    disk, tier = disk_with(tmp_path, 1), ObjectTier(MemoryStore())
    assert copy_step(disk, 1, tier)[0]
    assert copy_step(disk, 1, tier) == (False, 0)


def data_key(store: MemoryStore, ending: str) -> str:
    (key,) = [key for key in store.objects if key.endswith(ending)]
    return key


def test_a_flipped_byte_is_named_with_its_url_and_block(tmp_path: Path) -> None:
    store = MemoryStore()
    tier = copied(disk_with(tmp_path, 1), store)
    key = data_key(store, ".safetensors")
    data = bytearray(store.objects[key])
    data[5000] ^= 1
    store.objects[key] = bytes(data)
    with pytest.raises(CorruptError, match=f"{store.url}/{key}, block 1 "):
        loaded(tier, 1)
    (finding,) = verify_tier(tier, "store")
    assert (finding.step, finding.place) == (1, f"{store.url}/{key}")


@pytest.mark.parametrize("ending", [".safetensors", ".catalog"])
def test_a_missing_object_is_named_with_its_url(tmp_path: Path, ending: str) -> None:
    store = MemoryStore()
    tier = copied(disk_with(tmp_path, 1), store)
    key = data_key(store, ending)
    del store.objects[key]
    with pytest.raises(MissingFileError, match=key):
        loaded(tier, 1)
    assert [finding.place for finding in verify_tier(tier, "store")] == [f"{store.url}/{key}"]


@pytest.mark.parametrize("keep_bytes", [5000, 8192])
def test_a_truncated_object_is_found(tmp_path: Path, keep_bytes: int) -> None:
    store = MemoryStore()
    tier = copied(disk_with(tmp_path, 1), store)
    key = data_key(store, ".safetensors")
    store.objects[key] = store.objects[key][:keep_bytes]
    with pytest.raises(CorruptError, match=key):
        loaded(tier, 1)
    assert "in its manifest" in str(verify_tier(tier, "store")[0])


def test_a_damaged_commit_is_found_and_can_be_set_aside_and_copied_again(tmp_path: Path) -> None:
    store, disk = MemoryStore(), disk_with(tmp_path, 1)
    tier = copied(disk, store)
    store.objects["committed/00000001.json"] = store.objects["committed/00000001.json"].replace(
        b"step", b"stop"
    )
    tier = ObjectTier(store)
    assert "committed/00000001.json" in str(verify_tier(tier, "store")[0])
    tier.set_aside(1)
    assert tier.steps() == []
    assert copy_step(disk, 1, tier)[0]
    assert verify_tier(tier, "store") == []


def test_sweeping_takes_old_drafts_of_other_attempts_and_nothing_else(tmp_path: Path) -> None:
    store, disk = MemoryStore(), disk_with(tmp_path, 1, 2, 3)
    tier = ObjectTier(store)
    copy_step(disk, 1, tier)
    copy_step(disk, 3, tier)
    tier.set_aside(3)
    drafts = [ObjectDraft(tier, 2, disk.index_bytes(2), tag) for tag in ("7", "8")]
    for draft in drafts:
        copy_share(disk, 2, draft, limit=FREE)
    assert tier.sweep("8") == []  # all of them are young: their writers may be alive
    store.age = timedelta(days=2)
    kept = {key for key in store.objects if not key.startswith(drafts[0].folder)}
    assert tier.sweep("8") == [drafts[0].folder]
    assert store.objects.keys() == kept


def test_a_sweep_that_cannot_read_a_commit_takes_nothing(tmp_path: Path) -> None:
    store, disk = MemoryStore(), disk_with(tmp_path, 1)
    copied(disk, store)
    store.objects["committed/00000001.json"] += b" "
    store.age = timedelta(days=2)
    assert ObjectTier(store).sweep("8") == []


def test_a_deleted_step_leaves_nothing_and_the_others_stay(tmp_path: Path) -> None:
    store = MemoryStore()
    tier = copied(disk_with(tmp_path, 1, 2), store)
    tier.delete(1)
    assert tier.steps() == [2]
    assert not any("00000001" in key for key in store.objects)
    with pytest.raises(NoSuchStepError, match=r"step 1 is not in the store .*; there are \[2\]"):
        tier.extra(1)


def test_a_block_that_is_not_answered_is_requested_again(tmp_path: Path) -> None:
    store = MemoryStore()
    copied(disk_with(tmp_path, 1), store)
    tier = ObjectTier(store, HedgedReads(unmeasured_s=0.05))
    release, requests = Event(), Counter[str]()

    def hang_once(operation: str, _key: str) -> None:
        requests[operation] += 1
        if (operation, requests[operation]) == ("ranges", 2):
            release.wait(60)

    store.before = hang_once
    restored, expected = loaded(tier, 1), small_state(1)
    assert all(same_bits(restored[name], expected[name]) for name in expected)
    assert requests["ranges"] > 2
    release.set()


def test_only_the_needed_blocks_are_fetched(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, block_bytes=4096)
    state = {f"model/{i}": torch.randn(1024) for i in range(64)}
    save_state(disk, 1, state)
    store = MemoryStore()
    tier = copied(disk, store)
    store.read_bytes = 0
    target = torch.zeros(1024)
    restore(tier, 1, [Shard(box_of("model/7", target), target)])
    assert same_bits(target, state["model/7"])
    assert store.read_bytes <= 2 * 4096


def test_a_store_that_fails_is_a_storage_error_with_its_own_words(tmp_path: Path) -> None:
    tier = ObjectTier(open_store(f"{tmp_path / 'file'}/below"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match=r"file/below.*check the disk or mount"):
        copy_step(disk_with(tmp_path / "disk", 1), 1, tier)


def test_a_limited_copy_can_be_cancelled(tmp_path: Path) -> None:
    disk, tier = disk_with(tmp_path, 1), ObjectTier(MemoryStore())
    draft = ObjectDraft(tier, 1, disk.index_bytes(1), "1")
    with pytest.raises(AbandonedError, match="cancelled"):
        copy_share(disk, 1, draft, limit=RateLimit(1e-6, lambda: True))


def test_to_s3_and_back_every_file_is_the_same_through_a_bad_network(
    s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, back = disk_with(tmp_path / "disk", 1), DiskTier(tmp_path / "back")
    faults = Faults(slow_down=0.1, reset=0.1, lost_answer=0.1, truncated=0.1)
    with faulty_proxy(s3_server.port, faults, 3) as proxy:
        for name, value in s3_server.behind(proxy.port).items():
            monkeypatch.setenv(name, value)
        retry = RetryPolicy(first_pause_s=0.005, longest_pause_s=0.05, timeout_s=240)
        tier = ObjectTier(open_store(s3_server.url(secrets.token_hex(8)), retry))
        assert copy_step(disk, 1, tier)[0]
        assert verify_tier(tier, "store") == []
        assert copy_step(tier, 1, back)[0]
        tier.delete(1)
        assert tier.steps() == []
        assert list(tier.store.list()) == []
    assert step_files(back, 1) == step_files(disk, 1)
    assert verify(back.root) == []
    assert back.sweep(attempt=0) == []
