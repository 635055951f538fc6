"""The cost of a step of each optimizer, and the loss that it reaches.

(a) cost: time of the update alone on one rank, with random gradients, over AdamW's (medians of paired ratios, everything
    interleaved), and the bytes of state for each parameter;
(b) curves: the same small model trained on the quickstart's corpus by each of them, at AdamW's learning rate and decay,
    drawn as one SVG file.

    python -m bench.train.optimizers cost
    python -m bench.train.optimizers curves --steps 200 --write docs/images/optimizers.svg
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from bench.running import record, run_bench
from phalanx.model.facts.presets import PRESETS
from phalanx.model.facts.shape import parameters
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Evaluated, Step
from phalanx.observe.throughput import smooth
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import OptimizerSpec
from phalanx.train.compose import make_optimizer
from phalanx.train.optimizers.optimizer import Optimizer

SPECS = {
    "AdamW": OptimizerSpec(),
    "AdamW, bf16 state": OptimizerSpec(state="bf16"),
    "AdamW, int8 state": OptimizerSpec(state="int8"),
    "Adafactor": OptimizerSpec(name="adafactor"),
    "Adafactor, beta1 = 0": OptimizerSpec(name="adafactor", beta1=0.0),
    "Muon": OptimizerSpec(name="muon"),
    "Shampoo": OptimizerSpec(name="shampoo"),
    "SOAP": OptimizerSpec(name="soap"),
}
DRAWN = {  # colors
    "AdamW": "#2f6fd0",
    "AdamW, int8 state": "#7aa7e8",
    "Adafactor": "#96948b",
    "Muon": "#d1590b",
    "Shampoo": "#16825d",
    "SOAP": "#9a3fb5",
}
MODEL = {"layers": 2, "dim": 128, "heads": 4, "kv_heads": 2, "tie_embeddings": "true"}
TRAIN = {"batch_size": 8, "seq_len": 128, "slots": 8}
LR = 3e-3
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 440, 58, 640, 56, 388


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of state on this rank."""
    parts = (part.tensor for state in optimizer.state().values() for part in state)
    return sum(tensor.numel() * tensor.element_size() for tensor in parts)


def cost(arguments: argparse.Namespace) -> None:
    """Measure (a)."""
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    kinds = {p.name: p for p in parameters(resolve(PRESETS[arguments.preset], 4096))}
    weights = {name: nn.Parameter(torch.zeros(p.shape, device=device)) for name, p in kinds.items()}
    for parameter in weights.values():
        parameter.grad = torch.randn_like(parameter)
    optimizers = {name: make_optimizer(spec, weights, kinds) for name, spec in SPECS.items()}
    # Roots and bases are renewed every so many steps: full periods are timed.
    period, number = max(spec.precondition_every for spec in SPECS.values()), 0
    ratios: dict[str, list[float]] = {name: [] for name in SPECS}
    seconds: dict[str, list[float]] = {name: [] for name in SPECS}
    for _ in range(arguments.rounds + 1):
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            for step in range(period):
                optimizer.step(number + step + 1, 1e-3, 1.0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name].append((time.perf_counter() - begin) / period)
            ratios[name].append(seconds[name][-1] / seconds["AdamW"][-1])
            record({"optimizer": name, "seconds": seconds[name][-1]}, is_printed=False)
        number += period
    count = sum(p.numel for p in kinds.values())
    print(f"{arguments.preset}, {count / 1e6:.1f} M parameters, {device}, {arguments.threads} threads")
    print("| optimizer | ms a step | over AdamW | bytes of state a parameter |\n|---|---|---|---|")
    for name, optimizer in optimizers.items():
        ms, ratio = 1e3 * statistics.median(seconds[name][1:]), statistics.median(ratios[name][1:])
        print(f"| {name} | {ms:.1f} | {ratio:.1f} | {state_bytes(optimizer) / count:.2f} |")


