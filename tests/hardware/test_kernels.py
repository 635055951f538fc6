"""Kernels that go over memory once have the bits of the chain of PyTorch operations, and where there are none a warning is logged."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.hardware.kernels import choose, compiler
from phalanx.hardware.kernels.choose import fused_kernels, kernels_for
from phalanx.hardware.kernels.reference import REFERENCE, Kernels, UpdateFactors
from phalanx.parallel.reduction.reproducible_sums import extraction_constants, largest
from phalanx.run.directory.files import temporary_home

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 2600), min_size=1, max_size=3)
offsets = st.integers(0, 9)
factors = st.builds(
    UpdateFactors,
    gradient_scale=st.floats(0.0, 4.0),
    keep_mean=st.floats(0.5, 0.99),
    new_mean=st.floats(0.01, 0.5),
    keep_square=st.floats(0.5, 0.99),
    new_square=st.floats(0.01, 0.5),
    root_divisor=st.floats(0.1, 1.0),
    eps=st.floats(1e-12, 1e-2),
    rate=st.floats(1e-6, 1.0),
    decay=st.one_of(st.just(1.0), st.floats(0.5, 1.0)),
)


@pytest.fixture(scope="module", autouse=True)
def _has_host_kernels() -> None:
    assert isinstance(fused_kernels(CPU), choose.HostKernels), "these tests need a C compiler"


def any_numbers(lengths: Sequence[int], offset: int, seed: int) -> list[Tensor]:
    """Tensors that begin ``offset`` elements into their memory, of fp32 numbers of all sizes and kinds: each bit by lot."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-(2**31), 2**31, (length + offset,), generator=generator, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)[offset:]
        for length in lengths
    ]


def bits(tensor: Tensor) -> list[int]:
    """The bits of fp32 numbers, with one value for all that are not a number: IEEE 754 leaves open which of them an operation gives."""
    return tensor.where(~tensor.isnan(), torch.nan).view(torch.int32).tolist()


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_LEAST_SHARE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.usefixtures("_threads")
class TestOnACpu:
    @given(sizes, offsets, st.integers(0, 1000), factors)
    def test_an_update_has_the_bits_of_the_reference(
        self, lengths: list[int], offset: int, seed: int, numbers: UpdateFactors
    ) -> None:
        columns = [any_numbers(lengths, offset, 4 * seed + column) for column in range(4)]
        updated = []
        for kernels in (REFERENCE, fused_kernels(CPU)):
            copies = [[tensor.clone() for tensor in column] for column in columns]
            kernels.adamw(copies[0], copies[1], copies[2], copies[3], numbers)
            updated.append([bits(tensor) for column in copies for tensor in column])
        assert updated[0] == updated[1]

    @given(sizes, offsets, st.integers(0, 1000), st.integers(-120, 120))
    def test_sums_of_squares_have_the_bits_of_the_reference(
        self, lengths: list[int], offset: int, seed: int, exponent: int
    ) -> None:
        tensors = [
            tensor.nan_to_num(nan=0.0).clamp(-(2.0**exponent), 2.0**exponent)
            for tensor in any_numbers(lengths, offset, seed)
        ]
        peak = largest(tensors, CPU).item()
        constants = extraction_constants(peak or 1.0, max(1, sum(lengths)))
        sums = [
            kernels.extracted_sums(tensors, constants, CPU).tolist()
            for kernels in (REFERENCE, fused_kernels(CPU))
        ]
        assert sums[0] == sums[1]

    @given(sizes, offsets, st.integers(0, 1000))
    def test_the_largest_magnitude_is_the_reference_s_or_not_a_number(
        self, lengths: list[int], offset: int, seed: int
    ) -> None:
        tensors = any_numbers(lengths, offset, seed)
        finite = [tensor.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0) for tensor in tensors]
        infinite = [tensor.nan_to_num(nan=-torch.inf) for tensor in tensors]
        for numbers in (tensors, finite, infinite):
            peaks = [kernels.peak(numbers, CPU) for kernels in (REFERENCE, fused_kernels(CPU))]
            assert torch.equal(peaks[0].nan_to_num(nan=-1.0), peaks[1].nan_to_num(nan=-1.0))


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(1, 9))
def test_shares_hold_every_element_once_and_are_nearly_equal(lengths: list[int], threads: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_LEAST_SHARE", 100)
        shares = choose.shares_of(lengths, threads)
    covered = [
        (tensor, first + i) for share in shares for tensor, first, length in share for i in range(length)
    ]
    assert covered == [(tensor, i) for tensor, length in enumerate(lengths) for i in range(length)]
    share_lengths = [sum(length for *_, length in share) for share in shares]
    assert len(shares) <= threads
    assert all(abs(a - b) <= 1 for a, b in itertools.pairwise(share_lengths))
    assert len(shares) <= 1 or min(share_lengths) >= 100


def test_other_formats_than_fp32_are_left_to_the_reference() -> None:
    wide = torch.zeros(3)
    assert kernels_for(CPU, [wide, wide.bfloat16()]) is REFERENCE
    assert kernels_for(CPU, [torch.zeros(4, 4).t()[1:]]) is REFERENCE
    assert kernels_for(CPU, [wide]) is not REFERENCE


def test_without_a_compiler_the_reference_runs_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert fused_kernels.__wrapped__(CPU) is REFERENCE
    assert "there is no C compiler" in caplog.text


def test_without_a_cache_folder_that_can_be_written_a_library_is_in_a_temporary_folder_of_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "phalanx").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = compiler.compiled(choose.SOURCE)
    assert library.is_relative_to(temporary_home())
    assert temporary_home().stat().st_mode & 0o777 == 0o700
    assert compiler.compiled(choose.SOURCE) == library


