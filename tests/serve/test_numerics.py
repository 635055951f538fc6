"""The numerics of a service: what their id names, whose bits they are, and which process has portable kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forked_python
from phalanx.hardware.portable import build, operations
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec, ParallelSpec, PrecisionSpec, RunSpec, RuntimeSpec
from phalanx_serve.numerics import begin_exact, bits_of, numerics_id
from phalanx_serve.traffic.events import NotExactError

RUN = RunSpec(
    model=resolve(ModelSpec(layers=1, dim=32, heads=2, vocab_size=64)),
    runtime=RuntimeSpec(numerics="portable", device="cpu"),
    precision=PrecisionSpec(compute="fp32"),
)


def test_the_id_of_exact_numerics_names_all_that_decides_bits() -> None:
    ids = [
        numerics_id("exact", torch.float32),
        numerics_id("exact", torch.bfloat16),
        numerics_id("exact", torch.float32, kept="int8"),
        numerics_id("exact", torch.float32, absorbed=True),
        numerics_id("fast", torch.float32),
    ]
    assert len(set(ids)) == len(ids)


def test_the_id_of_exact_numerics_is_that_of_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fast = numerics_id("exact", torch.float32), numerics_id("fast", torch.float32)
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "__version__", "9.0")
    torch.set_num_threads(threads + 1)
    try:
        assert numerics_id("exact", torch.float32) == exact
        assert numerics_id("fast", torch.float32) != fast
    finally:
        torch.set_num_threads(threads)


def test_the_form_of_latent_attention_is_no_part_of_fast_numerics_which_take_either() -> None:
    assert numerics_id("fast", torch.float32, absorbed=True) == numerics_id("fast", torch.float32)


def test_the_bits_of_a_portable_run_in_its_own_format_are_the_trainers() -> None:
    assert bits_of("exact", RUN, "float32") == "trainer"
    assert bits_of("fast", RUN, "float32") == "unspecified"


@pytest.mark.parametrize(
    "changed",
    [
        lambda run: replace(run, runtime=RuntimeSpec(numerics="native", device="cpu")),
        lambda run: replace(run, precision=PrecisionSpec(compute="bf16")),
        lambda run: replace(run, parallel=ParallelSpec(tensor=2)),
    ],
    ids=["native numerics", "another format", "tensor parallelism"],
)
def test_the_bits_of_a_run_that_was_trained_otherwise_are_the_requests(
    changed: Callable[[RunSpec], RunSpec],
) -> None:
    assert bits_of("exact", changed(RUN), "float32") == "request"


def test_the_bits_of_narrow_keys_and_values_are_the_requests() -> None:
    assert bits_of("exact", RUN, "float32", kept="int8") == "request"


def test_a_processor_without_portable_kernels_is_refused_with_fast_numerics_as_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(
        NotExactError, match=r"numerics cannot be exact: .*this one is riscv64; or serve with --numerics fast"
    ):
        begin_exact()


PROGRAM = """
import sys
from phalanx.hardware.portable.operations import begun
from phalanx_serve.served.of_run import open_engine
from phalanx_serve.served.served_run import ServedRun
open_engine(ServedRun(sys.argv[1], None, "float32", 64, 1 << 22, 64, sys.argv[2]))
print(begun())
"""


@pytest.mark.parametrize(("numerics", "begun"), [("exact", "True"), ("fast", "False")])
@pytest.mark.parametrize("trained", ["native", "portable"])
def test_exact_serving_alone_computes_with_portable_kernels_whatever_a_run_was_trained_with(
    tmp_path: Path, trained: str, numerics: str, begun: str
) -> None:
    from serve.packed_runs import DENSE, make_run

    if reason := operations.unfit_processor():
        pytest.skip(reason)
    run = make_run(tmp_path / "run", DENSE)
    file = run / "run.toml"
    file.write_text(file.read_text() + f'\n[runtime]\nnumerics = "{trained}"\n')
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(run), numerics]
    with forked_python.Popen(
        command, env=forked_python.ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read().split() == [begun]
    assert process.returncode == 0