def train(spec: OptimizerSpec, arguments: argparse.Namespace, folder: Path) -> Path:
    """Train the small model. Return the path of its event stream."""
    fields = {
        **{f"model.{field}": value for field, value in MODEL.items()},
        **{f"train.{field}": value for field, value in TRAIN.items()},
        "model.preset": "",
        "train.steps": arguments.steps,
        "data.path": f"{arguments.data}",
        "data.vocab_size": 1024,
        "optimizer.name": spec.name,
        "optimizer.state": spec.state,
        "optimizer.beta1": spec.beta1,
        "optimizer.lr": LR,
        "schedule.decay_fraction": 0.5,
        "parallel.ranks": 1,
        "checkpoint.every_steps": arguments.steps,
        "evaluation.every_steps": 0,
        "evaluation.final_sequences": 64,
        "sample.prompt": "",
    }
    run_dir = folder / str(len(list(folder.iterdir())))
    settings = [part for field, value in fields.items() for part in ("--set", f"{field}={value}")]
    command = [sys.executable, "-m", "phalanx", "train", "configs/quickstart.toml", "--run-dir", str(run_dir)]
    subprocess.run([*command, *settings], check=True, stdout=subprocess.DEVNULL)
    return run_dir / "events.jsonl"


def curves(arguments: argparse.Namespace) -> None:
    """Measure (b)."""
    losses_of = {}
    print("| optimizer | training loss, last tenth | held-out loss |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in DRAWN:
            spec = SPECS[name]
            events = [event.body for event in read_events(train(spec, arguments, Path(folder)))]
            losses = [body.loss for body in events if isinstance(body, Step)]
            held_out = [body.loss for body in events if isinstance(body, Evaluated)][-1]
            losses_of[name] = (losses, held_out)
            print(
                f"| {name} | {statistics.mean(losses[-len(losses) // 10 :]):.3f} | {held_out:.3f} |",
                flush=True,
            )
    if arguments.write:
        arguments.write.write_text(svg(losses_of), encoding="utf-8")


def svg(losses_of: dict[str, tuple[list[float], float]]) -> str:
    """Draw smoothed training losses, with held-out losses in the legend."""
    smoothed = {name: smooth(losses, 5) for name, (losses, _) in losses_of.items()}
    steps = max(len(losses) for losses in smoothed.values())
    low = min(min(losses) for losses in smoothed.values())
    high = max(losses[min(len(losses) - 1, steps // 20)] for losses in smoothed.values())

    def place(step: int, loss: float) -> str:
        x = LEFT + (RIGHT - LEFT) * step / max(1, steps - 1)
        y = BOTTOM - (BOTTOM - TOP) * (min(loss, high) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui,sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#dcdcd6"/>',
        f'<text x="{LEFT}" y="32" font-size="16" font-weight="600" fill="#1b1b1a">Training loss by optimizer, at one '
        "learning rate</text>",
        f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 38}" text-anchor="middle" fill="#66655f">step</text>',
    ]
    for fraction in (0.0, 0.25, 0.5, 0.75, 1.0):
        loss, step = low + fraction * (high - low), round(fraction * (steps - 1))
        y, x = BOTTOM - fraction * (BOTTOM - TOP), LEFT + fraction * (RIGHT - LEFT)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#eeeeea"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#66655f">{loss:.2f}</text>',
            f'<text x="{x:.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="#66655f">{step + 1}</text>',
        ]
    for number, (name, losses) in enumerate(smoothed.items()):
        points = " ".join(place(step, loss) for step, loss in enumerate(losses))
        y, color = TOP + 14 + 24 * number, DRAWN[name]
        parts += [
            f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="{points}"/>',
            f'<line x1="{RIGHT + 16}" y1="{y}" x2="{RIGHT + 38}" y2="{y}" stroke="{color}" stroke-width="3"/>',
            f'<text x="{RIGHT + 44}" y="{y + 4}" fill="#1b1b1a">{name}: {losses_of[name][1]:.3f}</text>',
        ]
    y = TOP + 14 + 24 * len(smoothed)
    parts.append(f'<text x="{RIGHT + 16}" y="{y}" fill="#66655f">(nats a token, held out)</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser("cost")
    costs.add_argument("--preset", default="toy-4m", choices=sorted(PRESETS))
    costs.add_argument("--rounds", type=int, default=5)
    costs.add_argument("--threads", type=int, default=1)
    costs.add_argument("--device", default="cpu")
    drawn = commands.add_parser("curves")
    drawn.add_argument("--steps", type=int, default=200)
    drawn.add_argument("--data", default=".cache/data/python-stdlib-1k")
    drawn.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    (cost if arguments.command == "cost" else curves)(arguments)


if __name__ == "__main__":
    run_bench(main)
