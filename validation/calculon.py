"""The planner beside Calculon, on the published runs that Calculon can express.

    git clone https://github.com/calculon-ai/calculon   # caa4b11; the name on PyPI is another program
    pip install pandas psutil                           # Calculon imports them
    python -m validation.calculon path/to/calculon [--json]

Calculon (Isaev et al., SC'23, arXiv 2305.18176) supports dense models with plain multi-head attention and a two-matrix
feed-forward layer on an A100 or H100, tensor, pipeline and data parallelism, ZeRO-1, and full or attention-only recomputation.
Both get the same rows and the same layouts, and both the same treatment: raw, and after one factor for the software stack that
is fitted on other models' runs. If a row leaves the layout open, Calculon gets the values that our planner filled in. Its system files
are taken as they are, except the network between nodes, which is set to that of the row's machines.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from validation.compare import Errors, Outcome, errors, validate
from validation.factors import CalibrationPoint, scalar_for
from validation.runs import read_published

_SYSTEMS = {"a100": "a100_80g.json", "a100-40": "a100_80g.json", "h100": "h100_80g_nvl8.json"}
_RECOMPUTE = {"none": "none", "full": "full", "attention": "attn_only"}


@dataclass(frozen=True)
class Pair:
    """One row, predicted by both."""

    outcome: Outcome
    calculon_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a clone of calculon-ai/calculon")
    parser.add_argument("--json", action="store_true", help="print values instead of a table")
    chosen = parser.parse_args(arguments)
    if not (chosen.checkout / "calculon" / "llm" / "llm.py").is_file():
        parser.error(f"{chosen.checkout} is no clone of calculon-ai/calculon: calculon/llm/llm.py is missing")
    sys.path.insert(0, str(chosen.checkout))
    outcomes = [outcome for outcome in validate(read_published()).timed() if expressible(outcome)]
    pairs, refused = [], []
    for outcome in outcomes:
        try:
            pairs.append(Pair(outcome, calculon_s(chosen.checkout, outcome)))
        except CalculonRefusalError as reason:
            refused.append((outcome.run.id, str(reason)))
    table = compared(pairs)
    if chosen.json:
        print(json.dumps({"families": table, "refused": refused}, indent=2))
    else:
        show(table, refused)
    return 0


class CalculonRefusalError(Exception):
    """A row that Calculon refuses to compute; the message is Calculon's."""


def expressible(outcome: Outcome) -> bool:
    """Return True if Calculon can express the row's model, machines and layout."""
    assert outcome.setup is not None
    assert outcome.estimate is not None
    model, layout = outcome.setup.job.workload.model, outcome.estimate.layout
    plain = model.moe is None and model.mla is None and model.ffn == "gelu" and model.kv_heads == model.heads
    has_names = (
        outcome.setup.job.cluster.accelerator.key in _SYSTEMS
        and outcome.estimate.layout.recompute in _RECOMPUTE
    )
    wide = layout.precision in ("bf16", "fp16") and layout.zero <= 1 and layout.context == 1
    divided = model.layers % (layout.pipeline * layout.stages_per_rank) == 0
    return plain and has_names and wide and divided


def calculon_s(checkout: Path, outcome: Outcome) -> float:
    """Return Calculon's seconds of the row's step. Raises ``CalculonRefusalError``."""
    import calculon.llm as calculon_llm  # type: ignore[import-not-found]
    from calculon.system import System  # type: ignore[import-not-found]

    assert outcome.setup is not None
    logger = logging.getLogger("calculon")
    logger.disabled = True
    machine = outcome.setup.job.cluster
    description = json.loads((checkout / "systems" / _SYSTEMS[machine.accelerator.key]).read_text())
    description["mem1"]["GiB"] = 10_000  # the fit in memory is not compared
    description["networks"][1]["bandwidth"] = machine.fabric.bytes_per_s.value / 1e9
    try:
        model = calculon_llm.Llm(calculon_llm.Llm.Application(application(outcome)), logger)
        execution = calculon_llm.Llm.Execution.from_json(execution_of(outcome, description))
        model.compile(System(copy.deepcopy(description)), execution)
        model.run(System(copy.deepcopy(description)))
    except (calculon_llm.Llm.Error, AssertionError) as error:
        raise CalculonRefusalError(str(error) or "an assertion of its own fails") from error
    return float(model.get_total_time())


