"""Changed configurations of published architectures, imported and exported again: each has the logits of transformers, or is refused.

A case takes a small configuration (those of ``tests/parity/hf_models.py``), changes one to three of its fields, makes a model of it with
transformers and random weights, saves that as a folder, imports the folder, and compares the logits; the import is exported again, and
transformers must read the same bits from it. transformers itself refuses many changes; those cases do not count.

    python -m bench.reproduce.families --cases 500                # some minutes
    python -m bench.reproduce.families --seed 3 --case 41         # one again, with the differences
    python -m bench.reproduce.families --cases 100 --json
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from bench.running import run_bench
from parity.hf_models import CONFIGS, LLAMA3_ROPE, LONGROPE, YARN, hf_model
from phalanx import load_weights, read_run_file
from phalanx.checkpoint.interop.huggingface.config import HuggingFaceError
from phalanx.checkpoint.interop.huggingface.convert import export_hf, import_hf
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.model.transformer import Transformer

TOLERANCE = 2e-5
"""Relative to the largest logit, in fp32."""
VALUES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1, 2, 3, 5),
    "hidden_size": (16, 24, 30, 48),
    "intermediate_size": (8, 33, 64),
    "num_attention_heads": (1, 2, 4, 8),
    "num_key_value_heads": (1, 2, 3, 4, None),
    "head_dim": (4, 6, 10, 16, None),
    "vocab_size": (61, 97, 128),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2),
    "hidden_act": ("silu", "gelu", "relu", "swish", "gelu_pytorch_tanh"),
    "rope_parameters": (
        LLAMA3_ROPE,
        YARN,
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
        LONGROPE,
        {**LONGROPE, "attention_factor": 0.8},
        {**LONGROPE, "factor": 3.0},
        {**LONGROPE, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ),
    "max_position_embeddings": (64, 128, 4096),
    "original_max_position_embeddings": (16, 32, 64),
    "sliding_window": (None, 4, 9, 4096),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 28),
    "layer_types": (
        ["full_attention"] * 2,
        ["sliding_attention", "full_attention"],
        ["sliding_attention"] * 3,
    ),
    "attention_dropout": (0.0, 0.1),
    "num_experts": (4, 6, 8),
    "num_local_experts": (2, 4, 8),
    "n_routed_experts": (4, 8, 12),
    "num_experts_per_tok": (1, 2, 3),
    "moe_intermediate_size": (8, 16, 20),
    "n_shared_experts": (0, 1, 2),
    "n_group": (1, 2, 4),
    "topk_group": (1, 2, 3),
    "norm_topk_prob": (True, False),
    "routed_scaling_factor": (1.0, 2.5),
    "first_k_dense_replace": (0, 1, 2, 3),
    "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([], [0], [0, 1], [1]),
    "q_lora_rank": (None, 8, 24),
    "kv_lora_rank": (8, 16),
    "qk_rope_head_dim": (4, 8),
    "qk_nope_head_dim": (4, 12),
    "v_head_dim": (6, 10, 16),
    "rope_interleave": (True, False),
    "shared_expert_intermediate_size": (8, 16, 32, 48),
    "qkv_bias": (True, False),
    "partial_rotary_factor": (0.25, 0.5, 0.75, 1.0),
    "rotary_dim": (2, 4, 6, 8),
    "attn_logit_softcapping": (None, 0.5, 50.0),
    "final_logit_softcapping": (None, 0.5, 30.0),
    "query_pre_attn_scalar": (4, 24, 144),
    "resid_pdrop": (0.0, 0.1),
    "use_qk_norm": (True, False),
    "swiglu_alpha": (1.0, 1.702),
    "swiglu_limit": (0.05, 7.0),
}
OUTCOMES = ("equal", "refused", "refused by transformers", "not finite", "wrong", "broken")


@dataclass(frozen=True)
class Finding:
    """A case with its outcome."""

    number: int
    config: str
    changes: dict[str, Any]
    outcome: str
    detail: str


def main() -> None:
    """Run the cases and print the table of outcomes; exit code 1 if a model computes something else, or an import breaks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only configurations whose name begins so")
    parser.add_argument("--case", type=int, help="only the case with this number")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = range(options.cases) if options.case is None else range(options.case, options.case + 1)
    findings = []
    for number in numbers:
        findings.append(_judge(number, options.seed, options.only))
        if number % 50 == 49:
            print(f"{number + 1} of {options.cases}", file=sys.stderr, flush=True)
    print(
        _as_json(findings) if options.json else _as_table(findings, with_all_cases=options.case is not None)
    )
    sys.exit(any(finding.outcome in ("wrong", "broken") for finding in findings))


