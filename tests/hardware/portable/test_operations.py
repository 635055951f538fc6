"""A process with portable numerics computes with its kernels alone, and is refused where it could not have its bits."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from phalanx.hardware.portable import build, operations
from phalanx.hardware.portable.operations import computations
from phalanx.run.rules import NotPortableError

PROGRAM = """
import json, sys, warnings, torch
warnings.simplefilter("error")
torch.set_num_threads(int(sys.argv[2]))
from phalanx.hardware.portable import build, operations
operations.begin()
operations.begin()
torch.save({name: compute() for name, compute in operations.computations()}, sys.argv[1])
print(json.dumps({"digests": operations.digests(), "threads": torch.get_num_threads()}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program puts what it has computed."""
    return tmp_path_factory.mktemp("portable") / "results.pt"


def run_program(results: Path, threads: int, **environment: str) -> dict[str, object]:
    if reason := operations.unfit_processor():
        pytest.skip(f"portable numerics needs AVX2 and FMA, or a 64-bit Arm processor, and {reason}")
    operations.prepare()  # the first process of a machine prints that it compiles them
    path = str(Path(operations.__file__).parents[3])
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(results), str(threads)],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    answer: dict[str, object] = json.loads(process.stdout)
    return answer


@pytest.fixture(scope="module")
def printed(results: Path) -> dict[str, object]:
    return run_program(results, 1)


def test_the_bits_are_those_that_are_written_down(printed: dict[str, object]) -> None:
    assert printed["digests"] == operations.DIGESTS, (
        "after a deliberate change of the definition: python -m bench.reproduce.portable --digests"
    )


@pytest.mark.parametrize(
    ("threads", "capability"), [(3, "default"), (8, "avx2" if platform.machine() == "x86_64" else "default")]
)
def test_neither_threads_nor_the_instructions_that_pytorch_uses_enter_the_bits(
    threads: int, capability: str, tmp_path: Path
) -> None:
    printed = run_program(tmp_path / "results.pt", threads, ATEN_CPU_CAPABILITY=capability)
    assert printed == {"digests": operations.DIGESTS, "threads": threads}


def test_a_computation_with_other_bits_is_named() -> None:
    computed = {**operations.DIGESTS, "sums": "other"}
    assert operations.differences(computed) == ["sums"]
    assert operations.differences(operations.DIGESTS) == []


@pytest.mark.usefixtures("printed")
def test_what_is_tried_is_near_what_pytorch_computes_by_itself(results: Path) -> None:
    # The digests alone would hold a wrong kernel to its own bits.
    portable = torch.load(results, weights_only=True)
    for name, compute in computations():
        native = compute()
        assert bool(native.isfinite().all()), name
        relative = 2**-7 if name == "bf16 products" else 2**-17
        assert torch.allclose(
            portable[name], native, rtol=relative, atol=float(relative * native.abs().max())
        ), name


@pytest.mark.parametrize("machine", ["x86_64", "riscv64"])
def test_a_processor_without_the_instructions_is_refused(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_processor_flags", lambda: {"sse4_2", "avx"})
    with pytest.raises(
        NotPortableError, match="needs an x86-64 processor with AVX2 and FMA, or a 64-bit Arm one"
    ):
        operations.prepare()


def test_the_error_on_a_machine_without_a_compiler_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if reason := operations.unfit_processor():
        pytest.skip(reason)
    operations.library.load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NotPortableError, match=r"with gcc and g\+\+.*no C compiler"):
        operations.prepare()


PROGRAM_THAT_ENDS = """
from phalanx.hardware.portable import operations
native = operations.digests()
operations.begin()
operations.end()
assert operations.digests() == native
assert not operations.begun()
operations.begin()
assert operations.digests() == operations.DIGESTS
"""


PROGRAM_THAT_IS_REFUSED = """
import pytest, torch
from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.portable import operations
from phalanx.run.rules import NotPortableError

def refuse(namespace):
    raise NoHostKernelsError("PyTorch 9.9 refuses a kernel")

native = operations.digests()
operations.library.register = refuse
with pytest.raises(NotPortableError, match="PyTorch 9.9 refuses a kernel"):
    operations.begin()
assert not operations.begun()
assert torch.backends.mkldnn.enabled
assert operations.digests() == native
"""


def test_a_release_of_pytorch_that_refuses_a_kernel_leaves_all_kernels_native() -> None:
    if reason := operations.unfit_processor():
        pytest.skip(reason)
    subprocess.run([sys.executable, "-c", PROGRAM_THAT_IS_REFUSED], check=True)


PROGRAM_IN_INFERENCE = """
import torch
from phalanx.hardware.portable import operations
with torch.inference_mode():
    operations.begin()
assert operations.digests() == operations.DIGESTS
operations.end()
operations.DIGESTS["sums"] = "other"
for _ in range(2):
    try:
        operations.begin()
    except Exception:
        assert not operations.begun()
    else:
        raise AssertionError
"""


def test_a_process_begins_in_inference_too_and_not_where_a_check_fails() -> None:
    if reason := operations.unfit_processor():
        pytest.skip(reason)
    path = str(Path(operations.__file__).parents[3])
    subprocess.run(
        [sys.executable, "-c", PROGRAM_IN_INFERENCE], env={**os.environ, "PYTHONPATH": path}, check=True
    )


def test_kernels_that_are_withdrawn_leave_pytorchs_own() -> None:
    if reason := operations.unfit_processor():
        pytest.skip(reason)
    subprocess.run([sys.executable, "-c", PROGRAM_THAT_ENDS], check=True)
