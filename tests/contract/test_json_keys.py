"""Keys and types of what commands print with ``--json``."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest

from contract.conftest import Contract
from contract.recorded import key_paths, read_record
from contract.test_commands import commands
from data.portions.making_raw import raw_folder, recipe_file
from phalanx.cli.main import exit_code, phalanx_command
from phalanx_process import run
from recorded_runs import RecordedRun

NOT_EXERCISED = {
    "agent": "takes part in a fleet until its run ends",
    "calibrate": "measures this machine for minutes",
    "fleet add": "needs a running fleet",
    "fleet drain": "needs a running fleet",
    "fleet grow": "needs a running fleet",
    "fleet rotate-tokens": "needs a running fleet",
    "fleet serve": "needs a running fleet",
    "fleet shrink": "needs a running fleet",
    "fleet stop": "needs a running fleet",
    "profile": "needs a run that is training",
    "serve": "runs until it is stopped",
    "plan fit": "needs finished runs of several sizes",
    "plan layout": "prints what `plan` prints",
    "submit": "needs a cluster's engine",
}
"""Commands with ``--json`` whose keys are not recorded, and why."""

CASES = {
    "checkpoint copy": "checkpoint copy runs/tiny copied --json",
    "checkpoint list": "checkpoint list runs/tiny --json",
    "checkpoint verify": "checkpoint verify runs/tiny --json",
    "data copy": "data copy words copied-words --json",
    "data mixture": "data mixture tiny.toml --json",
    "data order": "data order runs/tiny --step 1 --json",
    "data plan": "data plan recipe.toml --json",
    "data prepare": "data prepare text.txt --out prepared --tokenizer bytes --json",
    "data prepare, of a recipe": "data prepare recipe.toml --out portions --workers 1 --json",
    "data show, of a run": "data show runs/tiny --step 1 --json",
    "data show, of a dataset": "data show portions --json",
    "data trace": "data trace portions --record 0 --json",
    "data where": "data where runs/tiny --record 1 --json",
    "diff": "diff runs/tiny runs/tiny --json",
    "goodput": "goodput runs/tiny --json",
    "hardware": "hardware --json",
    "hash": "hash runs/tiny --json",
    "logs": "logs runs/tiny --json",
    "models": "models --json",
    "place": "place placed.toml --topology fabric.toml --nodes 4 --spares 1 --json",
    "plan": "plan tiny.toml --cluster h100:8 --json",
    "plan budget": "plan budget 1e22FLOP --kind dense --json",
    "plan serve": "plan serve tiny.toml --cluster h100:8 --traffic in=64,out=8 --json",
    "plan stacks": "plan stacks --json",
    "plan, of one layout": "plan tiny.toml --cluster h100:2 --layout dp=2 --json",
    "ranks": "ranks runs/tiny --json",
    "reproduce": "reproduce runs/tiny --dry-run --json",
    "runs compare": "runs compare runs/tiny runs/tiny --json",
    "runs list": "runs list runs --json",
    "runs show": "runs show runs/tiny --json",
    "show": "show tiny.toml --json",
    "simulate fleet": "simulate fleet --nodes 16 --days 2 --rate 50 --json",
    "simulate fleet, small worlds": "simulate fleet --small --seeds 0:2 --json",
    "simulate start": "simulate start --json",
    "simulate traffic": "simulate traffic --seeds 0:1 --json",
    "status": "status fleet --json",
    "why": "why fleet --json",
}
"""Commands that answer in this process, by the name of their part of the record."""
IN_OTHER_PROCESS = {
    "generate": "generate runs/tiny --prompt ab --tokens 2 --json",
    "health": "health --device cpu --memory-mib 1 --disk-mib 1 --json",
    "import": "import exported --out imported --json",
    "score": "score runs/tiny short.txt --json",
    "eval": "eval runs/tiny --file questions.jsonl --json",
}
"""Commands that compute with PyTorch."""
OF_A_RUN_MADE_HERE = {"spike": "spike runs/tiny 2 --json"}
"""Commands that replay steps: those of the stored run have other bits on another kind of processor, and so other keys."""

FABRIC = '[[levels]]\nname = "leaf"\n[nodes]\n"n[1-4]" = "l1"\n"n[5-8]" = "l2"\n'
PLACED = "\n[fleet]\nnodes = 4\nspares = 1\nworkers_per_node = 1\n"


def printed(words: list[str]) -> Any:
    """Run a command in this process; return what it printed as JSON, the last line's if not all is one value."""
    out, errors = io.StringIO(), io.StringIO()
    # Codes other than 0 are results of these commands too, such as a difference; test_exit_codes.py has them.
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        exit_code(words)
    assert out.getvalue().strip(), f"{words}: {errors.getvalue()}"
    return as_json(out.getvalue())


def as_json(text: str) -> Any:
    """Parse all of a text, or its last line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text.splitlines()[-1])


@pytest.fixture
def work(in_stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stored files, with a recipe, a topology, and the run of a fleet that lost a node."""
    shutil.copytree(in_stored, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("some words to prepare " * 20)
    (tmp_path / "short.txt").write_text("some words")
    question = {"context": "a", "choices": ["b", "c"], "answer": 0}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    raw_folder(tmp_path)
    recipe_file(tmp_path, '[[step]]\nuse = "length"\nmin_words = 3', output="seq_len = 64")
    (tmp_path / "fabric.toml").write_text(FABRIC)
    (tmp_path / "placed.toml").write_text(
        (tmp_path / "tiny.toml")
        .read_text()
        .replace("slots = 2", "slots = 4")
        .replace("ranks = 1", "ranks = 4")
        + PLACED
    )
    fleet = RecordedRun(tmp_path / "fleet", "fleet", 30)
    fleet.train(20)
    fleet.lose_a_node()
    fleet.train(5)
    return tmp_path


def test_the_keys_of_json_outputs_are_those_recorded(
    contract: Contract, work: Path, trained: tuple[Path, dict[str, object]]
) -> None:
    outputs = {name: printed(words.split()) for name, words in CASES.items()}
    assert run(["export", "runs/tiny", "exported"], work).returncode == 0
    elsewhere = [(work, *case) for case in IN_OTHER_PROCESS.items()]
    for folder, name, words in [*elsewhere, *((trained[0], *case) for case in OF_A_RUN_MADE_HERE.items())]:
        done = run(words.split(), folder)
        assert done.returncode == 0, done.stderr
        outputs[name] = as_json(done.stdout)
    outputs["train"] = trained[1]
    facts: dict[str, str] = {}
    for name, value in outputs.items():
        facts |= {f"{name}: {path}": kind for path, kind in key_paths(value).items()}
    contract("json_keys", facts)


def test_every_command_with_json_is_recorded_or_listed_with_a_reason() -> None:
    with_json = {
        words
        for words, command in commands(phalanx_command)
        if any("--json" in param.opts for param in command.params if isinstance(param, click.Option))
    }
    recorded = {name.partition(":")[0].partition(",")[0] for name in read_record("json_keys")}
    assert with_json - recorded - NOT_EXERCISED.keys() == set(), (
        "add a case to CASES, or a reason to NOT_EXERCISED"
    )
    assert NOT_EXERCISED.keys() - with_json == set()
    assert NOT_EXERCISED.keys() & recorded == set()
