"""The Python interface: a few names, imported on use, that do what the commands do."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
import torch
from examples.mixer import Mixer

import phalanx
from forked_python import Popen, children, in_place_of_execution
from phalanx.api import _launch, _result
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import Event, Message, Restored, RunStarted, Step
from phalanx.parallel.pipeline_schedules import ScheduleName
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.fields import RunFileError
from phalanx.run.read import to_table
from phalanx.run.spec import CheckpointSpec, FleetSpec, ModelSpec, ParallelSpec, RunSpec
from phalanx.train.lifecycle.ending import Ending
from phalanx.train.start.open_run import OpenRun
from phalanx_process import ENVIRONMENT, TIMEOUT_S, last_json, run
from tiny_runs import tiny_run

ROOT = Path(__file__).parents[2]
OWN = ModelSpec(layers=3, dim=32)


def own_run(dataset: Path, run_dir: Path, ranks: int = 1) -> RunSpec:
    """A run of a model that is still to be named."""
    spec = dataclasses.replace(tiny_run(dataset, run_dir, 4), model=OWN)
    return dataclasses.replace(
        spec, checkpoint=CheckpointSpec(every_steps=1), parallel=ParallelSpec(ranks=ranks)
    )


@pytest.fixture(scope="module", autouse=True)
def _forked() -> Iterator[None]:
    """Ranks that this process starts are forked."""
    with in_place_of_execution():
        yield


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[phalanx.RunResult, list[Event]]:
    """A model of one's own, trained on two ranks from Python."""
    events: list[Event] = []
    spec = own_run(dataset, tmp_path_factory.mktemp("trained") / "run", ranks=2)
    return phalanx.train_run(spec, model=Mixer, on_event=events.append), events


def test_importing_phalanx_imports_nothing_else() -> None:
    code = "import sys, phalanx; sys.exit(any(name.startswith(('torch', 'numpy', 'phalanx.r', 'phalanx.a')) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_documented() -> None:
    for name in set(phalanx.__all__) - {"__version__"}:
        assert getattr(phalanx, name).__doc__, name
        assert name in dir(phalanx)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = phalanx.trian


def test_type_checkers_see_the_names_that_are_imported_on_use() -> None:
    tree = ast.parse((ROOT / "src" / "phalanx" / "__init__.py").read_text())
    seen = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    } - {"TYPE_CHECKING", "annotations"}
    assert {*seen, "__version__"} == set(phalanx.__all__)


def test_no_public_name_is_that_of_a_package() -> None:
    # `import phalanx.train` would put the package in the function's place.
    packages = {path.parent.name for path in (ROOT / "src" / "phalanx").glob("*/__init__.py")}
    assert not packages & set(phalanx.__all__)


def test_training_passes_on_its_events_and_returns_a_result(
    trained: tuple[phalanx.RunResult, list[Event]],
) -> None:
    result, events = trained
    steps = [event.body for event in events if isinstance(event.body, Step)]
    assert [step.step for step in steps] == [1, 2, 3, 4]
    assert steps[-1].loss == result.loss
    assert result.step == 4
    assert result.ranks == 2
    assert phalanx.open_run(result.run_dir).result == result
    assert phalanx.open_run(result.run_dir).saved_steps[-1] == 4


def test_the_weights_are_a_state_dict_of_the_users_model(
    trained: tuple[phalanx.RunResult, list[Event]],
) -> None:
    result, _ = trained
    place = Path(result.run_dir)
    assert phalanx.weights_sha256(place) == result.weights_sha256
    assert phalanx.weights_sha256(place / "checkpoints" / "step-00000004") == result.weights_sha256
    spec = phalanx.open_run(place).spec
    model = Mixer(spec.model)
    model.load_state_dict(phalanx.load_weights(place))
    # The likeliest token after the prompt, by the module itself and as the command computes it.
    text = phalanx.generate_text(place, "abc", tokens=1, temperature=0)
    likeliest = int(model(torch.tensor([list(b"abc")]))[0, -1].argmax())
    assert text == (bytes([likeliest]).decode(errors="replace") if likeliest < 256 else "")
    with pytest.raises(RunDirectoryError, match=r"no step 9 .* there are"):
        phalanx.load_weights(place, step=9)


def test_a_complete_run_gives_its_result_again(
    trained: tuple[phalanx.RunResult, list[Event]],
) -> None:
    assert phalanx.open_run(trained[0].run_dir).resume() == trained[0]


def test_a_run_of_ones_own_model_is_made_longer(
    trained: tuple[phalanx.RunResult, list[Event]], tmp_path: Path
) -> None:
    run_dir = f"run_dir={json.dumps(str(tmp_path / 'child'))}"
    spec = phalanx.open_run(trained[0].run_dir).child("train.steps=5", "parallel.ranks=1", run_dir)
    events: list[Event] = []
    assert phalanx.train_run(spec, on_event=events.append).step == 5
    assert [event.body.step for event in events if isinstance(event.body, Step)] == [5]


