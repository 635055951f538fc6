"""Limits of accounts and QOS that would keep a job waiting for ever are found before it is queued, with a real slurmdbd too."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launch.engines.slurm_cluster import SlurmCluster, missing, slurm_cluster
from phalanx.launch.engines.order import EngineError, LaunchOrder, run_tool
from phalanx.launch.engines.slurm_options import Limit, limit_problems, limits_of
from phalanx.run.spec import LaunchSpec

ORDER = LaunchOrder(
    "run", Path("/shared/run"), Path("/home"), 4, 1, 8, 0, "python", LaunchSpec(account="team")
)
ENFORCED = "ClusterName             = big\nAccountingStorageEnforce = associations,limits,qos\n"


def asked(answers: dict[str, str]) -> list[Limit]:
    """The limits that are found with these answers, by a word that stands in the command."""

    def run(words: Sequence[str]) -> str:
        line = " ".join(words)
        return next((answer for word, answer in answers.items() if word in line), "")

    return limits_of(ORDER, run)


def test_a_job_larger_than_a_limit_is_refused_and_one_that_just_fits_is_not() -> None:
    assert list(limit_problems(ORDER, [Limit("the account team", "--account", nodes=5, gpus=40)])) == []
    (nodes,) = limit_problems(ORDER, [Limit("the account team", "--account", nodes=4)])
    assert nodes == (
        "fleet.nodes + fleet.spares = 5: the account team may have 4 nodes: --nodes, --spares or another --account"
    )
    (gpus,) = limit_problems(ORDER, [Limit("the QOS gold", "--qos", gpus=39)])
    assert gpus.startswith("launch.gpus_per_node: 40 GPUs are requested, and the QOS gold may have 39")
    timed = replace(ORDER, launch=replace(ORDER.launch, time_limit="2d"))
    (time,) = limit_problems(timed, [Limit("the QOS gold", "--qos", wall_s=86_400)])
    assert "2d is more than the QOS gold may take (1-00:00:00)" in time


def test_limits_of_the_accounts_above_count_too_and_a_circle_of_accounts_ends() -> None:
    limits = asked(
        {
            "show config": ENFORCED,
            "account=team": f"{getpass.getuser()}|||node=9|1-00:00:00|gold\n|all|cpu=1|||\nsomebody|||node=1||\n",
            "account=all": "|team|node=7,gres/gpu=20|||\n",
            "show qos gold": "node=12|node=6|node=3,gres/gpu=24|\n",
        }
    )
    assert [(one.nodes, one.gpus) for one in limits] == [(9, None), (None, None), (7, 20), (3, 24)]
    assert limits[0].wall_s == 86_400


def test_a_cluster_that_enforces_no_limits_is_not_asked_for_any() -> None:
    def run(words: Sequence[str]) -> str:
        assert words[0] == "scontrol"
        return "AccountingStorageEnforce = none\n"

    assert limits_of(ORDER, run) == []


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.skipif(
    bool(missing(accounting=True)), reason=f"no Slurm with accounts: {missing(accounting=True)}"
)
def test_slurms_own_accounts_are_read_as_slurm_enforces_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm_cluster(tmp_path, accounting=True) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        _make_accounts(cluster)
        small = replace(ORDER, gpus_per_node=0, launch=LaunchSpec(account="small"))
        (refused,) = limit_problems(small, limits_of(small))
        assert "the account all may have 3 nodes" in refused
        # What is found is what Slurm holds a job to: it would have waited for ever.
        job = run_tool(["sbatch", "--parsable", "-A", "small", "-N", "5", "--wrap", "true"]).strip()
        reason = run_tool(["squeue", "-h", "-j", job, "-o", "%r"]).strip()
        assert reason in ("AssocGrpNodeLimit", "None", "Priority")
        cluster.wait_until(
            lambda: run_tool(["squeue", "-h", "-j", job, "-o", "%r"]).strip() == "AssocGrpNodeLimit"
        )
        assert list(limit_problems(replace(small, nodes=2), limits_of(small))) == []
        gold = replace(small, nodes=2, launch=LaunchSpec(account="small", qos="gold", time_limit="2h"))
        (long,) = limit_problems(gold, limits_of(gold))
        assert "2h is more than the QOS gold may take (0-01:00:00)" in long
        with pytest.raises(EngineError, match="account"):
            run_tool(["sbatch", "-A", "nobody", "-N", "1", "--wrap", "true"])


def _make_accounts(cluster: SlurmCluster) -> None:
    for words in (
        ("add", "account", "all", "GrpTRES=node=3"),
        ("add", "account", "small", "parent=all"),
        ("add", "qos", "gold", "MaxWall=01:00:00"),
        ("add", "user", getpass.getuser(), "account=small", "qos=normal,gold", "defaultqos=normal"),
    ):
        cluster.tool("sacctmgr", "-i", "-Q", *words)
