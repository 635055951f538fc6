"""Options of sbatch that users pass on: read as getopt_long reads them, refused where they contradict the launcher, honored aloud from the environment."""

from __future__ import annotations

import getopt
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launch.engines.slurm_orders import order
from phalanx.launch.engines.order import EngineError
from phalanx.launch.engines.slurm_options import (
    FIELDS,
    LETTERS,
    REFUSED,
    VALUE_AT_ONCE,
    VARIABLES,
    WITH_VALUE,
    WITHOUT_VALUE,
    from_environment,
    options_in,
    refuse,
    without_overrulers,
)
from phalanx.launch.engines.slurm_script import joining_script
from phalanx.run.spec import LaunchSpec

needs_sbatch = pytest.mark.skipif(shutil.which("sbatch") is None, reason="no sbatch: make servers")
LONG = [*(f"{name}=" for name in sorted(WITH_VALUE)), *sorted(VALUE_AT_ONCE | WITHOUT_VALUE)]
SHORT = "".join(letter + (":" if name in WITH_VALUE else "") for letter, name in LETTERS.items())
CASES = [
    ("-HN9", "fleet.nodes"),
    ("-J'a\\' 'b --nodes=9 -Jc\\'", "fleet.nodes"),
    ("--licenses=a\v-N9", "fleet.nodes"),
    ("-N 9", "fleet.nodes"),
    ("--nodes=9", "fleet.nodes"),
    ("--nodes 9", "fleet.nodes"),
    ("--nod 9", "fleet.nodes"),
    ("-vQn4", "fleet.workers_per_node"),
    ("--ntasks-per-gpu=1", "fleet.workers_per_node"),
    ("-M other", "in the cluster of this machine"),
    ("--clusters=other", "in the cluster of this machine"),
    ("--wrap='sleep 1'", "the script is Phalanx's"),
    ("--wrap=true", "the script is Phalanx's"),
    ("--array=1-4%2", "a run is one job"),
    ("-Oa 1-4", "a run is one job"),
    ("-L lustre -a1", "a run is one job"),
    ("-W", "would submit nothing, or not return"),
    ("--test-only", "would submit nothing, or not return"),
    ("-HV", "would submit nothing, or not return"),
    ("-k", "a lost node never ends the others"),
    ("--no-kill=off", "a lost node never ends the others"),
    ("--open-mode=truncate", "holds all of its starts"),
    ("--uid=nobody", "among your own"),
    ("-s", "launch.exclusive"),
    ("--container-image=a/b:1", "launch.container_image"),
    ("--reservation=r", "launch.reservation"),
    ("hetjob", "heterogeneous job"),
    ("--licenses='a", "a quote in it has no end"),
    ("lustre", "is no option of sbatch"),
]
TAKEN = [
    "-H",
    "-Hv",
    "-L a-N9",
    "-La-N9",
    "-J -N9",
    "--job-name -N9",
    "--licenses=-N9",
    "--mem 0",
    "--time-min=5",
    "--gres=nvme:1",
    "--container /bundle",
    "--export=NONE",
    "--nice -v",
    "--nice=3 --mail-type=END # --array=1-4",
    "--sites-own=1",
]


@pytest.mark.parametrize(("line", "reason"), CASES)
def test_an_option_that_contradicts_the_launcher_is_refused_however_it_is_written(
    line: str, reason: str
) -> None:
    with pytest.raises(EngineError, match=re.escape(reason)) as caught:
        refuse(line)
    assert "launch.options" in str(caught.value)


@pytest.mark.parametrize("line", TAKEN)
def test_values_and_comments_are_no_options_and_what_contradicts_nothing_is_taken(line: str) -> None:
    refuse(line)


@st.composite
def spelled(draw: st.DrawFn) -> list[str]:
    """Words of a command line: letters joined, beginnings of names, values at once, after = and after a space, some of which look like options."""
    value = st.sampled_from(["9", "a,b", "-N9", "--array=1", "x=y"])
    words: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            flags = [letter for letter, name in LETTERS.items() if name in WITHOUT_VALUE]
            group = "".join(draw(st.lists(st.sampled_from(flags), max_size=2)))
            last = draw(st.sampled_from([letter for letter, name in LETTERS.items() if name in WITH_VALUE]))
            words += (
                [f"-{group}{last}{draw(value)}"] if draw(st.booleans()) else [f"-{group}{last}", draw(value)]
            )
        else:
            name = draw(st.sampled_from(LONG)).rstrip("=")
            abbreviation = f"--{name[: draw(st.integers(1, len(name)))]}"
            takes = name in WITH_VALUE
            joined = takes and draw(st.booleans())
            words += (
                [f"{abbreviation}={draw(value)}"]
                if joined
                else [abbreviation, *([draw(value)] if takes else [])]
            )
    return words


