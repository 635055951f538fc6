"""Cost of portable numerics on this machine, and a comparison of its bits with those of other processors.

Two processes on this machine, one with PyTorch's own kernels, one with the portable ones, compute the same forward and backward passes in turn; the median of
the paired ratios of processor time is printed, above 1 where portable is faster. Likewise for single products, by a transposed weight as layers
multiply, and for single functions.

``--processor`` runs the computations of ``phalanx.hardware.portable.operations`` and two training steps' worth of gradients on another processor, by
qemu's emulation (Debian's ``qemu-user`` or ``qemu-user-static``): its digests must equal those of this machine. qemu 7.2 emulates no AVX-512.

    python -m bench.reproduce.portable
    python -m bench.reproduce.portable --model llama-100m --rounds 5
    python -m bench.reproduce.portable --threads 2
    python -m bench.reproduce.portable --processor Haswell
    python -m bench.reproduce.portable --digests
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, cast

import torch
import torch.nn.functional as F

from bench.running import run_bench
from phalanx.hardware.portable import operations
from phalanx.model.facts.presets import PRESETS
from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.train.step.loss import summed_cross_entropy

PRODUCTS = (
    (256, 256, 1024),
    (2048, 768, 2304),
    (1024, 1024, 1024),
    (1, 768, 2304),
    (8, 768, 2304),
    (64, 64, 64),
)
"""Rows, inner width and columns of single products, fp32."""
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sums of rows": lambda numbers: numbers.sum(1),
    "softmax": lambda numbers: numbers.softmax(1),
    "log-softmax": lambda numbers: numbers.log_softmax(1),
    "exp": torch.exp,
    "log": torch.log,
    "erf": torch.erf,
    "silu": F.silu,
    "gelu": F.gelu,
}
"""Functions of 256 x 4,096 numbers, fp32."""
VOCABULARY = 4096


def work_of(model: str, tokens: int) -> dict[str, Callable[[], object]]:
    """Return the computations that the two processes do in turn, by name."""
    work: dict[str, Callable[[], object]] = {
        f"{model}, {tokens} tokens, forward and backward": gradients_of(model, tokens)
    }
    for rows, width, columns in PRODUCTS:
        left, weight = torch.randn(rows, width), torch.randn(columns, width)
        times = max(1, 50_000_000 // (rows * width * columns))

        def multiply(left: torch.Tensor = left, weight: torch.Tensor = weight, times: int = times) -> None:
            for _ in range(times):
                left @ weight.t()

        work[f"product {rows} x {width} x {columns}"] = multiply
    numbers, matrix, row = torch.rand(256, 4096), torch.randn(768, 2304), torch.randn(1, 768)
    work["product 1 x 768 x 2304, matrix of whole rows"] = lambda: [row @ matrix for _ in range(30)]
    for name, function in FUNCTIONS.items():
        work[f"{name} of 256 x 4,096"] = partial(function, numbers)
    return work


def gradients_of(model: str, tokens: int) -> Callable[[], str]:
    """Return a function for a forward and backward pass of a preset; it returns the digest of its gradients."""
    spec = resolve(replace(PRESETS[model], vocab_size=VOCABULARY))
    network = Transformer(spec, tokens)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        integers = torch.randint(-512, 512, parameter.shape, generator=generator)
        parameter.data.copy_(integers / 2**15 if parameter.dim() > 1 else torch.ones_like(parameter))
    text = torch.randint(0, VOCABULARY, (1, tokens + 1), generator=generator)

    def compute() -> str:
        network.zero_grad(set_to_none=True)
        loss = network(
            text[:, :-1], lambda hidden, head: summed_cross_entropy(hidden, head, text[:, 1:], 256)
        )
        loss.backward()
        digest = hashlib.sha256()
        for parameter in network.parameters():
            assert parameter.grad is not None
            digest.update(parameter.grad.contiguous().numpy().tobytes())
        return digest.hexdigest()[:14]

    return compute


def serve(model: str, tokens: int) -> None:
    """Run the other process: do the computation that each input line names, and print its seconds of processor time."""
    work = work_of(model, tokens)
    for line in sys.stdin:
        compute = work[line.strip()]
        began = time.process_time()
        compute()
        print(time.process_time() - began, flush=True)


class Computer:
    """A process that computes on request."""

    def __init__(self, numerics: str, model: str, tokens: int, threads: int) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.reproduce.portable",
            "--serve",
            numerics,
            "--model",
            model,
            "--tokens",
            str(tokens),
            "--threads",
            str(threads),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, name: str) -> float:
        print(name, file=cast(IO[str], self._process.stdin), flush=True)
        return float(cast(IO[str], self._process.stdout).readline())

    def end(self) -> None:
        cast(IO[str], self._process.stdin).close()
        self._process.wait()


def compare(model: str, tokens: int, rounds: int, threads: int) -> dict[str, float]:
    """Return the median of paired ratios, native over portable, for each computation."""
    native, portable = (Computer(numerics, model, tokens, threads) for numerics in ("native", "portable"))
    ratios = {}
    for name in work_of(model, tokens):
        pairs = [(native.seconds(name), portable.seconds(name)) for _ in range(rounds + 1)][1:]
        ratios[name] = statistics.median(native_s / portable_s for native_s, portable_s in pairs)
    native.end()
    portable.end()
    return ratios


def digests(model: str, tokens: int) -> dict[str, str]:
    """Return the digests of this process, which has portable numerics."""
    return {**operations.digests(), f"gradients of {model}, {tokens} tokens": gradients_of(model, tokens)()}


def digests_of(processor: str, model: str, tokens: int) -> dict[str, str]:
    """Return the digests for ``processor`` of qemu, or for this machine's if it is empty."""
    command = [
        str(Path(sys.executable).resolve()),
        "-m",
        "bench.reproduce.portable",
        "--digests",
        "--json",
        "--model",
        model,
        "--tokens",
        str(tokens),
    ]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    if processor:
        emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
        if emulator is None:
            raise SystemExit("there is no qemu-x86_64 here: install Debian's qemu-user or qemu-user-static")
        command = [emulator, "-cpu", processor, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{processor or 'this machine'}: {done.stderr[-500:]}")
    return cast(dict[str, str], json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy-4m", choices=sorted(PRESETS))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor", default="", help="one of `qemu-x86_64 -cpu help`")
    parser.add_argument("--digests", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("native", "portable"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if args.serve == "portable" or args.digests:
        operations.begin()
    if args.serve:
        serve(args.model, args.tokens)
    elif args.processor:
        here, there = (digests_of(name, args.model, args.tokens) for name in ("", args.processor))
        for name, digest in here.items():
            print(f"{name:40} {digest} {'equal' if there[name] == digest else there[name] + '  DIFFERS'}")
    elif args.digests:
        digest_of = digests(args.model, args.tokens)
        print(
            json.dumps(digest_of)
            if args.json
            else "\n".join(f"{name:40} {digest}" for name, digest in digest_of.items())
        )
    else:
        ratios = compare(args.model, args.tokens, args.rounds, args.threads)
        print(
            json.dumps(ratios)
            if args.json
            else "\n".join(f"{ratio:5.2f}  {name}" for name, ratio in ratios.items())
        )


if __name__ == "__main__":
    run_bench(main)
