"""Tools of schedulers: what they print, and what their errors mean."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from phalanx.launch.engines.order import EngineError, run_tool


def test_a_host_may_greet_in_any_encoding() -> None:
    assert run_tool(["printf", "\\377 phalanx-pid 7"]).endswith("phalanx-pid 7")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "squeue: fatal: Could not establish a configuration source",
            "sh: this machine belongs to no Slurm cluster",
        ),
        ("Unable to contact slurm controller (connect failure)", "sh: slurmctld does not answer"),
        ("something else", "sh: something else"),
        ("", "sh: exit code 3"),
    ],
)
def test_an_error_says_what_to_do(said: str, message: str) -> None:
    with pytest.raises(EngineError, match=re.escape(message)):
        run_tool(["sh", "-c", f"echo '{said}' >&2; exit 3"])


@pytest.mark.skipif(shutil.which("squeue") is None, reason="no Slurm is installed")
def test_slurms_own_words_on_a_machine_without_a_cluster_are_understood(tmp_path: Path) -> None:
    # With a configuration that names a controller at a port where nobody listens.
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\nAuthType=auth/none\n"
    )
    with pytest.raises(EngineError, match="slurmctld does not answer"):
        run_tool(["squeue"], environment={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"})


def test_a_tool_that_is_not_there_or_does_not_answer_is_named() -> None:
    with pytest.raises(EngineError, match="there is no sqeue on this machine"):
        run_tool(["sqeue"])
    with pytest.raises(EngineError, match="sleep has not answered for 0 s: is what it talks to up"):
        run_tool(["sleep", "9"], timeout_s=0.05)


def test_a_folder_that_is_not_there_is_named_and_not_the_tool(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot run printf: .*No such file.*/gone"):
        run_tool(["printf", "x"], folder=str(tmp_path / "gone"))


def test_a_tool_that_may_not_be_executed_is_named(tmp_path: Path) -> None:
    tool = tmp_path / "squeue"
    tool.write_text("#!/bin/sh\n")
    with pytest.raises(EngineError, match=r"cannot run .*squeue: .*Permission denied"):
        run_tool([str(tool)])
