"""Probes of arithmetic: the same on like machines, and machines with other kernels are named and refused."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forked_python import Popen
from phalanx.data.stored.index import read_index
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message, RunStarted
from phalanx.run.directory.files import create_once
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import MlaSpec, RunSpec
from phalanx.train import assemble
from phalanx.train.lifecycle.ending import read_failure
from phalanx.train.measure.numerics import (
    MixedMachinesError,
    Numerics,
    differing,
    probe,
    require_equal,
    require_first,
)
from phalanx.train.start.open_run import open_run
from ranks import Ranks
from run.specs import replace_at
from tiny_runs import tiny_run, train_on_this_rank

CPU = torch.device("cpu")


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"),
    reason="this machine has one set of kernels",
)
def test_a_rank_that_uses_other_kernels_is_named_and_the_start_refused(dataset: Path, tmp_path: Path) -> None:
    spec = tiny_run(dataset, tmp_path / "run")
    run = open_run(spec, read_index(dataset).fingerprint, dataset)
    os.close(run.lock_fd)
    command = [sys.executable, "-m", "phalanx.train.lifecycle.worker", spec.run_dir, "--attempt", "0"]
    place = {
        **os.environ,
        "PHALANX_RANKS": "2",
        "PHALANX_LAUNCHER": str(os.getpid()),
        "PHALANX_MEETING_POINT": (tmp_path / "store").as_uri(),
    }
    of_rank = [{"PHALANX_RANK": "0"}, {"PHALANX_RANK": "1", "ATEN_CPU_CAPABILITY": "default"}]
    processes = [Popen(command, env=place | own, stderr=subprocess.DEVNULL) for own in of_rank]
    assert [process.wait(240) for process in processes] == [1, 1]
    failures = [read_failure(run.directory.log(0, rank)) for rank in (0, 1)]
    for failure in failures:
        assert failure is not None
        assert failure.kind == "MixedMachinesError"
        assert re.search(r"rank 1 \(.*\) computes .*softmax.* with other bits than rank 0", failure.message)
        assert "runtime.mixed_machines = true" in failure.message


def trained_on_mixed_machines(spec: RunSpec) -> bool:
    """Trains where rank 1's probes give something else; True if the run was finished."""
    right = assemble.probe

    def other(spec: RunSpec, device: torch.device) -> Numerics:
        numerics = right(spec, device)
        return Numerics("other", {name: f"{dist.get_rank():02x}" for name in numerics.probes})

    assemble.probe = other
    try:
        return train_on_this_rank(spec) is not None
    finally:
        assemble.probe = right