def application(outcome: Outcome) -> dict[str, int]:
    """Return the model in Calculon's terms."""
    assert outcome.setup is not None
    work = outcome.setup.job.workload
    model = work.model
    return {
        "hidden": model.dim,
        "feedforward": model.ffn_dim,
        "seq_size": work.seq_len,
        "attn_heads": model.heads,
        "attn_size": model.head_dim,
        "num_blocks": model.layers,
    }


def execution_of(outcome: Outcome, description: dict[str, Any]) -> dict[str, object]:
    """Return the layout in Calculon's terms."""
    assert outcome.estimate is not None
    assert outcome.setup is not None
    layout = outcome.estimate.layout
    inside = description["networks"][0]["size"]
    data = layout.data
    divided = bool(layout.sequence_parallel)
    return {
        "num_procs": layout.tensor * layout.pipeline * data,
        "tensor_par": layout.tensor,
        "pipeline_par": layout.pipeline,
        "data_par": data,
        "tensor_par_net": int(layout.tensor > inside),
        "pipeline_par_net": int(layout.tensor * layout.pipeline > inside),
        "data_par_net": int(layout.tensor * layout.pipeline * data > inside),
        "batch_size": outcome.setup.job.workload.batch,
        "microbatch_size": layout.micro_batch,
        "datatype": "float16",
        "fused_activation": outcome.setup.job.stack.kernels.fused_pointwise,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[outcome.estimate.layout.recompute],
        "pipeline_interleaving": layout.stages_per_rank,
        "optimizer_sharding": layout.zero == 1 and data > 1,
        "tensor_par_comm_type": "rs_ag" if divided else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": divided and outcome.estimate.layout.recompute != "full",
        "data_par_overlap": outcome.setup.job.stack.overlap.data > 0 and data > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def compared(pairs: Sequence[Pair]) -> list[dict[str, object]]:
    """Return errors of both, by family and over all."""
    families: dict[str, list[Pair]] = {}
    for pair in pairs:
        families.setdefault(pair.outcome.run.family, []).append(pair)
    ours = {pair.outcome.run.id: point for pair in pairs if (point := pair.outcome.point)}
    theirs = {
        key: replace(point, ratio=ratio_of(pair))
        for pair in pairs
        for key, point in ours.items()
        if key == pair.outcome.run.id
    }
    groups = [*sorted(families.items()), ("all", list(pairs))]
    return [summary(name, members, ours, theirs) for name, members in groups if members]


def ratio_of(pair: Pair) -> float:
    """Return measured over Calculon's time."""
    assert pair.outcome.time is not None
    return pair.outcome.time.measured_s / pair.calculon_s


def summary(
    name: str, members: Sequence[Pair], ours: dict[str, CalibrationPoint], theirs: dict[str, CalibrationPoint]
) -> dict[str, object]:
    """Return one line of the table: both tools, raw and with a factor fitted on the other models of the same rows."""
    line: dict[str, object] = {"family": name, "rows": len(members)}
    for tool, points in (("planner", ours), ("calculon", theirs)):
        fitted = [points[pair.outcome.run.id] for pair in members]
        raw = errors(1 / point.ratio - 1 for point in fitted)
        scaled = errors(scalar_for(point, points.values()).value / point.ratio - 1 for point in fitted)
        line |= {tool: _values(raw), f"{tool}_with_factor": _values(scaled)}
    return line


def _values(summary: Errors | None) -> dict[str, float]:
    return {"median": summary.median, "worst": summary.worst, "bias": summary.bias} if summary else {}


def show(table: Sequence[dict[str, Any]], refused: Sequence[tuple[str, str]]) -> None:
    """Print the table."""
    print("median |predicted / measured - 1| (worst)".rjust(100))
    print(f"{'family':50} {'rows':>4}  {'planner':>16} {'+ factor':>16} {'Calculon':>16} {'+ factor':>16}")
    for line in table:
        cells = [
            f"{line[tool]['median']:6.1%} ({line[tool]['worst']:+.0%})".rjust(16)
            for tool in ("planner", "planner_with_factor", "calculon", "calculon_with_factor")
        ]
        print(f"{line['family']:50} {line['rows']:4}  {' '.join(cells)}")
    for name, reason in refused:
        print(f"Calculon refuses {name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
