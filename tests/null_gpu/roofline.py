"""Launches, products, bytes and host time of a step, counted on the null GPU; and the time that a GPU would take for them.

The rates are those of ``bench.gpu.prediction``, the same for every row. Collectives are not counted. The compiler's kernels do not pass the
dispatcher: their bytes are what Inductor states for each (``kernel_num_gb``, the bytes of its distinct loads and stores).

``python -m null_gpu.roofline`` prints the table, ``python -m null_gpu.roofline compiled`` the rows with this word in their names, and
``python -m null_gpu.roofline NAME WHO LAYERS`` the counts of one row in JSON. ``python -m null_gpu.roofline freeze`` counts what
``make gpu`` measures, and writes it to ``bench/gpu/prediction.json``.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bench.gpu.prediction import FILE, RATES, CountedRun, Work
from bench.gpu.setting import ON_GPU, run_of, settings_of, speed_run
from bench.gpu.speed import bare
from bench.gpu.trace import kernel_class
from null_gpu import answers, counters
from null_gpu.kinds import changed
from null_gpu.programs import printed
from null_gpu.steps import CUDA, stepper_of
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import count
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import RunSpec, TrainSpec

UPDATE_BYTES = 28
"""Bytes per parameter of the fused update: weight, gradient and two moments in fp32 are read, all but the gradient written."""
NORM_BYTES = 8
"""Bytes per parameter of the exact norm: each gradient is read for the peak, and for the squares."""
LAYERS = 4
"""Layers that are counted; the rest of a model is extrapolated from two counts."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operations as the dispatcher sees them, backward passes and what compiled graphs call included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let the compiler run under this mode, which would otherwise turn it off."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        counters.reset()
        result = func(*args, **(kwargs or {}))
        name, packet = func._schema.name, func._overloadpacket
        if "attention" in name:
            # Half of the scores are computed: two products of them forward, five backward (arXiv 2205.14135). The count of
            # PyTorch 2.11 does not know grouped heads.
            query = args[1 if "backward" in name else 0]
            batch, heads, length, width = query.shape
            products = 5 if "backward" in name else 2
            self.work.attention_flops += products * batch * heads * length**2 * width
        elif packet in flop_registry:
            self.work.product_flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif not (func.is_view or "empty" in name or name.startswith(("c10d::", "_c10d"))):
            _add_bytes(self.work, counters.kernels(), _device_bytes((args, kwargs)) + _device_bytes(result))
        return result


def _add_bytes(work: Work, kernels: Counter[str], size: float) -> None:
    """Add the bytes of an operation to the classes of its kernels, by their numbers; a copy launches none."""
    classes = Counter[str]()
    for name, number in (kernels or {"memcpy": 1}).items():
        classes[kernel_class(name)] += number
    for label, number in classes.items():
        sizes = work.bytes_by_class
        sizes[label] = sizes.get(label, 0.0) + size * number / classes.total()


@contextmanager
def compiled_kernels(work: Work) -> Iterator[None]:
    """Add the bytes of the compiler's kernels that are launched inside to ``work``."""
    launch = CachingAutotuner.run

    @functools.wraps(launch)
    def counted_launch(kernel: CachingAutotuner, *args: Any, **options: Any) -> Any:
        _add_bytes(work, Counter(["triton"]), 1e9 * kernel.inductor_meta["kernel_num_gb"])
        return launch(kernel, *args, **options)  # type: ignore[no-untyped-call]

    CachingAutotuner.run = counted_launch  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        CachingAutotuner.run = launch  # type: ignore[method-assign]


def _device_bytes(values: Any) -> int:
    return sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda
    )


def _run(
    preset: str,
    ranks: int,
    slots: int,
    at_once: int,
    *,
    each: int,
    sharding: str = "zero2",
    compiled: bool = False,
) -> tuple[RunSpec, int]:
    """``slots`` on each rank with ``each`` sequences of 4,096 tokens, ``at_once`` in a micro-batch."""
    train = TrainSpec(
        steps=100,
        batch_size=slots * each * ranks,
        slots=slots * ranks,
        micro_batch_size=at_once,
        seq_len=4096,
    )
    spec = run_of(resolve(PRESETS[preset]), train, CUDA, sharding=sharding, compiled=compiled)
    return spec, ranks