def test_a_run_with_a_killed_rank_fails_and_resumes_to_the_same_weights(
    trained: tuple[phalanx.RunResult, list[Event]],
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(children(os.getpid()))

    def kill_the_ranks(event: Event) -> None:
        if isinstance(event.body, Restored | RunStarted):
            # All stand still before the first dies: none has the time to report that another is gone.
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in set(children(os.getpid())) - before:
                    os.kill(pid, number)

    spec = own_run(dataset, tmp_path / "run", ranks=2)
    with monkeypatch.context() as patch:
        # The forked ranks wait in their first step: a busy machine lets this process read their first event late.
        patch.setattr(Mixer, "forward", lambda *_: time.sleep(TIMEOUT_S))
        with pytest.raises(phalanx.RunFailedError, match="SIGKILL"):
            phalanx.train_run(spec, model=Mixer, on_event=kill_the_ranks)
    alone = dataclasses.replace(spec, parallel=ParallelSpec(ranks=1))
    assert phalanx.train_run(alone, model=Mixer).weights_sha256 == trained[0].weights_sha256


def test_an_exception_of_the_callback_is_raised_with_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OpenRun(RunDirectory(tmp_path), RunSpec(parallel=ParallelSpec(ranks=1)), 0, -1)

    def divide_by_zero(_event: Event) -> None:
        _ = 1 / 0

    def launch(_run: OpenRun, _ranks: int, while_running: Callable[[Callable[[], bool]], None]) -> Ending:
        with EventLog(run.directory.events, 0) as log:
            log.append(Message("warning", "anything"))
        while_running(lambda: True)
        return Ending("finished")

    monkeypatch.setattr("phalanx.api.run_locally", launch)
    with pytest.raises(ZeroDivisionError) as caught:
        _launch(run, tmp_path, divide_by_zero)
    assert re.search(r"the run saves and stops; to resume: .*resume\(\)", "".join(caught.value.__notes__))
    assert "divide_by_zero" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("kind", [phalanx.CustomModelError, phalanx.FactoryError])
def test_the_refusal_of_a_model_by_a_rank_is_the_callers_error(kind: type[Exception], tmp_path: Path) -> None:
    run = OpenRun(RunDirectory(tmp_path), RunSpec(), 0, -1)
    with pytest.raises(kind, match=r"^it has no blocks$"):
        _result(run, Ending("failed", 1, 1, "it has no blocks", kind.__name__))


@pytest.mark.slow
def test_a_fleet_from_a_run_file_recovers_a_users_model_with_the_same_bits(
    trained: tuple[phalanx.RunResult, list[Event]], dataset: Path, tmp_path: Path
) -> None:
    copy_the_example(tmp_path)
    spec = own_run(dataset, tmp_path / "run", ranks=2)
    spec = dataclasses.replace(
        spec,
        model=dataclasses.replace(OWN, factory="examples.mixer:Mixer"),
        fleet=FleetSpec(nodes=2, heartbeat_s=1.0, lease_s=4.0),
    )
    (tmp_path / "mixer.toml").write_text(tomli_w.dumps(to_table(spec)))
    result = last_json(run(["train", "mixer.toml", "--fault", "kill rank 1 at step 3", "--json"], tmp_path))
    assert result["weights_sha256"] == trained[0].weights_sha256
    assert len(result["recoveries"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelSpec(tensor=2)}, r"parallel\.tensor.*examples.mixer:Mixer does not state how"),
        ({"fleet": FleetSpec(nodes=3), "parallel": ParallelSpec(pipeline=2)}, "3 ranks"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_anything_starts(
    changes: dict[str, Any], message: str, dataset: Path, tmp_path: Path
) -> None:
    spec = dataclasses.replace(own_run(dataset, tmp_path / "run"), **changes)
    with pytest.raises(RunFileError, match=message):
        phalanx.train_run(spec, model=Mixer)
    assert not (tmp_path / "run").exists()


def test_the_model_given_replaces_the_source_digest_of_the_one_before(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Prepared(Exception):  # noqa: N818 - ends the call before ranks start
        pass

    def prepare(spec: RunSpec, *_: object) -> None:
        raise Prepared(spec.model)

    monkeypatch.setattr("phalanx.api.prepare_run", prepare)
    before = dataclasses.replace(OWN, factory="examples.mixer:Other", factory_sha256="0" * 64)
    spec = dataclasses.replace(own_run(dataset, tmp_path / "run"), model=before)
    with pytest.raises(Prepared) as caught:
        phalanx.train_run(spec, model=Mixer)
    assert caught.value.args[0] == dataclasses.replace(OWN, factory="examples.mixer:Mixer")


def test_a_condition_is_refused_where_one_layout_is_estimated() -> None:
    spec = phalanx.read_run_file(ROOT / "configs" / "quickstart.toml")
    with pytest.raises(ValueError, match=r"tp<=2: a condition is for a search.*leave the layout out"):
        phalanx.plan_run(spec, "h100:8", layout="dp=8", require=["tp<=2"])


def test_a_plan_is_what_the_command_prints() -> None:
    spec = phalanx.read_run_file(ROOT / "configs" / "quickstart.toml", "train.steps=20")
    plan = phalanx.plan_run(spec, "h100:8", require=["tp<=2"])
    assert plan["best"][0]["accelerators"] == 8
    for point in plan["front"]:
        assert isinstance(point["layout"], str)
        assert point["fields"]["tensor"] <= 2
        assert point["fields"]["schedule"] in get_args(ScheduleName)
    with pytest.raises(ValueError, match="a model of your own"):
        phalanx.plan_run(
            dataclasses.replace(spec, model=dataclasses.replace(OWN, factory="examples.mixer:Mixer")),
            "h100:8",
        )


def test_the_example_of_the_readme_runs_as_printed(dataset: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert 4 <= len(block.splitlines()) <= 12
    copy_the_example(tmp_path)
    (tmp_path / "configs").mkdir()
    small = own_run(dataset, tmp_path / "run")  # on which the example's overrides work too
    (tmp_path / "configs" / "quickstart.toml").write_text(tomli_w.dumps(to_table(small)))
    (tmp_path / "example.py").write_text(block)
    process = Popen(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        starts_others=True,
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    result = phalanx.open_run(tmp_path / "run").result
    assert result is not None
    assert out.startswith(f"{result.loss} {result.weights_sha256}\n")


def copy_the_example(folder: Path) -> None:
    (folder / "examples").mkdir()
    shutil.copyfile(ROOT / "examples" / "mixer.py", folder / "examples" / "mixer.py")
