"""Runs that diverge, end without an order, wait in a queue or train on fewer ranks than were requested."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest

from phalanx.fleet.control.fleet_file import Member
from phalanx.launch.engines.engine import JobStanding
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    EndedEarly,
    EpochLeft,
    Evaluated,
    Finished,
    IncidentKind,
    LayerStatistics,
    Message,
    NonFinite,
    RunStarted,
    Stopped,
    TaskEvaluated,
    decode,
)
from phalanx.observe.logs.line import LogLine, encode, ended_text
from phalanx.run.spec import (
    CheckpointSpec,
    DataSpec,
    EvalSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    ScheduleSpec,
    SourceSpec,
    TrainSpec,
)
from phalanx_watch.why.observed import DeadLinkSeen, DiskSeen, ProcessSeen
from phalanx_watch.why.processes import processes_of
from phalanx_watch.why.reasons import reasons
from tiny_runs import make_dataset
from watch.why.test_rules import FLEET, NOTHING_DUE, only, spike
from watch.why.watched import T0, Watched, fleet_file, happening, member, steps

VOCABULARY = dataclasses.replace(NOTHING_DUE, model=ModelSpec(vocab_size=4096))
"""Its untrained model has a loss of 8.3."""


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    """A run of 30 healthy steps."""
    watched = Watched(tmp_path / "run", VOCABULARY)
    watched.write(steps(1, 30))
    return watched


def log_line(run: Watched, text: str, rank: int = 1, at: float | None = None) -> None:
    """A rank's log gets a line of an error."""
    path = run.directory.log(0, rank).with_suffix(".jsonl")
    path.parent.mkdir(exist_ok=True)
    t = run.t if at is None else at
    with path.open("ab") as file:
        file.write(encode(LogLine(t, "error", "vm", rank, 0, 0, 30, text, f"rank-{rank:05d}")))


# --- divergence ------------------------------------------------------------------------------------------


def test_a_loss_above_that_of_an_untrained_model_is_critical(run: Watched) -> None:
    run.write(steps(31, 60, lambda _: {"loss": 3900.0}))
    reason = only(run.reasons(checkpoints=((20, T0),)))
    assert (reason.code, reason.severity) == ("diverged", "critical")
    assert "an untrained model has 8.3" in reason.evidence[1]
    assert "--from 20 --set optimizer.lr=" in reason.next


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_has_ended_with_a_loss_above_an_untrained_models_is_named(
    run: Watched, finished: bool
) -> None:
    run.write(steps(31, 60, lambda _: {"loss": 3900.0}))
    run.write([Stopped(60, "stopped on request")])
    first, *others = run.reasons(is_held=False, finished=finished, checkpoints=((20, T0),))
    assert [reason.code for reason in others] == ([] if finished else ["stopped"])
    assert (first.code, first.severity) == ("diverged", "critical")
    assert first.doing.startswith(
        "nothing: it has finished" if finished else "nothing: it has ended; step 20"
    )


def test_a_reason_does_not_call_a_run_that_has_ended_running(run: Watched) -> None:
    run.write([spike(30), CheckpointFailed(30, "permission denied", "run/checkpoints")])
    run.write([Stopped(30, "stopped on request")])
    assert {reason.code: reason.doing for reason in run.reasons(is_held=False)} == dict.fromkeys(
        ["loss-spike", "checkpoint-failed", "stopped"], "nothing: it has ended; no checkpoint was saved"
    )


