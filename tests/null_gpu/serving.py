"""What the host does in a decoding step of ``llama3-8b``, bf16, by the number of texts: ``python -m null_gpu.serving``."""

from __future__ import annotations

import statistics
import time

from bench.gpu.serving import ON_GPU
from bench.gpu.speed import not_deterministic
from bench.serve.engine import GREEDY
from null_gpu import counters
from null_gpu.steps import CUDA
from phalanx.model.transformer import Transformer
from phalanx_serve.engine.engine import Engine
from phalanx_serve.traffic.events import Request

STEPS = 12


def measured(engine: Engine, texts: int) -> tuple[int, float]:
    """Return the launches of a step in which ``texts`` texts of some 60 tokens decode, and its median processor time on the host, s."""
    for number in range(texts):
        engine.submit(Request(str(number), tuple(range(number, number + 48)), 2 * STEPS + 40, GREEDY))
    while engine.statistics().rows_last_step != texts:
        engine.step()
    taken = []
    for _ in range(STEPS):
        counters.reset()
        begin = time.process_time()
        engine.step()
        taken.append(time.process_time() - begin)
    launches = counters.on_device()
    for number in range(texts):
        engine.cancel(str(number))
    engine.step()
    return launches, statistics.median(taken)


def main() -> None:
    """Print a table."""
    from null_gpu import answers

    answers.pretend()
    with not_deterministic(), CUDA:
        model = Transformer(ON_GPU.model).to(ON_GPU.dtype).requires_grad_(False).eval()
        engine = Engine(
            model,
            ON_GPU.model,
            pages=ON_GPU.pages,
            rows=ON_GPU.rows,
            numerics="fast",
            prefix_cache=False,
            weights_id="null",
        )
    print("| texts | launches | host ms |\n|---|---|---|")
    with not_deterministic():
        for texts in ON_GPU.batches:
            launches, host_s = measured(engine, texts)
            print(f"| {texts} | {launches:,} | {1e3 * host_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