class OneBitOff(Kernels):
    def adamw(self, weights: list[Tensor], *others: Any) -> None:
        super().adamw(weights, *others)
        weights[0].view(torch.int32)[7] ^= 1


def test_kernels_with_other_bits_are_not_used_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "_ways", lambda device: [OneBitOff])  # noqa: ARG005
    kernels: Kernels = fused_kernels.__wrapped__(CPU)
    assert kernels is REFERENCE
    assert "updates had other bits" in caplog.text


def test_of_many_ranks_that_start_at_once_one_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []

    def compile_slowly(command: list[str], **_: Any) -> None:
        made.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"half")
        threading.Event().wait(0.05)
        Path(command[command.index("-o") + 1]).write_bytes(b"whole")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler.subprocess, "run", compile_slowly)
    contents: list[bytes] = []
    ranks = [
        threading.Thread(target=lambda: contents.append(compiler.compiled(choose.SOURCE).read_bytes()))
        for _ in range(8)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert contents == [b"whole"] * 8
    assert len(made) == 1


def test_a_library_is_on_the_disk_before_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced = []

    def compile_quickly(command: list[str], **_: Any) -> None:
        Path(command[command.index("-o") + 1]).write_bytes(b"whole")

    def sync(descriptor: int) -> None:
        named = any((tmp_path / "phalanx" / "kernels").glob("*.so"))
        synced.append((os.pread(descriptor, 9, 0), named))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler.subprocess, "run", compile_quickly)
    monkeypatch.setattr(compiler.os, "fsync", sync)
    compiler.compiled(choose.SOURCE)
    assert synced == [(b"whole", False)]


def test_a_library_is_another_one_when_a_header_changes_that_a_source_or_another_header_includes(
    tmp_path: Path,
) -> None:
    files = {
        "sum.c": '#include <stdint.h>\n#include "near.h"\n',
        "beside.c": '#include "near.h"\n',
        "near.h": '#include "in/far.h"\n',
        "in/far.h": '#include "../near.h"\n/* one */\n',
        "other.h": "/* included by none */\n",
    }
    (tmp_path / "in").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def library() -> str:
        return compiler.library_name(tmp_path / "sum.c", beside=[tmp_path / "beside.c"])

    first = library()
    for name in files:
        before = library()
        (tmp_path / name).write_text(files[name] + "/* another */\n")
        assert (library() == before) == (name == "other.h"), name
        (tmp_path / name).write_text(files[name])
    assert library() == first