def _judge(number: int, seed: int, only: str) -> Finding:
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice([name for name in sorted(CONFIGS) if name.startswith(only)])
    table = CONFIGS[name].to_dict()
    fields = [field for field in VALUES if field in table]
    changes = {
        field: copy.deepcopy(draw.choice(VALUES[field])) for field in draw.sample(fields, draw.randint(1, 3))
    }
    try:
        theirs = hf_model(type(CONFIGS[name]).from_dict({**table, **changes}), seed=number).eval()
        tokens = _tokens(theirs.config.vocab_size, number)
        with torch.no_grad():
            logits = theirs(tokens).logits
    except Exception as error:
        return Finding(number, name, changes, "refused by transformers", f"{type(error).__name__}: {error}")
    if not logits.isfinite().all():
        return Finding(number, name, changes, "not finite", "")
    with tempfile.TemporaryDirectory(prefix="phalanx-parity-") as folder:
        return Finding(number, name, changes, *_compared(theirs, tokens, logits, Path(folder)))


def _tokens(vocab_size: int, seed: int) -> torch.Tensor:
    """Return random tokens, int64 ``(2, 80)``: longer than every window and than the context that rotary embeddings are stretched from."""
    return torch.randint(vocab_size, (2, 80), generator=torch.Generator().manual_seed(seed))


def _compared(theirs: Any, tokens: torch.Tensor, logits: torch.Tensor, folder: Path) -> tuple[str, str]:
    """Import and export ``theirs``. Return the outcome and its detail."""
    theirs.save_pretrained(folder / "published")
    try:
        import_hf(folder / "published", folder / "run")
        model = read_run_file(str(folder / "run" / "run.toml")).model
        ours = Transformer(model)
        ours.load_state_dict(load_weights(folder / "run"))
        with torch.no_grad():
            here = _difference(ours(tokens), logits)
    except HuggingFaceError as error:
        return "refused", str(error)
    except Exception as error:
        return "broken", f"{type(error).__name__}: {error}"
    if not here < TOLERANCE:
        return "wrong", f"logits differ by {here:.1e}"
    try:
        tier, published = DiskTier(folder / "run" / "checkpoints"), folder / "run" / "published"
        export_hf(tier, 0, model, folder / "exported", "float32", published_dir=published)
    except HuggingFaceError as error:
        return "equal", f"not exported: {error}"
    try:
        again = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
        with torch.no_grad():
            there = _difference(again(tokens).logits, logits)
    except Exception as error:
        return "wrong", f"exported: transformers cannot compute it: {type(error).__name__}: {error}"
    published, exported = theirs.state_dict(), again.state_dict()
    changed = [name for name, value in published.items() if not torch.equal(value, exported[name])]
    # Rotated rows are always written as neighbors, also if they were published otherwise: the same model in another order.
    reordered = getattr(theirs.config, "rope_interleave", None) is False
    if not there < TOLERANCE or (changed and not reordered):
        return "wrong", f"exported: logits differ by {there:.1e}, other bits in {', '.join(changed)[:200]}"
    return "equal", ""


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _as_table(findings: list[Finding], *, with_all_cases: bool) -> str:
    families = sorted({_family(finding) for finding in findings})
    counts = {family: Counter(it.outcome for it in findings if _family(it) == family) for family in families}
    counts["together"] = Counter(it.outcome for it in findings)
    rows = [
        f"| {family} | {total.total()} | " + " | ".join(str(total[kind]) for kind in OUTCOMES) + " |"
        for family, total in counts.items()
    ]
    head = ["| family | cases | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 2) + "|"]
    details = [
        f"\ncase {it.number}, {it.config}: {it.outcome}\n  {it.changes}\n  {it.detail}"
        for it in findings
        if with_all_cases or it.outcome in ("wrong", "broken")
    ]
    return "\n".join([*head, *rows, *details])


def _family(finding: Finding) -> str:
    return finding.config.split(",")[0]


def _as_json(findings: list[Finding]) -> str:
    return json.dumps([vars(finding) for finding in findings], indent=2)


if __name__ == "__main__":
    run_bench(main)
