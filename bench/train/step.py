"""Speed of a training step, beside its peers and beside the matrix-multiply rate of the machine.

One run, on one machine, everything interleaved, each contender in processes of its own, medians of paired ratios (machines are noisy;
a ratio of two neighbors in time is not):

(a) our step over the same model in a bare PyTorch loop (``F.cross_entropy``, ``clip_grad_norm_``, ``torch.optim.AdamW``);
(b) our step over ``transformers``' Llama of the same shape in the same bare loop;
(c) the FLOP/s that our step achieves (attention counted causally) over the machine's matrix-multiply peak;
(d) at two ranks, the reproducible reduction over the fast one, with ZeRO-3, ZeRO-2 and plain replication, and each over the bare loop and
    over ``transformers`` in ``DistributedDataParallel``, which exchanges gradients once a step too;
(e) the shares of our step that forward and backward, the tree, the norm and the optimizer take, in processor time, and the new pages
    of memory that a step maps, each loop in a process of its own (``--only shares``): a loop that runs beside
    another reuses the memory that the other freed.

    python -m bench.train.step
    python -m bench.train.step --rounds 9 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.running import record, require_memory, run_bench
from phalanx.hardware.local.device import keep_freed_memory, measure_matmul_flops, wait_for_device
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count, parameters
from phalanx.model.init import fill
from phalanx.model.transformer import Transformer
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh import build_mesh
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.parallel.reduction import reproducible_sums as exact_sum
from phalanx.parallel.reduction.summation import TreeSummation
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ParallelSpec, PrecisionSpec, RunSpec, RuntimeSpec, ScheduleSpec, TrainSpec
from phalanx.train.assemble import make_deterministic
from phalanx.train.compose import build_model
from phalanx.train.optimizers.adamw import AdamW
from phalanx.train.step.slot import LoopRunner
from phalanx.train.step.state import fill_initial
from phalanx.train.step.step import Stepper

Step = Callable[[], None]
_TIMEOUT_S = 600.0
"""Limit of a collective: one rank may be much slower than another in loading its libraries."""
CPU = torch.device("cpu")


def spec_for(arguments: argparse.Namespace, threads: int, **train: Any) -> RunSpec:
    """Return the measured run: fp32 on a CPU, one micro-batch of one sequence per slot."""
    return RunSpec(
        model=resolve(PRESETS[arguments.preset], 16_384),
        train=TrainSpec(
            steps=1000,
            batch_size=arguments.batch,
            slots=arguments.batch,
            seq_len=arguments.seq_len,
            micro_batch_size=1,
            **train,
        ),
        schedule=ScheduleSpec(kind="constant", warmup_steps=0),
        precision=PrecisionSpec(compute="fp32"),
        runtime=RuntimeSpec(device="cpu", threads=threads, compile=arguments.compile),
    )


def random_samples(spec: RunSpec, count_: int) -> NDArray[np.int64]:
    """Return token ids in the shape of a batch: speed does not depend on their values."""
    generator = np.random.default_rng(0)
    return generator.integers(0, spec.model.vocab_size, (count_, spec.train.seq_len + 1), dtype=np.int64)


def build_stepper(spec: RunSpec, device: torch.device) -> tuple[Stepper, Step]:
    """Return the object that runs our steps on the ranks of the default process group, and a function that runs the next one."""
    mesh = build_mesh(spec, dist.get_world_size(), device)
    built = build_model(spec, mesh)
    fill_initial(built.model.parts, built.placement, spec)
    samples = random_samples(spec, spec.train.batch_size)
    per_slot = spec.train.batch_size // spec.train.slots

    def batches() -> Iterator[NDArray[np.int64]]:
        while True:
            for current in built.rounds:
                yield samples[current.slot * per_slot : (current.slot + 1) * per_slot]

    stepper = Stepper(built, batches(), Ledger())
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        stepper.run(number)

    return stepper, step


def bare_step(spec: RunSpec, module: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor]) -> Step:
    """Return a step as written without a framework; on several ranks, each with its share of the samples, with PyTorch's own replication."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    samples = torch.from_numpy(random_samples(spec, spec.train.batch_size)).chunk(ranks)[rank]
    spread = DistributedDataParallel(module) if ranks > 1 else None
    called = module if spread is None else spread

    def step() -> None:
        for number, sample in enumerate(samples.split(1)):
            exchanging = number == len(samples) - 1
            with nullcontext() if spread is None or exchanging else spread.no_sync():
                logits = forward(called, sample[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())
                (loss / len(samples)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def same_model_bare(spec: RunSpec) -> Step:
    """Return a step of our own module with the same weights, in a bare loop."""
    module = Transformer(spec.model)
    kinds = {parameter.name: parameter for parameter in parameters(spec.model)}
    for name, weights in module.named_parameters():
        fill(weights.detach(), kinds[name], (0,) * weights.ndim, spec.model, spec.runtime.seed)
    if spec.runtime.compile:
        for block in module.blocks.values():
            block.compile()
    return bare_step(spec, module, lambda called, tokens: called(tokens))


def transformers_bare(spec: RunSpec) -> Step:
    """Return a step of Hugging Face's Llama of the same shape, in a bare loop."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = spec.model
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        intermediate_size=model.ffn_dim,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=spec.train.seq_len,
        tie_word_embeddings=model.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",  # type: ignore[call-arg]  # of every configuration
    )
    module = LlamaForCausalLM(config)
    if spec.runtime.compile:
        for block in module.model.layers:
            block.compile()
    return bare_step(spec, module, lambda called, tokens: called(tokens).logits)


def seconds_of(step: Step, device: torch.device = CPU) -> float:
    """Return the wall time of one call, with all work on the device."""
    begin = time.perf_counter()
    step()
    wait_for_device(device)
    return time.perf_counter() - begin


BUILDERS: dict[str, Callable[[RunSpec], Step]] = {
    "ours": lambda spec: build_stepper(spec, CPU)[1],
    "fast": lambda spec: build_stepper(_fast(spec), CPU)[1],
    "bare_loop": same_model_bare,
    "transformers": transformers_bare,
}
"""The contenders: our step, the same without the promise about bits, and the bare loops."""


def _fast(spec: RunSpec) -> RunSpec:
    # Fast sums of ZeRO-2 are exchanged once a step, as the others are in ZeRO-1.
    own = spec.parallel.sharding
    parallel = dataclasses.replace(spec.parallel, sharding="zero2" if own == "zero1" else own)
    return dataclasses.replace(
        spec, parallel=parallel, train=dataclasses.replace(spec.train, reduction="fast")
    )


def _crew_member(
    rank: int, ranks: int, point: str, spec: RunSpec, names: Sequence[str], commands: Any
) -> None:
    join(RankEnvironment(rank, ranks, rank, point, "phalanx"), CPU, _TIMEOUT_S)
    make_deterministic(spec, CPU)
    if "ours" in names:  # as each of our ranks does
        keep_freed_memory(CPU)
    steps = {name: BUILDERS[name](spec) for name in names}
    for step in steps.values():
        step()
    commands.send(0.0)
    while (name := commands.recv()) is not None:
        commands.send(seconds_of(steps[name]))
    leave()


class Crew:
    """Ranks of some contenders, in processes that no other contender shares, since it would reuse the memory that they freed."""

    def __init__(self, names: Sequence[str], spec: RunSpec, ranks: int) -> None:
        self.names = names
        self._folder = tempfile.TemporaryDirectory()
        point = (Path(self._folder.name) / "store").as_uri()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(ranks)]
        self._commands = [here for here, _ in pipes]
        self._members = [
            context.Process(target=_crew_member, args=(rank, ranks, point, spec, names, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        for member in self._members:
            member.start()
        self._answers()

    def _answers(self) -> float:
        return max(float(commands.recv()) for commands in self._commands)

    def seconds(self, name: str) -> float:
        """Run a step of one of them. Return the time of the slowest rank."""
        for commands in self._commands:
            commands.send(name)
        return self._answers()

    def end(self) -> None:
        """End the processes."""
        for commands, member in zip(self._commands, self._members, strict=True):
            commands.send(None)
            member.join()
        self._folder.cleanup()


def rounds_of_turns(crews: Sequence[Crew], rounds: int) -> list[dict[str, float]]:
    """Return the seconds of a step of each contender, in turns."""
    rows = []
    for _ in range(rounds):
        rows.append({name: crew.seconds(name) for crew in crews for name in crew.names})
        record(rows[-1], is_printed=False)
    return rows


def one_rank(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measure (a), (b) and (c)."""
    spec = spec_for(arguments, arguments.threads)
    torch.set_num_threads(arguments.threads)
    crews = [Crew([name], spec, 1) for name in ("ours", "bare_loop", "transformers")]
    rows = []
    for _ in range(arguments.rounds):
        peak = measure_matmul_flops(CPU, torch.float32)
        (row,) = rounds_of_turns(crews, 1)
        rows.append(row | {"peak": max(peak, measure_matmul_flops(CPU, torch.float32))})
    for crew in crews:
        crew.end()
    tokens = spec.train.batch_size * spec.train.seq_len
    flops = count(spec.model, spec.train.seq_len).flops_per_token_causal * tokens
    median = statistics.median
    yield from {
        "tokens_per_s": median(tokens / row["ours"] for row in rows),
        "over_bare_loop": median(row["bare_loop"] / row["ours"] for row in rows),
        "over_transformers": median(row["transformers"] / row["ours"] for row in rows),
        "over_matmul_peak": median(flops / row["ours"] / row["peak"] for row in rows),
        "bare_loop_over_matmul_peak": median(flops / row["bare_loop"] / row["peak"] for row in rows),
        "matmul_peak_flops_per_s": median(row["peak"] for row in rows),
    }.items()


def two_ranks(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measure (d)."""
    spec = spec_for(arguments, 1)
    peers = [Crew([name], spec, 2) for name in ("bare_loop", "transformers") if arguments.peers]
    for sharding in arguments.sharding or ("zero3", "zero2", "zero1", "none"):
        mine = dataclasses.replace(spec, parallel=ParallelSpec(sharding=sharding))
        ours = Crew(["ours", "fast"], mine, 2)
        rows = rounds_of_turns([ours, *peers], arguments.rounds)
        ours.end()
        for name in ("fast", *(peer.names[0] for peer in peers)):
            ratio = statistics.median(row[name] / row["ours"] for row in rows)
            yield f"reproducible_over_{name}_{sharding}", ratio
    for peer in peers:
        peer.end()


@contextmanager
def _timed(owner: Any, name: str, spent: dict[str, float], label: str) -> Iterator[None]:
    """Add the processor time of calls of ``owner.name`` to ``spent[label]``."""
    plain = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        begin = time.process_time()
        try:
            return plain(*args, **options)
        finally:
            spent[label] = spent.get(label, 0.0) + time.process_time() - begin

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _shares_worker(contender: str, arguments: argparse.Namespace, results: Any) -> None:
    spec = spec_for(arguments, 1)
    make_deterministic(spec, CPU)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        join(RankEnvironment(0, 1, 0, (Path(folder) / "store").as_uri(), "phalanx"), CPU, 60.0)
        spent: dict[str, float] = {}
        if contender == "bare":
            step = same_model_bare(spec)
        else:
            keep_freed_memory(CPU)
            for owner, name, label in (
                (TreeSummation, "_push", "tree"),
                (exact_sum, "norm", "norm"),
                (AdamW, "step", "optimizer"),
                (LoopRunner, "gradients", "slots"),
            ):
                patches.enter_context(_timed(owner, name, spent, label))
            _, step = build_stepper(spec, CPU)
        step()
        rows = []
        for _ in range(arguments.rounds):
            spent.clear()
            before, begin = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
            step()
            used_s = time.process_time() - begin
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt
            rows.append({"cpu_s": used_s, "fresh_pages": pages, **_shares(spent, used_s)})
        leave()
    results.put({name: statistics.median(row[name] for row in rows) for name in rows[0]})


def _shares(spent: dict[str, float], step_s: float) -> dict[str, float]:
    """Return the shares of a step of ``step_s`` seconds; the tree grows inside the slots' backward passes."""
    if not spent:
        return {}
    inner = {name: spent.get(name, 0.0) for name in ("tree", "norm", "optimizer")}
    parts = {"forward_backward": spent["slots"] - inner["tree"], **inner}
    parts["other"] = step_s - sum(parts.values())
    return {f"share_{name}": part / step_s for name, part in parts.items()}


def shares(arguments: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Measure (e), for one rank of one thread."""
    context = multiprocessing.get_context("spawn")
    cpu_s = {}
    for contender in ("ours", "bare"):
        results = context.Queue()
        worker = context.Process(target=_shares_worker, args=(contender, arguments, results))
        worker.start()
        medians = results.get(timeout=3600)
        worker.join()
        cpu_s[contender] = medians["cpu_s"]
        yield from ((f"{contender}_{name}", value) for name, value in medians.items())
    yield "cpu_over_bare_loop", cpu_s["bare"] / cpu_s["ours"]


CONTENDERS = {"one-rank": 3, "two-ranks": 8, "shares": 1}
"""Models in memory at a time, over all ranks."""


def memory_gib(arguments: argparse.Namespace) -> float:
    """Return an estimate of the memory of all processes: weights, gradients, moments and a sum; one sequence's activations; libraries."""
    spec = spec_for(arguments, 1)
    model = spec.model
    state = 20 * sum(math.prod(parameter.shape) for parameter in parameters(model))
    activations = spec.train.seq_len * (8 * model.vocab_size + 100 * model.layers * model.dim)
    contenders = CONTENDERS[arguments.only] if arguments.only else max(CONTENDERS.values())
    return contenders * ((state + activations) / 2**30 + 0.35)


GOALS = {
    "over_bare_loop": 1.0,
    "over_transformers": 1.05,
    "over_matmul_peak": 0.6,
    "reproducible_over_fast_zero3": 0.95,
    "reproducible_over_fast_zero2": 0.97,
    "reproducible_over_fast_zero1": 0.97,
    "reproducible_over_fast_none": 0.95,
    **{
        f"reproducible_over_{peer}_{sharding}": goal
        for peer, goal in (("bare_loop", 1.0), ("transformers", 1.05))
        for sharding in ("zero3", "zero2", "zero1", "none")
    },
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-100m", choices=sorted(PRESETS))
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the single rank in (a) to (c)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of all contenders")
    parser.add_argument(
        "--sharding",
        action="append",
        choices=["zero3", "zero2", "zero1", "none"],
        help="of (d); all three if not given",
    )
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="leave the loops of others out of (d)"
    )
    parser.add_argument("--only", choices=["one-rank", "two-ranks", "shares"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    require_memory(memory_gib(arguments), "give a smaller --preset, --seq-len, or one part with --only")
    results: dict[str, Any] = {}
    for name, measure in (("one-rank", one_rank), ("two-ranks", two_ranks), ("shares", shares)):
        if arguments.only not in (None, name):
            continue
        for key, value in measure(arguments):
            results[key] = value
            if not arguments.json:
                goal = f"   goal {GOALS[key]}" if key in GOALS else ""
                print(f"{key:34} {value:12,.3f}{goal}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    run_bench(main)
