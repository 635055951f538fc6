"""lm-evaluation-harness, as it is published, over a served model: multiple choice, perplexity and generated text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.llama3_folder import save_tokenizer

CLIENTS = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-clients") / "bin"
pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        not (CLIENTS / "lm_eval").exists(), reason="lm-evaluation-harness is not installed: make clients"
    ),
]
DOCUMENTS = [
    {"q": "the cat and", "choices": [" the dog", " 7 7 7"], "gold": 0},
    {"q": "def f(x):", "choices": ["\n    return", " naïve"], "gold": 0},
]
TASKS: dict[str, dict[str, object]] = {
    "choice": {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}"},
    "perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": ""},
    "generated": {"output_type": "generate_until", "doc_to_text": "{{q}}"},
}
TARGETS = {"choice": "{{gold}}", "perplexity": "{{q}}", "generated": "{{choices[gold]}}"}
METRICS = {"choice": ["acc", "acc_norm"], "perplexity": ["bits_per_byte"], "generated": ["exact_match"]}
GENERATED: dict[str, object] = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    for name, fields in TASKS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "documents.jsonl")}},
            "test_split": "test",
            "doc_to_target": TARGETS[name],
            "metric_list": [{"metric": metric} for metric in METRICS[name]],
            **fields,
            **({"generation_kwargs": GENERATED} if name == "generated" else {}),
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    save_tokenizer(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.parametrize("interface", ["local-completions", "local-chat-completions"])
def test_its_tasks_run_over_both_interfaces(interface: str, base_url: str, model: str, tasks: Path) -> None:
    chat = interface == "local-chat-completions"
    arguments = {
        "model": model,
        "base_url": f"{base_url}/{'chat/' * chat}completions",
        "tokenizer": str(tasks / "tokenizer"),
    }
    names = ["generated"] if chat else list(TASKS)  # scoring of given texts is for completions alone
    command = [str(CLIENTS / "lm_eval"), "--model", interface, "--tasks", ",".join(names)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", str(tasks), "--output_path", str(tasks / "out")]
    command += ["--apply_chat_template"] * chat
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "hf")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = (tasks / "out").rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    for name in names:
        assert {f"{metric},none" for metric in METRICS[name]} <= results[name].keys()