INTERPRETED = """
import torch
from phalanx.hardware.kernels.choose import differences
from phalanx.hardware.kernels.gpu import GpuKernels, add_to_bins
from phalanx.hardware.kernels.reference import Kernels
from phalanx.parallel.reduction.reproducible_sums import matches_operations
# A GPU's roots are rounded correctly, and so are these: fp64 has more than twice the bits.
exact = Kernels(lambda tensors: [tensor.double().sqrt().float() for tensor in tensors])
device = torch.device("cpu")
print(differences(GpuKernels(), device, exact), GpuKernels().peak([], device).item())
print(matches_operations(add_to_bins, device))
"""


def test_the_programs_for_a_gpu_have_the_bits_of_the_reference_in_triton_s_interpreter() -> None:
    pytest.importorskip("triton")
    ended = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "[] 0.0\nTrue\n", ended.stderr


FOR_HOPPER = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phalanx.hardware.kernels import gpu

floats = "scale keep_mean new_mean keep_square new_square root eps rate decay".split()
common = {"table": "*i64", "rows": "i32"}
update = common | dict.fromkeys(floats, "fp32")
peak, sums = common | {"peaks": "*i32"}, common | {"constants": "*fp64", "sums": "*fp64"}
lengths = "gradient_stride elements all_spans first_element first_span spans width".split()
bins = {"gradient": "*fp32", "words": "*i32", "tops": "*i8"} | dict.fromkeys(lengths, "i32")
for program, signature in ((gpu._adamw, update), (gpu._peak, peak), (gpu._extract, sums), (gpu._add, bins)):
    for unit in gpu._UNITS:
        fixed = {"BLOCK": gpu._BLOCK, "TILES": gpu._TILES, "UNIT": unit}
        if program is gpu._add:
            fixed = {"SIZE": 8 * unit, "SPANS": 128 // unit}
        source = ASTSource(program, signature | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        found = re.findall(r"\\b([a-z]+(?:[.][a-z]+)*)[.]f(?:32|64)\\b", made.asm["ptx"])
        operations = sorted({one for one in found if not one.startswith(("ld", "st", "mov", "neg"))})
        print(len(made.asm["cubin"]) > 0, "ld.global.v4" in made.asm["ptx"], *operations)
"""
"""Compiles for a GPU that need not be there, down to its instructions."""


def test_the_programs_for_a_gpu_compile_for_hopper_to_operations_that_each_round_once() -> None:
    pytest.importorskip("triton")
    ended = subprocess.run([sys.executable, "-c", FOR_HOPPER], capture_output=True, text=True)
    # No fma, nothing approximate, and no flushing of small numbers to zero (ftz). Aligned tensors are loaded four elements at a time.
    # A change of sign is exact: some releases of Triton write one where others subtract.
    operations = ["add.rn div.rn mul.rn sqrt.rn sub.rn", "", "add.rn cvt mul.rn sub.rn"]
    expected = [f"True {aligned} {names}".rstrip() for names in operations for aligned in (True, False)]
    expected += 2 * ["True False abs add.rn cvt.rn mul.rn selp setp.lt sub.rn"]
    assert ended.stdout.splitlines() == expected, ended.stderr


def test_each_build_that_the_environment_names_is_a_library_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries = set()
    for build in compiler.BUILDS:
        monkeypatch.setenv("PHALANX_KERNELS", build)
        libraries.add(compiler.compiled(choose.SOURCE))
    assert len(libraries) == len(compiler.BUILDS)


def test_a_build_that_does_not_exist_is_refused_with_the_names_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PHALANX_KERNELS", "avx3")
    with pytest.raises(
        compiler.NoHostKernelsError, match="PHALANX_KERNELS is 'avx3': set it to avx2 or plain"
    ):
        compiler.compiled(choose.SOURCE)


def test_a_notice_is_printed_when_the_compiler_starts_and_not_for_a_library_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        compiler.compiled(choose.SOURCE, notice="compiling once")
    assert capsys.readouterr().err == "compiling once\n"
