"""The promise: the bits belong to the run, not to the fleet.

Every run here clips its gradients, decays its weights, evaluates and accumulates micro-batches within slots, and
8 slots do not divide evenly over 3 or 5 ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.committed.digest import digest_checkpoint
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.parallel import mesh
from phalanx.parallel.reduction.tree import SlotTree
from phalanx.run.spec import RunSpec
from quick_cases import quick
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import on_layout, tiny_run, train_on_this_rank


def a_run(dataset: Path, run_dir: Path, **train: Any) -> RunSpec:
    """Four steps on slots of two micro-batches."""
    return tiny_run(dataset, run_dir, steps=4, micro_batch_size=1, **train)


LAYOUTS = [
    (ranks, sharding, shard_ranks)
    for ranks in (1, 2, 3, 4, 5)
    for sharding, shard_ranks in (("zero3", 0), ("zero2", 0), ("none", 0))
] + [(4, "zero3", 2), (4, "zero2", 2)]
layouts = st.sampled_from(LAYOUTS)


@pytest.fixture(scope="module")
def reference(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The undisturbed run on one rank."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    result = ranks.run(1, train_on_this_rank, a_run(dataset, run_dir))[0]
    assert isinstance(result, dict)
    return result


def same(result: dict[str, Any] | None, reference: dict[str, Any]) -> bool:
    """True if weights, training loss and held-out loss agree in every bit."""
    assert result is not None
    return all(
        result[key] == reference[key] for key in ("weights_sha256", "loss", "held_out_loss", "bits_per_byte")
    )


@given(layout=layouts)
@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_any_layout_gives_the_same_weights_and_losses(
    layout: tuple[int, str, int],
    ranks: Ranks,
    dataset: Path,
    reference: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    count, sharding, shard_ranks = layout
    spec = on_layout(a_run(dataset, tmp_path_factory.mktemp("run") / "run"), sharding, shard_ranks)
    assert all(same(result, reference) for result in ranks.run(count, train_on_this_rank, spec))


@given(first=layouts, second=layouts, broken_off_at=st.integers(1, 4))
@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
def test_a_run_broken_off_anywhere_goes_on_with_the_same_weights_on_another_fleet(
    first: tuple[int, str, int],
    second: tuple[int, str, int],
    broken_off_at: int,
    ranks: Ranks,
    dataset: Path,
    reference: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    spec = a_run(dataset, tmp_path_factory.mktemp("run") / "run")
    ranks.run(first[0], train_on_this_rank, on_layout(spec, *first[1:]), broken_off_at)
    results = ranks.run(second[0], train_on_this_rank, on_layout(spec, *second[1:]))
    assert all(same(result, reference) for result in results)


def test_the_hash_on_disk_is_the_hash_that_training_reports(
    ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    ranks.run(3, train_on_this_rank, a_run(dataset, tmp_path / "run"))
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    assert digest_checkpoint(tier, tier.steps()[-1]) == reference["weights_sha256"]


def train_with_slots_added_in_order_of_arrival(spec: Any) -> Any:
    """As ``train_on_this_rank``, but a slot's gradient is added to any sum there is already."""
    push_node, push, take_root = SlotTree.push_node, SlotTree.push, SlotTree.take_root

    def arrive(self: Any, _node: Any, value: Any) -> None:
        if self.nodes:
            ((_, partial_sum),) = list(self.nodes.items())
            self.nodes.clear()
            value = self.add(partial_sum, value)
        self.nodes[self.root_node] = value

    SlotTree.push = lambda self, _slot, value: arrive(self, None, value)  # type: ignore[assignment,method-assign]
    SlotTree.push_node = arrive  # type: ignore[method-assign]
    try:
        return train_on_this_rank(spec)
    finally:
        SlotTree.push_node, SlotTree.push, SlotTree.take_root = push_node, push, take_root  # type: ignore[method-assign]


def test_another_order_of_summation_would_be_noticed(
    ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    result = ranks.run(2, train_with_slots_added_in_order_of_arrival, a_run(dataset, tmp_path / "run"))[0]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-3)  # as good a sum, but
    assert result["weights_sha256"] != reference["weights_sha256"]


def machines_where_one_rank_sees_none(nowhere: Path) -> int:
    """The number of ranks on each machine, if rank 1 cannot read which machine it is on."""
    boot_id = nowhere if dist.get_rank() == 1 else mesh.BOOT_ID
    return mesh.find_machines(torch.device("cpu"), boot_id).ranks_each


def test_a_rank_that_cannot_read_its_machine_keeps_nobody_waiting(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, machines_where_one_rank_sees_none, tmp_path / "none") == [0, 0]


