"""The C kernels give the stored bits on this processor, without AVX-512, without vectors, and on 64-bit Arm, by a program without PyTorch (``bits.c``).

Compiled with warnings as errors and with the options of the package. Other processors are emulated: x86-64 with AVX2 and without AVX-512, on which the
package's own build chooses its AVX2 kernels, and 64-bit Arm. An emulator keeps the bits and not the speed, nor Arm's weak memory order.
The C++ file needs PyTorch's library to run: for Arm its syntax and types are checked.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.common.instruction_sets import emulated_haswell
from phalanx.hardware.kernels.compiler import BUILDS, OPTIONS, compiled
from phalanx.hardware.portable.build import library_file

pytestmark = pytest.mark.processors

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "src" / "phalanx" / "hardware"
SOURCES = (
    HERE / "bits.c",
    *(
        KERNELS / "portable" / f"{name}.c"
        for name in ("products", "products_fp64", "attention", "sums", "layer_step")
    ),
    *(
        KERNELS / "portable" / "functions" / f"{name}.c"
        for name in ("functions", "functions_avx512", "functions_fp64", "slopes")
    ),
    *(KERNELS / "kernels" / name for name in ("host.c", "bins.c", "layers.c")),
)
ALONE = SOURCES[-3:]
"""Sources that are a library each."""
WARNINGS = ("-Wall", "-Wextra", "-Werror")
STORED = dict(line.split() for line in (HERE / "bits.txt").read_text().splitlines())


def digests(
    compiler: str, folder: Path, *, build: str = "", emulator: tuple[str, ...] = ()
) -> dict[str, str]:
    """Compile the program with the options of ``build``, run it, and return its digests by name."""
    program = folder / "bits"
    options = [option for option in OPTIONS if option not in ("-shared", "-fPIC")]
    command = [
        *(compiler, *options, *WARNINGS, *BUILDS[build]),
        *("-I", str(KERNELS), "-I", str(HERE)),
        *map(str, SOURCES),
        *("-static", "-o", str(program), "-lm"),
    ]
    compiling = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert compiling.returncode == 0, compiling.stderr[-3000:]
    run = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False, timeout=280)
    assert run.returncode == 0, run.stderr
    return dict(line.split() for line in run.stdout.splitlines())


def compiler_here(*machines: str) -> str:
    """Return this machine's C compiler; skip the test on other machines than ``machines``."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or platform.machine() not in machines:
        pytest.skip(f"needs a C compiler on {' or '.join(machines)}")
    return compiler


def test_kernels_have_the_stored_bits_on_this_processor(tmp_path: Path) -> None:
    assert digests(compiler_here("x86_64", "aarch64"), tmp_path) == STORED


@pytest.mark.parametrize("build", ["avx2", "plain"])
def test_kernels_without_the_widest_vectors_have_the_stored_bits(build: str, tmp_path: Path) -> None:
    assert digests(compiler_here("x86_64"), tmp_path, build=build) == STORED


def test_kernels_have_the_stored_bits_on_a_processor_without_avx_512(tmp_path: Path) -> None:
    compiler, emulator = compiler_here("x86_64"), emulated_haswell()
    if not emulator:
        pytest.skip("needs Debian's qemu-user-static (make servers)")
    assert digests(compiler, tmp_path, emulator=emulator) == STORED


def test_kernels_have_the_stored_bits_on_64_bit_arm(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip(
            "needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static (make servers)"
        )
    assert digests(compiler, tmp_path, emulator=(emulator,)) == STORED


@pytest.mark.parametrize(("build", "vectors"), [("", {"ymm", "zmm"}), ("avx2", {"ymm"}), ("plain", set())])
def test_libraries_of_a_build_have_no_wider_vectors_than_its_name(
    build: str, vectors: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_here("x86_64")
    disassembler = shutil.which("objdump")
    if disassembler is None:
        pytest.skip("needs objdump (Debian's binutils)")
    monkeypatch.setenv("PHALANX_KERNELS", build)
    for library in (library_file(), *map(compiled, ALONE)):
        command = [disassembler, "--disassemble", "--no-show-raw-insn", str(library)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert {register for register in ("ymm", "zmm") if f"%{register}" in code} == vectors, library.name


def test_the_file_that_registers_the_kernels_is_valid_on_64_bit_arm() -> None:
    compiler, package = shutil.which("aarch64-linux-gnu-g++"), importlib.util.find_spec("torch")
    if compiler is None or package is None or package.origin is None:
        pytest.skip("needs PyTorch and Debian's g++-aarch64-linux-gnu")
    options = [option for option in OPTIONS if option != "-shared"]
    # Headers of PyTorch are the system's here: their warnings are not ours.
    includes = ("-isystem", str(Path(package.origin).parent / "include"))
    source = KERNELS / "portable" / "registered.cpp"
    command = [compiler, *options, *WARNINGS, *includes, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