def test_a_loss_that_begins_high_and_falls_is_no_divergence(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(steps(1, 60, lambda number: {"loss": 30.0 - number / 4}))
    assert run.codes() == []


def test_a_loss_half_above_the_best_is_a_divergence_once_it_has_lasted_a_window(run: Watched) -> None:
    run.write(steps(31, 60))
    run.write(steps(61, 150, lambda _: {"loss": 3.5}))
    assert run.codes() == []
    run.write(steps(151, 200, lambda _: {"loss": 3.5}))
    reason = only(run.reasons())
    assert (reason.code, reason.where) == ("diverged", "step 61 and after")


@pytest.mark.parametrize(
    ("stages", "severity"), [((0, 300), "info"), ((0, 300, 301), "critical"), ((0,), "critical")]
)
def test_a_loss_that_rises_where_other_data_begin_by_the_run_file_is_no_trouble(
    tmp_path: Path, stages: tuple[int, ...], severity: str
) -> None:
    data = DataSpec(stages=stages, sources=(SourceSpec("words", "w", (1.0,) * len(stages)),))
    train = TrainSpec(steps=100_000)
    run = Watched(tmp_path / "run", dataclasses.replace(VOCABULARY, data=data, train=train))
    run.write(steps(1, 300))
    run.write([spike(301)])
    run.write(steps(301, 480, lambda _: {"loss": 4.0}))
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("loss-spike", severity)
    assert any("data.stages" in line for line in reason.evidence) == (severity == "info")


def test_a_spike_is_over_if_the_loss_came_back_before_other_data_began(tmp_path: Path) -> None:
    data = DataSpec(stages=(0, 300), sources=(SourceSpec("words", "w", (1.0, 1.0)),))
    spec = dataclasses.replace(VOCABULARY, data=data, train=TrainSpec(steps=100_000))
    run = Watched(tmp_path / "run", spec)
    run.write([*steps(1, 260), spike(260), *steps(261, 300), *steps(301, 330, lambda _: {"loss": 4.0})])
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("loss-spike", "warning")
    assert "the loss is back where it was" in reason.evidence


def test_a_loss_that_stays_at_that_of_an_untrained_model_is_named_after_two_windows(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(steps(1, 250, lambda _: {"loss": 8.3}))
    assert run.codes() == []
    run.write(steps(251, 400, lambda _: {"loss": 8.3}))
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("not-learning", "warning")
    assert "an untrained model has 8.3" in reason.evidence[1]


@pytest.mark.parametrize("first", [50.0, 8.4])
def test_saturated_logits_are_blamed_on_initial_weights_with_which_the_loss_began_far_above_an_untrained_model_s(
    tmp_path: Path, first: float
) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(steps(1, 400, lambda number: {"loss": first if number == 1 else 5.0}))
    run.write([LayerStatistics(step, ["0"], {"attention.largest_logit": [300.0]}) for step in (300, 400)])
    reason = only(run.reasons())
    assert reason.code == "saturated-layer"
    assert ("model.init_std" in reason.next) == (first == 50.0)


@pytest.mark.parametrize(("ratio", "is_named"), [(1e-5, True), (1e-3, False)])
def test_a_loss_that_does_not_fall_is_blamed_on_the_rate_if_the_weights_hardly_move(
    tmp_path: Path, ratio: float, is_named: bool
) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write([*steps(1, 400, lambda _: {"loss": 8.3})])
    run.write([LayerStatistics(400, ["0", "norm"], {"attention.update_ratio": [ratio, None]})])
    reason = only(run.reasons())
    assert any("the rate is too low" in line for line in reason.evidence) == is_named


def test_a_loss_that_comes_down_from_far_above_an_untrained_model_s_is_blamed_on_the_initial_weights(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(steps(1, 400, lambda number: {"loss": 8.4 + 50 / number}))
    reason = only(run.reasons())
    assert (reason.code, reason.title.split(",")[0]) == ("not-learning", "The loss began at 58.4")
    assert "model.init_std" in reason.next


def test_a_loss_that_falls_late_is_no_run_that_does_not_learn(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(steps(1, 400, lambda number: {"loss": 8.3 - max(0, number - 200) / 400}))
    assert run.codes() == []


def test_a_warmup_that_is_not_shorter_than_the_run_is_named_though_the_loss_falls(tmp_path: Path) -> None:
    for warmup, codes in ((99_999, []), (100_000, ["endless-warmup"])):
        spec = dataclasses.replace(
            VOCABULARY, train=TrainSpec(steps=100_000), schedule=ScheduleSpec(warmup_steps=warmup)
        )
        run = Watched(tmp_path / str(warmup), spec)
        run.write(steps(1, 60))
        assert run.codes() == codes
    reason = only(run.reasons())
    assert reason.where == "schedule.warmup_steps"
    assert "warmup_steps = 100,000" in reason.evidence[0]


@pytest.mark.parametrize(
    ("held_out", "cause"),
    [(None, "leak into the inputs"), (0.03, "so is the held-out loss"), (7.0, "memorized")],
)
def test_a_loss_that_no_text_allows_is_named_with_the_held_out_loss_as_evidence(
    run: Watched, held_out: float | None, cause: str
) -> None:
    run.write(steps(31, 60, lambda _: {"loss": 0.2}))
    assert run.codes() == []
    run.write(steps(61, 90, lambda _: {"loss": 0.03}))
    if held_out is not None:
        run.write([Evaluated(90, held_out)])
    reason = only(run.reasons())
    assert (reason.code, reason.severity) == ("loss-too-low", "warning")
    assert cause in reason.evidence[-1]


@pytest.mark.parametrize(("xz_bits_per_byte", "codes"), [(0.04, ["repeated-text"]), (1.6, ["loss-too-low"])])
def test_a_loss_is_too_low_for_a_text_that_a_compressor_does_not_make_as_small(
    run: Watched, xz_bits_per_byte: float, codes: list[str]
) -> None:
    run.write([RunStarted("r", 100_000, xz_bits_per_byte=xz_bits_per_byte)])
    run.write(steps(31, 90, lambda _: {"loss": 0.03}))
    run.write([Evaluated(90, 0.035, bits_per_byte=0.025)])  # two bytes a token
    assert run.codes() == codes


def test_a_trained_model_may_learn_answers_to_a_loss_that_no_text_allows(run: Watched) -> None:
    run.write(steps(31, 90, lambda _: {"loss": 0.03}))
    assert run.codes() == ["loss-too-low"]
    assert run.codes(spec=dataclasses.replace(VOCABULARY, checkpoint=CheckpointSpec(init_from="hf"))) == []


def test_a_gradient_norm_that_has_grown_for_a_window_is_named_with_the_step_and_the_way_back(
    run: Watched,
) -> None:
    run.write(steps(31, 60))
    run.write(steps(61, 150, lambda _: {"grad_norm": 30.0}))
    assert run.codes() == []
    run.write(steps(151, 200, lambda _: {"grad_norm": 30.0}))
    reason = only(run.reasons(checkpoints=((20, T0), (100, T0))))
    assert (reason.code, reason.where) == ("growing-norm", "step 61 and after")
    assert reason.title == "The gradient norm has grown 60 times: 30"
    assert "--from 20 --set optimizer.lr=" in reason.next


def test_a_norm_that_grew_before_the_newest_events_keeps_its_place_while_the_run_continues(
    run: Watched,
) -> None:
    run.write(steps(31, 400))
    run.write(steps(401, 20_000, lambda _: {"grad_norm": 400.0}))
    (first,) = [reason.where for reason in run.reasons() if reason.code == "growing-norm"]
    run.write(steps(20_001, 20_040, lambda _: {"grad_norm": 400.0}))
    (later,) = [reason.where for reason in run.reasons() if reason.code == "growing-norm"]
    assert first == later


def test_a_norm_that_rises_slowly_or_was_large_at_first_has_not_grown(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", VOCABULARY)
    run.write(
        steps(1, 500, lambda number: {"grad_norm": 40.0 / number if number < 80 else 0.5 + number / 200})
    )
    assert run.codes() == []


# --- ends ------------------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_is_named_as_the_failure_of_the_run(run: Watched) -> None:
    log_line(run, ended_text("was killed by SIGKILL"))
    log_line(run, "RuntimeError: Connection closed by peer", rank=0, at=run.t + 0.1)
    reason = only(run.reasons(1, is_held=False))
    assert (reason.code, reason.where) == ("failed", "rank 1 on vm")
    assert "SIGKILL" in reason.title
    assert "dmesg" in reason.next


def test_a_run_that_failed_with_a_shard_cut_short_is_named_by_that_shard(
    run: Watched, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "words")
    (run.directory.path / "run.toml").write_text(f'[data]\npath = "{dataset}"\n')
    run.directory.record.write_text('{"data_fingerprint": "' + "a" * 64 + '"}')
    os.truncate(dataset / "train-00000.bin", 100)
    log_line(run, "Fatal Python error: Bus error")
    reason = next(reason for reason in run.reasons(is_held=False) if reason.code == "failed")
    assert "its data cannot be read" in reason.title
    assert f"{dataset / 'train-00000.bin'} has 100 bytes instead of" in reason.evidence[0]
    assert reason.next.startswith("put the data right")


def test_a_failure_long_before_the_last_event_was_recovered_from(run: Watched) -> None:
    log_line(run, ended_text("was killed by SIGKILL"), at=run.t - 300)
    assert only(run.reasons(1, is_held=False)).code == "gone"


def test_the_first_failure_is_printed_from_its_beginning(run: Watched) -> None:
    log_line(run, f"ValueError: the cause stands here, {'then much more ' * 100}")
    assert "the cause stands here" in only(run.reasons(1, is_held=False)).title


def test_a_job_that_ended_before_its_first_event_is_named_by_its_log(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run")
    job = JobStanding("job 7 (slurm)", "it has ended; its log is runs/x/launch/job-7.log", has_ended=True)
    reason = only(run.reasons(is_held=False, job=job, events=()))
    assert (reason.code, reason.severity) == ("failed", "critical")
    assert "job-7.log" in reason.evidence[0]


def test_a_job_that_died_before_its_first_event_is_named_by_its_failure(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run")
    run.t = T0
    log_line(run, "error: data.path: there is no /no/such", rank=0)
    assert "there is no /no/such" in only(run.reasons(is_held=False, events=())).title


@pytest.mark.parametrize(
    ("is_held", "code", "severity"), [(True, "job-held", "warning"), (False, "job-waiting", "info")]
)
def test_a_job_in_the_queue_is_named(run: Watched, is_held: bool, code: str, severity: str) -> None:
    job = JobStanding("job 7 (slurm)", "waits for 2 nodes", is_waiting=True, is_held=is_held)
    reason = only(run.reasons(is_held=False, job=job))
    assert (reason.code, reason.severity) == (code, severity)


# --- hangs -----------------------------------------------------------------------------------------------


def test_a_hang_names_the_rank_whose_process_is_stopped_and_how_it_continues(run: Watched) -> None:
    processes = (ProcessSeen(10, "S", 0), ProcessSeen(11, "T", 1))
    reason = only(run.reasons(120, processes=processes))
    assert (reason.code, reason.where) == ("stalled", "rank 1 (process 11)")
    assert "kill -CONT 11" in reason.next


def test_a_hang_names_the_rank_that_has_used_up_its_address_space(run: Watched) -> None:
    full = (ProcessSeen(11, "S", 0, 0.7), ProcessSeen(12, "S", 1, 0.99))
    reason = only(run.reasons(60, processes=full))
    assert reason.where == "rank 1 (process 12)"
    assert "out of memory" in reason.evidence[0]
    assert "ulimit -v" in reason.next


def test_a_hang_names_the_link_over_which_a_rank_sends_in_vain(run: Watched) -> None:
    dead = DeadLinkSeen("10.77.0.2:41234", 65536, 9)
    processes = (ProcessSeen(11, "S", 0, dead_links=(dead,)), ProcessSeen(12, "S", 1))
    reason = only(run.reasons(60, processes=processes))
    assert reason.where == "rank 0 (process 11)"
    assert "sent to 10.77.0.2:41234 in vain: 65,536 bytes wait" in reason.evidence[0]
    assert "the network to 10.77.0.2:41234" in reason.next


# The header of /proc/net/tcp, and rows of a listening socket, a healthy connection, one without an answer, and one of another process.
TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 01004D0A:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 501 1 0 100 0 0 10 0
   1: 01004D0A:1F91 03004D0A:A112 01 00000400:00000000 01:00000014 00000001     0        0 502 2 0 24 4 30 10 -1
   2: 01004D0A:1F92 02004D0A:A112 01 00010000:00000000 01:00000a28 00000009     0        0 503 2 0 24 4 30 10 -1
   3: 01004D0A:1F93 02004D0A:A113 01 00010000:00000000 01:00000a28 00000009     0        0 999 2 0 24 4 30 10 -1
"""
TCP6 = """  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF000001004D0A:1F94 0000000000000000FFFF000002004D0A:A114 01 00000200:00000000 01:00000a28 00000006     0        0 504 2 0 24
"""


def process_in(proc: Path, pid: int, sockets: Iterable[int]) -> Path:
    """Make the folder of a process in the host's network namespace, with descriptors of the sockets with these inodes."""
    process = proc / str(pid)
    for folder in ("fd", "ns"):
        (process / folder).mkdir(parents=True)
    (process / "stat").write_text(f"{pid} (phalanx) S 1 {pid} {pid} 0")
    (process / "ns" / "net").symlink_to("net:[4026531840]")
    for inode in sockets:
        (process / "fd" / str(inode)).symlink_to(f"socket:[{inode}]")
    return process


@pytest.mark.skipif(sys.byteorder != "little", reason="the rows are those of a little-endian machine")
def test_connections_that_wait_for_an_answer_after_many_retransmissions_are_read_from_the_kernel(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run")
    run.directory.lock.write_text(f"process 71 on {os.uname().nodename}\n")
    process = process_in(tmp_path / "proc", 71, range(501, 505))
    (process / "net").mkdir()
    (process / "net" / "tcp").write_text(TCP)
    (process / "net" / "tcp6").write_text(TCP6)
    (seen,) = processes_of(run.directory, tmp_path / "proc")
    assert seen.dead_links == (
        DeadLinkSeen("10.77.0.2:41234", 0x10000, 9),
        DeadLinkSeen("10.77.0.2:41236", 0x200, 6),
    )
    (seen,) = processes_of(run.directory, tmp_path / "proc", with_links=False)
    assert seen.dead_links == ()


def test_the_connections_of_a_network_namespace_are_read_once_for_all_its_processes(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run")
    run.directory.lock.write_text(f"process 71 on {os.uname().nodename}\n")
    holder = process_in(tmp_path / "proc", 71, [])
    (holder / "net").mkdir()
    (holder / "net" / "tcp").write_text(TCP)
    (holder / "task" / "71").mkdir(parents=True)
    (holder / "task" / "71" / "children").write_text("72")
    process_in(tmp_path / "proc", 72, [503])  # without a table of its own
    links = {seen.pid: seen.dead_links for seen in processes_of(run.directory, tmp_path / "proc")}
    assert (len(links[71]), len(links[72])) == (0, 1)


def test_the_used_share_of_a_limit_of_address_space_is_read_from_the_process(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.directory.lock.write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    limited = (
        "import resource\n"
        "used = int(open('/proc/self/stat').read().rpartition(')')[2].split()[20])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 * used, 2 * used))\n"
        "print('limited', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", limited]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "limited\n"
        shares = {seen.pid: seen.address_space for seen in processes_of(run.directory)}
        process.communicate("\n")
    assert 0.4 < shares[process.pid] < 0.6


def test_the_processes_of_a_run_are_its_holder_and_what_that_started(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.directory.lock.write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "PHALANX_RANK": "3"}
    )
    try:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        states = {process.pid: process for process in processes_of(run.directory)}
        assert os.getpid() in states
        cores = frozenset(os.sched_getaffinity(child.pid))
        assert states[child.pid] == ProcessSeen(child.pid, "T", 3, cores=cores)
    finally:
        child.kill()
        child.wait()


def test_a_rank_that_torchrun_has_started_beside_the_holder_is_among_the_processes_of_a_run(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path)
    log = run.directory.log(0, 1)
    log.parent.mkdir(exist_ok=True)
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    environ = {name: value for name, value in os.environ.items() if name != "PHALANX_RANK"}
    with log.open("w") as file:
        holder = subprocess.Popen(waits, env={**environ, "RANK": "0"})
        rank = subprocess.Popen(waits, env={**environ, "RANK": "1"}, stderr=file)
        stranger = subprocess.Popen(waits, env={**environ, "RANK": "1"})
    run.directory.lock.write_text(f"process {holder.pid} on {os.uname().nodename}\n")
    try:
        rank.send_signal(signal.SIGSTOP)
        os.waitpid(rank.pid, os.WUNTRACED)
        processes = {process.pid: process for process in processes_of(run.directory)}
        assert processes.keys() == {holder.pid, rank.pid}
        cores = frozenset(os.sched_getaffinity(rank.pid))
        assert processes[rank.pid] == ProcessSeen(rank.pid, "T", 1, cores=cores)
    finally:
        for process in (holder, rank, stranger):
            process.kill()
            process.wait()


def test_a_start_whose_processes_were_killed_before_its_first_event_quotes_its_last_line(
    tmp_path: Path,
) -> None:
    run = Watched(tmp_path / "run")
    run.directory.events.unlink()
    log_line(run, "reading the tokenizer", at=T0)
    run.directory.record.write_text('{"attempts": 1}')
    (reason,) = reasons(run.directory, T0 + 9)
    assert (reason.code, reason.severity) == ("gone", "critical")
    assert reason.evidence[1] == "the last line of its logs: rank 1 on vm: reading the tokenizer"


# --- fleets ----------------------------------------------------------------------------------------------


def test_a_fleet_that_trains_on_fewer_ranks_than_its_nodes_allow_is_named_with_the_reason(
    run: Watched,
) -> None:
    reason = "node a, worker 0: connectFullMesh failed ... remote=[127.0.0.1]"
    run.write([EpochLeft(number, reason) for number in range(3)])
    members = (member("node-0", 0), Member("node-1", "spare", "b", attached=True))
    run.spec = FLEET
    reasons = run.reasons(spec=FLEET, fleet=fleet_file(run.t, members=members, ranks=1))
    (fewer_ranks,) = [reason for reason in reasons if reason.code == "fewer-ranks"]
    assert "1 of 2 ranks" in fewer_ranks.title
    assert "127.0.0.1" in fewer_ranks.evidence[0]
    assert "3 of them for one reason" in fewer_ranks.evidence[0]


def test_a_spare_that_was_lost_is_not_reported_as_replaced(run: Watched) -> None:
    lost = Member("node-2", "lost", "host-2", fault=IncidentKind.LOST)
    members = (member("node-0", 0), member("node-1", 1), lost)
    incidents = (happening(run.t - 5, "node-2", "no heartbeat for 15 s"),)
    fleet = fleet_file(run.t, members=members, happenings=incidents, recoveries=1)
    (reason,) = [reason for reason in run.reasons(spec=FLEET, fleet=fleet) if reason.code == "lost-node"]
    assert reason.doing == "training continues: it had no ranks"


def test_the_room_for_the_next_checkpoint_is_that_of_all_ranks(run: Watched) -> None:
    run.write([CheckpointSaved(30, "c", 7_600_000, 1.0)])
    disk = DiskSeen(21 << 20, 50 << 20)
    assert run.codes(disk=disk, checkpoint_bytes=29 << 20) == ["disk-full"]


# --- runs of older versions ------------------------------------------------------------------------------


def test_events_of_older_versions_are_read(run: Watched) -> None:
    line = b'{"t":1.0,"attempt":0,"kind":"Message","level":"warning","text":"node a: slow, and no spare"}'
    assert decode(line).body == Message("warning", "node a: slow, and no spare")
    run.write([NonFinite(31, "not finite are loss of slot 5", skipped=False)])
    assert next(reason for reason in run.reasons() if reason.code == "not-finite").where == "step 31"


def test_a_run_without_a_run_file_can_be_judged(tmp_path: Path) -> None:
    run = Watched(tmp_path / "run", RunSpec())
    run.write(steps(1, 60))
    assert run.codes(spec=None) == []


# --- an end by evaluation.stop_after ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rate", "named"), [("wsd", 1e-3, True), ("wsd", 2e-4, False), ("constant", 1e-3, False)]
)
def test_an_end_before_the_rate_has_decayed_is_named(
    tmp_path: Path, kind: Literal["wsd", "constant"], rate: float, named: bool
) -> None:
    spec = RunSpec(
        optimizer=OptimizerSpec(lr=1e-3), schedule=ScheduleSpec(kind=kind), evaluation=EvalSpec(every_steps=0)
    )
    run = Watched(tmp_path, dataclasses.replace(spec, checkpoint=CheckpointSpec(every_steps=1000)))
    run.write([*steps(1, 40, lambda _: {"lr": rate}), EndedEarly(40, "loss", 3, 25, 2.0), Finished({})])
    reasons = run.reasons(finished=True)
    assert [reason.code for reason in reasons] == ["ended-early"] * named
    assert all("was still 0.001 of 0.001" in reason.evidence[1] for reason in reasons)


def test_an_end_after_which_the_run_was_continued_is_none(tmp_path: Path) -> None:
    spec = RunSpec(evaluation=EvalSpec(every_steps=0), checkpoint=CheckpointSpec(every_steps=1000))
    run = Watched(tmp_path, spec)
    run.write([*steps(1, 40), EndedEarly(40, "loss", 3, 25, 2.0)])
    run.write([RunStarted("r", 100_000, ranks=4), *steps(41, 60)], attempt=1)
    assert run.codes() == []


@pytest.mark.parametrize(("error", "named"), [(0.14, True), (0.01, False)])
def test_an_end_by_a_figure_that_changes_by_less_than_its_error_is_named(
    tmp_path: Path, error: float, named: bool
) -> None:
    spec = RunSpec(evaluation=EvalSpec(every_steps=0), checkpoint=CheckpointSpec(every_steps=1000))
    run = Watched(tmp_path, spec)
    for number, accuracy in enumerate((0.58, 0.5, 0.5, 0.58), 1):
        figures = {"accuracy": accuracy, "accuracy_error": error}
        run.write([*steps(10 * number - 9, 10 * number, lambda _: {"lr": 1e-4})])
        run.write([TaskEvaluated(10 * number, "quiz", "choice", 12, figures)])
    run.write([EndedEarly(40, "quiz.accuracy", 3, 10, 0.58), Finished({})])
    reasons = run.reasons(finished=True)
    assert [reason.code for reason in reasons] == ["ended-early"] * named
    assert all("changed by 0.08 since step 10" in reason.evidence[1] for reason in reasons)
