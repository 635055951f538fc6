"""Tasks scored by ``phalanx eval`` and by lm-evaluation-harness over the same model in transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from parity.llama3_folder import save_llama3
from phalanx.checkpoint.interop.huggingface.convert import import_hf
from phalanx_serve.cli.scoring import eval_command

CLIENTS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-clients") / "bin"
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        not (CLIENTS / "lm_eval").exists(), reason="lm-evaluation-harness is not installed: make clients"
    ),
]
TOLERANCE_NATS = 1e-4
ITEMS = [
    {"context": "the cat and", "choices": [" the dog", " 7 7 7", " naïve x"], "answer": 0},
    {"context": "def f(x):", "choices": ["\n    return", " naïve"], "answer": 0},
    {"context": "two plus two is ", "choices": ["four", "five five", "6"], "answer": 0},
    {"context": "", "choices": ["a b", "the cat"], "answer": 1},
    {"context": "x = 1;  ", "choices": ["y = 2", "z"], "answer": 1},
    {"context": "a long context " * 40, "choices": ["one", "other"], "answer": 1},
]
HARNESS = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

folder, file, length = sys.argv[1:]
model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1, max_length=int(length))
for line in open(file):
    item = json.loads(line)
    pairs = [(item["context"], choice) for choice in item["choices"]]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    print("scored", json.dumps(model.loglikelihood(requests, disable_tqdm=True)))
"""


def test_every_choice_has_the_log_probability_of_lm_evaluation_harness(tmp_path: Path) -> None:
    save_llama3(tmp_path / "llama3")
    import_hf(tmp_path / "llama3", tmp_path / "run")
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in ITEMS))
    options = [tmp_path / "run", "--file", tmp_path / "items.jsonl", "--scores", tmp_path / "scores.jsonl"]
    done = CliRunner().invoke(eval_command, [*map(str, options), "--json"])
    assert done.exit_code == 0, done.output
    ours = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    length = json.loads((tmp_path / "llama3" / "config.json").read_text())["max_position_embeddings"]
    # The harness has no PyTorch of its own.
    env = os.environ | {"PYTHONPATH": str(Path(torch.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    command = [CLIENTS / "python", "-c", HARNESS, tmp_path / "llama3", tmp_path / "items.jsonl", length]
    theirs = subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, check=False
    )
    assert theirs.returncode == 0, theirs.stderr
    scored = [
        json.loads(line.split(" ", 1)[1]) for line in theirs.stdout.splitlines() if line.startswith("scored")
    ]
    assert len(scored) == len(ITEMS)
    for own, pairs in zip(ours, scored, strict=True):
        assert own["log_probabilities"] == pytest.approx([nats for nats, _ in pairs], abs=TOLERANCE_NATS)
        assert own["greedy"] == [greedy for _, greedy in pairs]
