"""How fast is a training step, beside its peers and beside what the machine can multiply?

One run, on one machine, everything interleaved, medians of paired ratios (machines are noisy; a ratio of two
neighbors in time is not):

(a) our step over the same model in a bare PyTorch loop (``F.cross_entropy``, ``clip_grad_norm_``, ``torch.optim.AdamW``);
(b) our step over ``transformers``' Llama of the same shape in the same bare loop;
(c) the FLOP/s that our step achieves (attention counted causally) over the machine's matrix-multiply peak;
(d) at two ranks, the reproducible reduction over the fast one, with ZeRO-3, ZeRO-2 and plain replication;
(e) the shares of our step that forward and backward, the tree, the norm and the optimizer take, in processor time, and the pages
    of memory that a step maps afresh, each loop in a process of its own (``--only shares``): a loop that runs beside
    another finds the memory that the other gave back.

    python bench/step.py
    python bench/step.py --rounds 9 --json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from phalanx.hardware.device import wait_for_device
from phalanx.hardware.matmul_peak import measure_matmul_flops
from phalanx.model.facts.counts import count
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.model.init import fill
from phalanx.model.transformer import Transformer
from phalanx.observe.ledger import Ledger
from phalanx.parallel.mesh.mesh import build_mesh
from phalanx.parallel.process_group.rendezvous import RankEnvironment, join, leave
from phalanx.parallel.reduction import exact_sum
from phalanx.parallel.reduction.summation import TreeSummation
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ParallelSpec, PrecisionSpec, RunSpec, RuntimeSpec, ScheduleSpec, TrainSpec
from phalanx.train.lifecycle.assemble import make_deterministic
from phalanx.train.lifecycle.compose import build_model
from phalanx.train.optimizers.adamw import AdamW
from phalanx.train.step.slot import LoopRunner
from phalanx.train.step.state import fill_initial
from phalanx.train.step.step import Stepper

Step = Callable[[], None]
CPU = torch.device("cpu")


def spec_for(arguments: argparse.Namespace, threads: int, **train: Any) -> RunSpec:
    """The run that is measured: fp32 on a CPU, one micro-batch of one sequence per slot."""
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
    """Token ids in the shape of a batch: speed does not depend on what they say."""
    generator = np.random.default_rng(0)
    return generator.integers(0, spec.model.vocab_size, (count_, spec.train.seq_len + 1), dtype=np.int64)


def build_stepper(spec: RunSpec, device: torch.device) -> tuple[Stepper, Step]:
    """The object that runs our steps on the ranks of the default process group, and a function that runs the next one."""
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


def bare_step(spec: RunSpec, module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Step:
    """A step as one writes it without a framework."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    samples = torch.from_numpy(random_samples(spec, spec.train.batch_size))

    def step() -> None:
        for sample in samples.split(1):
            logits = forward(sample[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten())
            (loss / len(samples)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def same_model_bare(spec: RunSpec) -> Step:
    """Our own module, filled alike, in a bare loop."""
    module = Transformer(spec.model)
    kinds = {parameter.name: parameter for parameter in parameters(spec.model)}
    for name, weights in module.named_parameters():
        fill(weights.detach(), kinds[name], (0,) * weights.ndim, spec.model, spec.runtime.seed)
    if spec.runtime.compile:
        for block in module.blocks.values():
            block.compile()
    return bare_step(spec, module, module)


def transformers_bare(spec: RunSpec) -> Step:
    """Hugging Face's Llama of the same shape, in a bare loop."""
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
        attn_implementation="sdpa",
    )
    module = LlamaForCausalLM(config)
    if spec.runtime.compile:
        for block in module.model.layers:
            block.compile()
    return bare_step(spec, module, lambda tokens: module(tokens).logits)


def seconds_of(step: Step, device: torch.device = CPU) -> float:
    """Wall time of one call, everything on the device included."""
    begin = time.perf_counter()
    step()
    wait_for_device(device)
    return time.perf_counter() - begin


def one_rank(arguments: argparse.Namespace) -> dict[str, Any]:
    """(a), (b) and (c)."""
    spec = spec_for(arguments, arguments.threads)
    make_deterministic(spec, CPU)
    with tempfile.TemporaryDirectory() as folder:
        join(RankEnvironment(0, 1, 0, (Path(folder) / "store").as_uri(), "phalanx"), CPU, 60.0)
        ours, bare, hugging = build_stepper(spec, CPU)[1], same_model_bare(spec), transformers_bare(spec)
        for step in (ours, bare, hugging):
            step()
        rows = []
        for _ in range(arguments.rounds):
            peak = measure_matmul_flops(CPU, torch.float32)
            times = [seconds_of(step) for step in (ours, bare, hugging)]
            peak = max(peak, measure_matmul_flops(CPU, torch.float32))
            rows.append((*times, peak))
        leave()
    tokens = spec.train.batch_size * spec.train.seq_len
    flops = count(spec.model, spec.train.seq_len).flops_per_token_causal * tokens
    median = statistics.median
    return {
        "tokens_per_s": median(tokens / row[0] for row in rows),
        "over_bare_loop": median(row[1] / row[0] for row in rows),
        "over_transformers": median(row[2] / row[0] for row in rows),
        "over_matmul_peak": median(flops / row[0] / row[3] for row in rows),
        "bare_loop_over_matmul_peak": median(flops / row[1] / row[3] for row in rows),
        "matmul_peak_flops_per_s": median(row[3] for row in rows),
    }


def _two_ranks_worker(rank: int, meeting_point: str, arguments: argparse.Namespace, results: Any) -> None:
    join(RankEnvironment(rank, 2, rank, meeting_point, "phalanx"), CPU, 60.0)
    found = {}
    for sharding in ("zero3", "zero2", "none"):
        spec = spec_for(arguments, 1)
        spec = dataclasses.replace(spec, parallel=ParallelSpec(sharding=sharding))  # type: ignore[arg-type]
        make_deterministic(spec, CPU)
        fast_train = dataclasses.replace(spec.train, reduction="fast")
        both = (spec, dataclasses.replace(spec, train=fast_train))
        steps = [build_stepper(one, CPU)[1] for one in both]
        for step in steps:
            step()
        ratios = []
        for _ in range(arguments.rounds):
            reproducible_s, fast_s = (seconds_of(step) for step in steps)
            ratios.append(fast_s / reproducible_s)
        found[f"reproducible_over_fast_{sharding}"] = statistics.median(ratios)
    if rank == 0:
        results.put(found)
    leave()


def two_ranks(arguments: argparse.Namespace) -> dict[str, Any]:
    """(d)."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        point = (Path(folder) / "store").as_uri()
        workers = [
            context.Process(target=_two_ranks_worker, args=(rank, point, arguments, results))
            for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        found: dict[str, Any] = results.get(timeout=3600)
        for worker in workers:
            worker.join()
    return found


@contextmanager
def _timed(owner: Any, name: str, spent: dict[str, float], label: str) -> Iterator[None]:
    """Adds the processor time of calls of ``owner.name`` to ``spent[label]``."""
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
            whole = time.process_time() - begin
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt
            rows.append({"cpu_s": whole, "fresh_pages": pages, **_shares(spent, whole)})
        leave()
    results.put({name: statistics.median(row[name] for row in rows) for name in rows[0]})


def _shares(spent: dict[str, float], whole: float) -> dict[str, float]:
    """The shares of a step of ``whole`` seconds; the tree grows inside the slots' backward passes."""
    if not spent:
        return {}
    inner = {name: spent.get(name, 0.0) for name in ("tree", "norm", "optimizer")}
    parts = {"forward_backward": spent["slots"] - inner["tree"], **inner}
    parts["other"] = whole - sum(parts.values())
    return {f"share_{name}": part / whole for name, part in parts.items()}


def shares(arguments: argparse.Namespace) -> dict[str, Any]:
    """(e), for one rank of one thread."""
    context = multiprocessing.get_context("spawn")
    found = {}
    for contender in ("ours", "bare"):
        results = context.Queue()
        worker = context.Process(target=_shares_worker, args=(contender, arguments, results))
        worker.start()
        found |= {f"{contender}_{name}": value for name, value in results.get(timeout=3600).items()}
        worker.join()
    return {**found, "cpu_over_bare_loop": found["bare_cpu_s"] / found["ours_cpu_s"]}


GOALS = {
    "over_bare_loop": 1.0,
    "over_transformers": 1.05,
    "over_matmul_peak": 0.6,
    "reproducible_over_fast_zero3": 0.95,
    "reproducible_over_fast_zero2": 0.97,
    "reproducible_over_fast_none": 0.95,
}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-100m", choices=sorted(PRESETS))
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the single rank in (a) to (c)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of all contenders")
    parser.add_argument("--only", choices=["one-rank", "two-ranks", "shares"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.only in (None, "one-rank"):
        found |= one_rank(arguments)
    if arguments.only in (None, "two-ranks"):
        found |= two_ranks(arguments)
    if arguments.only in (None, "shares"):
        found |= shares(arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        goal = f"   goal {GOALS[name]}" if name in GOALS else ""
        print(f"{name:34} {value:12,.3f}{goal}")


if __name__ == "__main__":
    main()