ROWS = {
    "llama-1b, 1 slot": _run("llama-1b", 1, 1, 4, each=16),
    "llama-1b, 8 slots": _run("llama-1b", 1, 8, 2, each=2),
    "llama-3b, 1 slot": _run("llama-3b", 1, 1, 4, each=16),
    "llama-3b, 8 slots": _run("llama-3b", 1, 8, 2, each=2),
    "llama3-8b on 8 ranks, 1 slot": _run("llama3-8b", 8, 1, 1, each=8),
    "llama3-8b on 8 ranks, 8 slots": _run("llama3-8b", 8, 8, 1, each=1),
    "llama3-8b on 8 ranks, 8 slots, ZeRO-1": _run("llama3-8b", 8, 8, 1, each=1, sharding="zero1"),
    "llama-1b, 1 slot, compiled": _run("llama-1b", 1, 1, 4, each=16, compiled=True),
    "llama-1b, 8 slots, compiled": _run("llama-1b", 1, 8, 2, each=2, compiled=True),
    "llama-3b, 1 slot, compiled": _run("llama-3b", 1, 1, 4, each=16, compiled=True),
    "llama-3b, 8 slots, compiled": _run("llama-3b", 1, 8, 2, each=2, compiled=True),
    "llama3-8b on 8 ranks, 1 slot, compiled": _run("llama3-8b", 8, 1, 1, each=8, compiled=True),
    "llama3-8b on 8 ranks, 8 slots, compiled": _run("llama3-8b", 8, 8, 1, each=1, compiled=True),
    "llama3-8b on 8 ranks, 8 slots, ZeRO-1, compiled": _run(
        "llama3-8b", 8, 8, 1, each=1, sharding="zero1", compiled=True
    ),
}
"""By name: a run, and its ranks."""
MEASURED = {
    (preset, ranks): (speed_run(preset, ON_GPU, CUDA, ranks), ranks)
    for preset in ON_GPU.presets
    for ranks in (1, 8)
}
"""Runs that ``make gpu`` measures, on one GPU and on eight."""
RUNS = ROWS | {f"make gpu, {preset}, ranks {ranks}": run for (preset, ranks), run in MEASURED.items()}


def counted(name: str, who: str) -> Work:
    """Count the second step of a row in processes of their own, for ``who``: "ours" or "bare"."""
    few, more = (Work(**json.loads(printed("roofline", name, who, str(n))[-1])) for n in (LAYERS, 2 * LAYERS))
    layers = RUNS[name][0].model.layers
    per_layer: float = (layers - LAYERS) / LAYERS

    def of_all(value: float, other: float) -> float:
        return value + (other - value) * per_layer

    return Work(
        of_all(few.launches, more.launches),
        max(0.0, of_all(few.host_s, more.host_s)),  # extrapolated from two noisy times
        of_all(few.product_flops, more.product_flops),
        of_all(few.attention_flops, more.attention_flops),
        {
            label: of_all(few.bytes_by_class.get(label, 0.0), size)
            for label, size in more.bytes_by_class.items()
        },
    )


def _count(name: str, who: str, layers: int) -> Work:
    spec, ranks = RUNS[name]
    spec = changed(spec, "model", layers=layers)
    answers.pretend()
    inductor.compile_threads = 1
    inductor.benchmark_kernel = True  # so that a kernel states its bytes
    with stepper_of(spec, ranks) as (stepper, own):
        step = own
        if who == "bare":
            del stepper, own
            step = bare(spec, CUDA)
        step()
        counters.reset()
        begin_s = time.process_time()
        step()
        host_s, launches = time.process_time() - begin_s, counters.on_device()
        counting = Counting()
        with compiled_kernels(counting.work), counting:
            step()
    work = counting.work
    if who == "ours":  # Triton programs, which the dispatcher does not see.
        parameters = count(spec.model, spec.train.seq_len).parameters
        _add_bytes(work, Counter(["_adamw_program"]), (UPDATE_BYTES + NORM_BYTES) * parameters / ranks)
    return replace(work, launches=launches, host_s=host_s)


def freeze() -> None:
    """Count what ``make gpu`` measures, and write it to the file from which its report predicts."""
    runs = [
        CountedRun(
            preset,
            ranks,
            settings_of(spec),
            *(counted(f"make gpu, {preset}, ranks {ranks}", who) for who in ("ours", "bare")),
        )
        for (preset, ranks), (spec, _) in MEASURED.items()
    ]
    FILE.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n")


def main() -> None:
    """Print the counts of one row and who, or a table of all rows, or of those whose name holds a word; or freeze counts."""
    if sys.argv[1:] == ["freeze"]:
        freeze()
        return
    if len(sys.argv) > 2:
        name, who, layers = sys.argv[1:]
        print(json.dumps(asdict(_count(name, who, int(layers)))))
        return
    print(
        f"| run | who | launches | host s | GB beside products | {' | '.join(f'MFU {name}' for name in RATES)} | over bare, H200 |"
    )
    print("|---|---|---|---|---|" + "---|" * (len(RATES) + 1))
    word = sys.argv[1] if sys.argv[1:] else ""
    for name, (spec, ranks) in RUNS.items():
        if word not in name:
            continue
        tokens = spec.train.batch_size * spec.train.seq_len / ranks
        flops = count(spec.model, spec.train.seq_len).flops_per_token * tokens
        rows = {who: counted(name, who) for who in ("ours", "bare")}
        for who, found in rows.items():
            host = f"{found.host_s:.2f}" if found.host_s > 0 else "unclear"
            mfu = [f"{flops / found.seconds(rates) / rates.peak_flops:.3f}" for rates in RATES.values()]
            ratio = found.seconds(RATES["H200"]) / rows["bare"].seconds(RATES["H200"])
            print(
                f"| {name} | {who} | {found.launches:,.0f} | {host} | {found.other_bytes / 1e9:,.0f} | "
                f"{' | '.join(mfu)} | {ratio:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