@given(words=spelled())
def test_a_line_is_read_as_getopt_reads_it(words: list[str]) -> None:
    # The standard library's getopt has the rules of getopt_long, for joined letters, beginnings and values.
    try:
        options, rest = getopt.getopt(words, SHORT, LONG)
    except getopt.GetoptError:
        assume(False)  # ambiguous: sbatch refuses it itself
    assume(not rest)
    names = [LETTERS[word[1]] if len(word) == 2 else word[2:] for word, _ in options]
    assert list(options_in(" ".join(words))) == names


@needs_sbatch
def test_every_option_of_the_installed_sbatch_is_known_with_its_letter_and_whether_it_takes_a_value(
    tmp_path: Path,
) -> None:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n")
    told = subprocess.run(
        ["sbatch", "--help"],
        env={**os.environ, "SLURM_CONF": str(path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = re.findall(r"^  (?:-(\w),?|  ) {1,2}--([a-z-]+)(\[?=?)", told, re.MULTILINE)
    assert len(found) > 80
    assert {letter: name for letter, name, _ in found if letter} == LETTERS
    assert {name for _, name, _ in found} <= WITH_VALUE | WITHOUT_VALUE | VALUE_AT_ONCE
    for _, name, sign in found:
        if name in (
            "wrap",
            "no-kill",
            "container",
        ):  # whose values the help does not show as getopt takes them
            continue
        assert name in {"=": WITH_VALUE, "[=": VALUE_AT_ONCE, "": WITHOUT_VALUE | VALUE_AT_ONCE}[sign]


@needs_sbatch
def test_every_variable_of_the_installed_sbatch_that_stands_for_a_refused_option_is_known() -> None:
    binary = Path(shutil.which("sbatch") or "").read_bytes()
    read = {name.decode() for name in re.findall(rb"SBATCH_[A-Z0-9_]+(?=\0)", binary)}
    assert {"SBATCH_ARRAY_INX", "SBATCH_TIMELIMIT"} <= read
    same_name = {
        name: option
        for name in read
        if (option := name.removeprefix("SBATCH_").lower().replace("_", "-")) in REFUSED
    }
    assert same_name.items() <= VARIABLES.items()
    assert VARIABLES.keys() <= read


def test_variables_of_sbatch_fill_the_fields_that_are_empty_and_give_way_to_those_that_are_not() -> None:
    environ = {
        "SBATCH_PARTITION": "gpu",
        "SBATCH_TIMELIMIT": "2-00",
        "SBATCH_QOS": "",
        "SBATCH_GRES": "nvme:1",
    }
    launch, said = from_environment(LaunchSpec(time_limit="1d"), environ)
    assert launch == LaunchSpec(partition="gpu", time_limit="1d")
    assert said == [
        "launch.partition = gpu, from SBATCH_PARTITION",
        "launch.time_limit = 1d, and not SBATCH_TIMELIMIT=2-00",
    ]
    assert without_overrulers(environ) == {"SBATCH_GRES": "nvme:1"}


def test_every_variable_that_contradicts_the_launcher_is_refused_at_once() -> None:
    contradicting = {name: "1" for name, option in VARIABLES.items() if option not in FIELDS}
    with pytest.raises(EngineError, match="unset them") as caught:
        from_environment(LaunchSpec(), {**contradicting, "SLURM_CLUSTERS": "a,b"})
    assert all(f"  {name}=1 in the environment: " in str(caught.value) for name in contradicting)
    assert "SLURM_CLUSTERS=a,b" in str(caught.value)
    assert from_environment(LaunchSpec(), {"SLURM_CLUSTERS": "a"}) == (LaunchSpec(), [])


@pytest.mark.parametrize("value", ["\udcff", "a\n#SBATCH -N9", "a\x1b[2J"])
def test_a_variable_that_nobody_can_read_is_refused_by_its_name(value: str) -> None:
    with pytest.raises(EngineError, match=r"SBATCH_QOS='.*' in the environment: no value of launch\.qos"):
        from_environment(LaunchSpec(), {"SBATCH_QOS": value})


@pytest.mark.parametrize("option", ["-w n1", "--nodelist=n1", "-F hosts.txt"])
def test_nodes_named_for_the_runs_own_job_are_not_asked_for_a_second_time(option: str) -> None:
    with pytest.raises(EngineError, match=r"phalanx agent --run"):
        joining_script(order(options=(option,)), 2)