def train_on_machines_of_two(spec: RunSpec, folder: Path) -> Any:
    """Trains as if every two ranks had a machine of their own; returns the result and the machines' number of ranks."""
    rank = dist.get_rank()
    boot_id = folder / f"machine-{rank // 2}"
    if rank % 2 == 0:
        boot_id.write_text(str(rank // 2))
    dist.barrier()
    ranks_of_machine = mesh.find_machines(torch.device("cpu"), boot_id).ranks_each
    return train_on_this_rank(spec, boot_id=boot_id), ranks_of_machine


@pytest.mark.servers
@pytest.mark.parametrize("compute", quick(["fp32", "bf16"], of_the_suite=["bf16"]))
def test_sums_that_are_made_inside_machines_first_and_sent_narrow_have_the_same_bits(
    compute: str, ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    alone, spread = (
        replace_at(a_run(dataset, tmp_path / place), "precision.compute", compute) for place in ("1", "4")
    )
    if compute == "bf16":  # a slot is one micro-batch: its gradient is sent in bf16
        alone, spread = (replace_at(spec, "train.micro_batch_size", 2) for spec in (alone, spread))
        reference = ranks.run(1, train_on_this_rank, alone)[0]
    result, machine_ranks = ranks.run(4, train_on_machines_of_two, spread, tmp_path)[0]
    assert machine_ranks == 2
    assert same(result, reference)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("compute", "broken_off_on"),
    quick([("fp32", (3, "zero3", 0)), ("bf16", None)], of_the_suite=[("fp32", (3, "zero3", 0))]),
)
def test_sums_in_integers_keep_the_promise(
    compute: str,
    broken_off_on: tuple[int, str, int] | None,
    ranks: Ranks,
    dataset: Path,
    reference: dict[str, Any],
    tmp_path: Path,
) -> None:
    alone, spread = (
        replace_at(a_run(dataset, tmp_path / place, reduction="integer"), "precision.compute", compute)
        for place in ("1", "4")
    )
    expected = ranks.run(1, train_on_this_rank, on_layout(alone, "none", 0))[0]
    assert expected["loss"] == pytest.approx(reference["loss"], rel=1e-3)  # as good a sum as the tree's
    if broken_off_on is not None:
        count, *layout = broken_off_on
        ranks.run(count, train_on_this_rank, on_layout(spread, *layout), 3)
    assert same(ranks.run(4, train_on_this_rank, on_layout(spread, "zero2", 2))[0], expected)


@pytest.mark.slow
def test_the_fast_reduction_trains_as_well_without_the_promise(
    ranks: Ranks, dataset: Path, reference: dict[str, Any], tmp_path: Path
) -> None:
    for count, sharding, shard_ranks in [
        (1, "none", 0),
        (3, "zero3", 0),
        (3, "zero2", 0),
        (4, "zero3", 2),
        (3, "none", 0),
    ]:
        run = a_run(dataset, tmp_path / f"{count}{sharding}{shard_ranks}", reduction="fast")
        result = ranks.run(count, train_on_this_rank, on_layout(run, sharding, shard_ranks))[0]
        assert result["loss"] == pytest.approx(reference["loss"], rel=1e-3)


@pytest.mark.slow
def test_compiled_blocks_give_the_same_weights_on_any_layout(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    hashes = set()
    for count, sharding, shard_ranks in [(1, "none", 0), (2, "zero3", 0), (4, "zero3", 2)]:
        spec = a_run(dataset, tmp_path / f"{count}")
        spec = on_layout(replace_at(spec, "runtime.compile", True), sharding, shard_ranks)
        hashes.add(ranks.run(count, train_on_this_rank, spec)[0]["weights_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((1, "none", 0), marks=pytest.mark.slow),
        pytest.param((3, "zero3", 0), marks=pytest.mark.slow),
        (4, "zero2", 2),
    ],
)
def test_bf16_compute_with_fp32_masters_keeps_the_promise(
    layout: tuple[int, str, int], ranks: Ranks, dataset: Path, bf16_reference: str, tmp_path: Path
) -> None:
    spec = on_layout(replace_at(a_run(dataset, tmp_path / "run"), "precision.compute", "bf16"), *layout[1:])
    assert ranks.run(layout[0], train_on_this_rank, spec)[0]["weights_sha256"] == bf16_reference
    tier = DiskTier(tmp_path / "run" / "checkpoints")
    assert digest_checkpoint(tier, tier.steps()[-1]) == bf16_reference


@pytest.fixture(scope="module")
def bf16_reference(ranks: Ranks, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the run in bf16 on two ranks."""
    spec = replace_at(a_run(dataset, tmp_path_factory.mktemp("bf16") / "run"), "precision.compute", "bf16")
    return str(ranks.run(2, train_on_this_rank, spec)[0]["weights_sha256"])