def test_mixed_machines_train_together_if_the_run_file_allows_it(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", steps=1)
    mixed = replace_at(spec, "runtime.mixed_machines", True)
    assert ranks.run(2, trained_on_mixed_machines, mixed) == [True, True]


def test_probes_are_the_same_again_and_are_the_shapes_and_format_of_the_run(
    dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", micro_batch_size=1)
    probed = probe(spec, CPU)
    assert probed == probe(spec, CPU)
    assert {"exp", "softmax", "norm", "attention", "square root", "product 24x64x32"} <= probed.probes.keys()
    narrow = probe(replace_at(spec, "precision.compute", "bf16"), CPU)
    assert "product 24x64x32" in differing(probed, narrow)


def test_probes_have_the_shapes_of_a_lane_and_a_tile_where_the_run_computes_by_these(
    dataset: Path, tmp_path: Path
) -> None:
    # Width 32, inner width 64, micro-batches of 24 tokens.
    spec = tiny_run(dataset, tmp_path / "run", micro_batch_size=1)
    cut = replace_at(replace_at(spec, "model.lanes", 4), "model.context_tiles", 2)
    names = probe(cut, CPU).probes.keys()
    assert {"product 12x32x16", "product 12x16x32"} <= names, "up and down of a lane's inner elements"
    assert not any(name.startswith("product 24x") or "64" in name for name in names)


def test_products_by_heads_and_attention_to_latents_are_tried_where_the_run_has_them(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", micro_batch_size=1)
    mla = MlaSpec(kv_rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=16)
    latent = replace_at(
        replace_at(replace_at(spec, "model.head_dim", 0), "model.kv_heads", 0), "model.mla", mla
    )
    absorbed = replace_at(latent, "model.mla", dataclasses.replace(mla, absorbed=True))
    others, absorbed_probe = probe(latent, CPU), probe(absorbed, CPU)
    assert {name: absorbed_probe.probes[name] for name in others.probes} == others.probes
    own = {"heads' products 4x24x16", "attention to latents 4x24x16"}
    assert absorbed_probe.probes.keys() - others.probes.keys() == own
    assert probe(absorbed, CPU) == absorbed_probe

    # A machine that adds up in another order where heads have matrices of their own, or are as wide as latents.
    attend = F.scaled_dot_product_attention

    multiply = torch.bmm

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        return multiply(rows.flip(2), matrices.flip(1))

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if query.shape[-1] == 24:
            query, key = query.flip(3), key.flip(3)
        return attend(query, key, value, **options)

    monkeypatch.setattr(torch, "bmm", product)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    assert set(differing(absorbed_probe, probe(absorbed, CPU))) == own
    assert differing(others, probe(latent, CPU)) == []


@pytest.mark.parametrize(("lanes", "grouped"), [(0, True), (4, False)])
def test_attention_to_latents_is_probed_as_a_lane_computes_it(
    lanes: int, grouped: bool, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace_at(tiny_run(dataset, tmp_path / "run"), "model.lanes", lanes)
    mla = MlaSpec(kv_rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=16, absorbed=True)
    latent = replace_at(
        replace_at(replace_at(spec, "model.head_dim", 0), "model.kv_heads", 0), "model.mla", mla
    )
    calls, attend = [], F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if query.shape[-1] == 24:
            calls.append((query.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    probe(latent, CPU)
    assert calls == [(spec.model.heads // (lanes or 1), grouped)]


def test_only_probes_that_both_machines_computed_are_compared() -> None:
    older = Numerics("one", {"exp": "00", "product 24x64x32": "02"})
    assert differing(older, Numerics("one", {"exp": "00", "product 24x16x32": "03"})) == []
    assert differing(older, Numerics("two", {"exp": "01"})) == ["exp"]


def test_probes_of_a_large_model_are_cut_down(dataset: Path, tmp_path: Path) -> None:
    spec = tiny_run(dataset, tmp_path / "run", micro_batch_size=1)
    model = dataclasses.replace(spec.model, dim=16384, heads=128, kv_heads=8, head_dim=128, ffn_dim=53248)
    names = [
        name
        for name in probe(dataclasses.replace(spec, model=model), CPU).probes
        if name.startswith("product")
    ]
    assert names == ["product 24x4096x256"]


def test_all_processes_of_a_start_are_compared_with_the_first(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    directory.record.write_text('{"attempts": 1}')
    right = Numerics("one", {"exp": "00", "softmax": "01"})
    require_first(right, directory, "node-0")
    require_first(Numerics("two", right.probes), directory, "node-1")
    with pytest.raises(MixedMachinesError, match=r"\(node-2, three\) computes softmax .*\(node-0, one\)"):
        require_first(Numerics("three", {"exp": "00", "softmax": "02"}), directory, "node-2")
    directory.record.write_text('{"attempts": 2}')  # another start may be on other machines
    require_first(Numerics("three", {"exp": "00", "softmax": "02"}), directory, "node-2")


def test_a_file_that_is_made_once_keeps_its_first_content(tmp_path: Path) -> None:
    assert create_once(tmp_path / "file", b"first") == b"first"
    assert create_once(tmp_path / "file", b"second") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def with_the_probes_of_another_machine(spec: RunSpec) -> None:
    """Rewrites the run's events as if its first start had been on another machine."""
    events = RunDirectory(Path(spec.run_dir)).events
    events.write_text(events.read_text().replace('"exp":"', '"exp":"f'))


def test_a_run_that_resumes_on_another_kind_of_machine_warns(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", steps=4)
    ranks.run(1, train_on_this_rank, spec, 4)
    with_the_probes_of_another_machine(spec)
    ranks.run(1, train_on_this_rank, spec)
    bodies = [event.body for event in read_events(tmp_path / "run" / "events.jsonl")]
    messages = [body.text for body in bodies if isinstance(body, Message)]
    assert any(
        "this machine computes exp with other bits than that of the start before" in text for text in messages
    )
    starts = [body for body in bodies if isinstance(body, RunStarted)]
    assert [len(start.environment["numerics"]) > 8 for start in starts] == [True, True]


def refused(device: torch.device) -> str:
    mine = Numerics(f"machine-{dist.get_rank()}", {"exp": "0a", "norm": f"{dist.get_rank() // 2:02x}"})
    with pytest.raises(MixedMachinesError) as failure:
        require_equal(mine, device)
    return str(failure.value)


def test_every_rank_names_all_that_differ_from_the_first(ranks: Ranks) -> None:
    errors = ranks.run(3, refused, CPU)
    assert len(set(errors)) == 1
    assert "rank 2 (machine-2) computes norm with other bits than rank 0 (machine-0)" in errors[0]
    assert "rank 1" not in errors[0]
