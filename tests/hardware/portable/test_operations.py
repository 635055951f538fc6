"""A process with portable numerics computes with its kernels alone, and is refused where it could not have its bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.hardware.portable import checks, operations
from phalanx.hardware.portable.checks import computations, expected, release
from phalanx.run.rules.portable import ENVIRONMENT, NotPortableError

PROGRAM = """
import json, sys, torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
torch.set_num_threads(1)
from phalanx.hardware.portable import checks, library, operations
operations.begin()
operations.begin()
digests = checks.digests()
torch.save({name: compute() for name, compute in checks.computations()}, sys.argv[1])

products = []
multiply = library.multiply
library.multiply = lambda left, right: products.append(tuple(left.shape)) or multiply(left, right)
a, b, v = torch.ones(2, 48), torch.ones(48, 24), torch.ones(48)
a @ b, F.linear(a, b.t()), F.linear(a, b.t(), torch.ones(24)), a @ v, v @ v
torch.einsum("bij,bjk->bik", a[None], b[None]), torch.mm(a, b, out=torch.empty(2, 24))
torch.baddbmm(torch.ones(1, 2, 24), a[None], b[None]), torch.addmv(torch.ones(2), a, v)
torch.ones(2, 24).addmm_(a, b)
F.grouped_mm(a, b[None], offs=torch.tensor([2], dtype=torch.int32))
x = torch.full((2, 2), 2.0)
half = torch.addmm(torch.full((2, 2), torch.nan), x, x, beta=0, alpha=0.5)
roots = [x.sqrt(), x.clone().sqrt_(), torch.sqrt(x, out=torch.empty(0)), torch._foreach_sqrt([x])[0]]
strided = torch.arange(6.0).view(2, 3).t().sqrt()
counted, refused = len(products), checks.wrong()
torch.set_num_threads(2)
refused_of_two_threads = checks.wrong()
print(json.dumps({
    "digests": digests,
    "products": counted,
    "half": half.tolist(),
    "roots": [root.tolist() for root in roots],
    "strided": strided.pow(2).round().tolist(),
    "refused": refused,
    "refused of two threads": refused_of_two_threads,
    "threads": torch.get_num_threads(),
}))
"""


@pytest.fixture
def fit_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has the instructions, whichever this one is."""
    monkeypatch.setattr(operations, "unfit_processor", lambda: "")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the program puts what it has computed."""
    return tmp_path_factory.mktemp("portable") / "results.pt"


@pytest.fixture(scope="module")
def found(results: Path) -> dict[str, object]:
    if reason := operations.unfit_processor():
        pytest.skip(f"portable numerics needs an x86-64 processor with AVX2 and FMA, and {reason}")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(operations.__file__).parents[3])}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(results)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answer: dict[str, object] = json.loads(process.stdout)
    return answer


def test_the_bits_are_those_that_are_written_down(found: dict[str, object]) -> None:
    assert found["digests"] == expected(release()), (
        "take the digests of a new PyTorch with python -m bench.reproduce.portable --digests"
    )
    assert found["refused"] == []


def test_a_release_that_nobody_has_tried_is_checked_too() -> None:
    computed = dict.fromkeys(checks.DIGESTS, "other")
    assert checks.differences(computed, expected("9.9")) == list(checks.DIGESTS)
    known = expected("9.9", {"9.9": {"sums": "other"}})
    assert checks.differences(computed, known) == [name for name in checks.DIGESTS if name != "sums"]


def test_a_process_of_several_threads_is_tried_by_the_same_bits_and_keeps_its_threads(
    found: dict[str, object],
) -> None:
    # PyTorch deals elements over threads, and computes those that are left over behind whole vectors by other code.
    assert found["refused of two threads"] == []
    assert found["threads"] == 2


def test_every_kind_of_product_goes_through_the_portable_kernel(found: dict[str, object]) -> None:
    assert found["products"] == 12


def test_factors_and_a_total_that_does_not_count_are_taken_as_pytorch_takes_them(
    found: dict[str, object],
) -> None:
    assert found["half"] == [[4.0, 4.0], [4.0, 4.0]]


def test_square_roots_are_correctly_rounded_in_every_form(found: dict[str, object]) -> None:
    root = torch.tensor(2.0, dtype=torch.float64).sqrt().float().item()
    assert found["roots"] == [[[root, root], [root, root]]] * 4
    assert found["strided"] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.usefixtures("found")
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


@pytest.mark.usefixtures("fit_processor")
def test_a_variable_that_says_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "MKL_CBWR": "AVX512"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotPortableError, match=r"MKL_CBWR=COMPATIBLE; MKL_CBWR=AVX512"):
        operations.begin()


@pytest.mark.usefixtures("fit_processor")
def test_a_process_that_uses_another_instruction_set_already_is_refused_and_keeps_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with pytest.raises(NotPortableError, match="PyTorch uses AVX512 already"):
        operations.begin()
    assert not set(ENVIRONMENT) & set(os.environ)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_processor_without_the_instructions_is_refused_and_keeps_its_environment(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(operations.platform, "machine", lambda: machine)
    monkeypatch.setattr(operations, "_processor_flags", lambda: {"sse4_2", "avx"})
    with pytest.raises(NotPortableError, match="needs an x86-64 processor with AVX2 and FMA"):
        operations.begin()
    assert not set(ENVIRONMENT) & set(os.environ)


@pytest.mark.usefixtures("fit_processor")
def test_a_machine_without_a_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise operations.NoHostKernelsError("there is no C compiler (cc, gcc or clang)")

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(operations.library, "load", none)
    with pytest.raises(NotPortableError, match="install gcc or clang"):
        operations.begin()
