"""The C kernels give the stored bits on this processor and on 64-bit Arm, by a program without PyTorch (``bits.c``).

Compiled with warnings as errors and with the options of the package. The Arm program is cross-compiled and runs in an emulator, which keeps the bits
and not the speed, nor the weak memory order, of a real processor.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from phalanx.hardware.kernels.compiler import OPTIONS

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
WARNINGS = ("-Wall", "-Wextra", "-Werror")
STORED = dict(line.split() for line in (HERE / "bits.txt").read_text().splitlines())


def digests(compiler: str, folder: Path, emulator: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile the program, run it, and return its digests by name."""
    program = folder / "bits"
    options = [option for option in OPTIONS if option not in ("-shared", "-fPIC")]
    includes = ("-I", str(KERNELS), "-I", str(HERE))
    command = [
        compiler,
        *options,
        *WARNINGS,
        *includes,
        *map(str, SOURCES),
        "-static",
        "-o",
        str(program),
        "-lm",
    ]
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False, timeout=280)
    compiled = run(command)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    done = run([*emulator, str(program)])
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_kernels_have_the_stored_bits_on_this_processor(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("needs a C compiler on x86-64 or 64-bit Arm")
    assert digests(compiler, tmp_path) == STORED


def test_kernels_have_the_stored_bits_on_64_bit_arm(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip(
            "needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static (make servers)"
        )
    assert digests(compiler, tmp_path, (emulator,)) == STORED
