"""``phalanx submit --on kubernetes --dry-run``: the manifests, without a cluster."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from phalanx.cli.launch.submit import submit_command as command
from phalanx_process import RUN_FILE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(RUN_FILE.format(data="/data/words"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "PATH", "")  # no kubectl is needed, and none is there
    return tmp_path


def submit(*words: str) -> Result:
    given = ["tiny.toml", "--on", "kubernetes", "--nodes", "2", "--image", "registry.example/phalanx:0.1"]
    return CliRunner().invoke(command, [*given, "--set", 'launch.container_mounts=["runs:/runs"]', *words])


def test_a_dry_run_prints_manifests_that_hold_the_frozen_run_file_and_writes_them_where_told(
    folder: Path,
) -> None:
    done = submit("--queue", "research", "--spares", "1", "--dry-run", "--out", "run.yaml")
    assert done.exit_code == 0, done.output
    kinds = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert set(kinds) == {"Secret", "PodDisruptionBudget", "ConfigMap", "JobSet"}
    run_file: dict[str, Any] = tomllib.loads(kinds["ConfigMap"]["data"]["run.toml"])
    assert run_file["fleet"]["nodes"] == 2
    assert run_file["run_dir"] == kinds["JobSet"]["metadata"]["annotations"]["phalanx.run/directory"]
    assert (folder / "run.yaml").read_text() == done.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["run.yaml", "tiny.toml"]


def test_node_labels_come_with_what_an_administrator_allows(folder: Path) -> None:  # noqa: ARG001
    done = submit("--set", 'launch.domain_labels=["rack"]', "--namespace", "team", "--dry-run")
    manifests = list(yaml.safe_load_all(done.stdout))
    account, _, binding = manifests[:3]
    name = "phalanx-node-labels"
    assert (account["kind"], account["metadata"]["name"]) == ("ServiceAccount", name)
    assert binding["kind"] == "ClusterRoleBinding"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": "team"}]
    job = manifests[-1]["spec"]["replicatedJobs"][0]["template"]
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == name


def test_without_kubectl_a_real_submission_says_what_to_do(folder: Path) -> None:  # noqa: ARG001
    done = submit()
    assert done.exit_code == 1
    assert "there is no kubectl on this machine" in done.output


def test_what_is_about_kubernetes_is_refused_elsewhere(folder: Path) -> None:  # noqa: ARG001
    done = CliRunner().invoke(command, ["tiny.toml", "--on", "local", "--nodes", "2", "--namespace", "team"])
    assert "launch.namespace: is about Kubernetes" in done.output
    done = CliRunner().invoke(
        command, ["tiny.toml", "--on", "local", "--nodes", "2", "--out", "x", "--dry-run"]
    )
    assert "--out is for manifests; --on local has none" in done.output
