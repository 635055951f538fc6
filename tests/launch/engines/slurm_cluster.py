"""A real Slurm cluster of virtual nodes on this machine, in a folder of its own: nothing in /etc is touched.

Several slurmd processes with names of their own share one host, as Slurm's documentation describes for testing
(https://slurm.schedmd.com/programmer_guide.html, "Multiple slurmd support"). GPUs are clones of /dev/null. It needs root, and the Debian packages
slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NODES, LEAF, GPUS = 8, 4, 2
GRACE_S = 60
_DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_SETTINGS = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
TreeWidth=65533
InactiveLimit=0
KillWait=5
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/tree
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=7-0 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=100
PartitionName=small Nodes=n[1-2] Default=NO MaxNodes=1 MaxTime=10 State=UP
PartitionName=shut Nodes=ALL Default=NO State=DOWN
"""


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    if os.getuid() != 0:
        return "slurmd needs root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    absent = [name for name in _DAEMONS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install --no-install-recommends slurm-wlm munge"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"{socket.gethostname()} does not resolve: slurmctld would stall"
    return ""


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    environment: dict[str, str]
    """For its commands."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def tool(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stderr}"
        return done.stdout

    def start_daemon(self, name: str, *words: str) -> None:
        """Starts a daemon in the foreground mode, in a session of its own."""
        with (self.folder / f"{name}.err").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                words,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_node(self, number: int) -> None:
        """Starts the slurmd of a node."""
        (self.folder / "spool" / f"n{number}").mkdir(parents=True, exist_ok=True)
        self.start_daemon(f"slurmd-n{number}", "slurmd", "-D", "-N", f"n{number}")

    def kill_node(self, name: str) -> None:
        """Kills everything of a node, as a power cut does: its slurmd, its steps' daemons, its tasks and all that they started."""
        self.daemons[f"slurmd-{name}"].kill()
        for _ in range(3):
            for pid in self.processes_of(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes_of(self, name: str) -> list[int]:
        """The processes of jobs on a node."""
        marks = (f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode())
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and set(marks) <= set(
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    found.append(int(entry.name))
        return found

    def wait_for_nodes(self, timeout_s: float = 30.0) -> None:
        """Waits until every node is idle."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            states = self.tool("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
            if states and all(state == "idle" for state in states):
                return
            time.sleep(0.1)
        raise TimeoutError(f"nodes are {self.tool('sinfo', '-h', '-N', '-o', '%N %T %E', check=False)}")

    def end_jobs(self) -> None:
        """Cancels whatever is queued or running, and waits until it is gone."""
        numbers = self.tool("squeue", "-h", "-o", "%A", check=False).split()
        if numbers:
            self.tool("scancel", *numbers, check=False)
        deadline_s = time.monotonic() + 30
        while self.tool("squeue", "-h", check=False).strip() and time.monotonic() < deadline_s:
            time.sleep(0.1)


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    for first in range(23_000, 30_000, count):
        with suppress(OSError):
            probes = []
            try:
                for port in range(first, first + count):
                    probe = socket.socket()
                    probes.append(probe)
                    probe.bind(("127.0.0.1", port))
                return first
            finally:
                for probe in probes:
                    probe.close()
    raise OSError("no free ports")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts a cluster of ``NODES`` nodes under two leaf switches in ``folder``, and leaves nothing behind."""
    first = _free_ports(NODES + 1)
    for name in ("state", "munge", "dev"):
        (folder / name).mkdir(mode=0o755)
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    subprocess.run(["chown", "-R", "munge", str(folder / "munge")], check=True)
    for parent in (folder, *folder.parents):  # munged refuses a path that others cannot enter
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    for number in range(GPUS):
        os.mknod(folder / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
    (folder / "slurm.conf").write_text(
        _SETTINGS.format(
            folder=folder,
            port=first,
            nodes=NODES,
            first=first + 1,
            last=first + NODES,
            gpus=GPUS,
            grace=GRACE_S,
        )
    )
    (folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
    version = subprocess.run(["/usr/sbin/slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    disabled = "" if version.split()[1].startswith(("20", "21", "22")) else "CgroupPlugin=disabled\n"
    (folder / "cgroup.conf").write_text(disabled)
    (folder / "topology.conf").write_text(
        f"SwitchName=leaf1 Nodes=n[1-{LEAF}]\nSwitchName=leaf2 Nodes=n[{LEAF + 1}-{NODES}]\nSwitchName=core Switches=leaf[1-2]\n"
    )
    path = f"{os.environ['PATH']}:/usr/sbin"
    cluster = SlurmCluster(folder, {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path})
    try:
        munge = [f"--socket={folder}/munge/sock", f"--key-file={key}", f"--pid-file={folder}/munge/pid"]
        munge += [f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"]
        cluster.start_daemon("munged", "runuser", "-u", "munge", "--", "munged", "-F", *munge)
        _wait_for(folder / "munge" / "sock")
        cluster.start_daemon("slurmctld", "slurmctld", "-D", "-c")
        for number in range(1, NODES + 1):
            cluster.start_node(number)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.end_jobs()
        for number in range(1, NODES + 1):
            for pid in cluster.processes_of(f"n{number}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in reversed(cluster.daemons.values()):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} has not come")
        time.sleep(0.02)
