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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from free_ports import PORTS, free_port

NODES, LEAF, GPUS = 8, 4, 2
GRACE_S = 300
"""The grace of a preempted job: no test waits for its end, and a run saves in it on a machine with much else to do."""
PATIENCE_S = 900
"""For what takes seconds on an idle machine: a wait that fails says that something never comes, not that others had the processors."""
_DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_SETTINGS = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
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
FirstJobId={first_job}
KillWait=5
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
TopologyPlugin=topology/{topology}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=7-0 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=100
PartitionName=small Nodes=n[1-2] Default=NO MaxNodes=1 MaxTime=10 State=UP
PartitionName=shut Nodes=ALL Default=NO State=DOWN
"""


_ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={munge}/sock
AccountingStorageEnforce=associations,limits,qos
"""
_DATABASE = """
AuthType=auth/munge
AuthInfo=socket={munge}/sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""
_ACCOUNTANTS = ("mariadbd", "mariadb-install-db", "mariadb-admin", "slurmdbd", "sacctmgr")


def missing(*, accounting: bool = False) -> str:
    """Why no cluster can be started here, or none that keeps accounts; empty if one can."""
    if os.getuid() != 0:
        return "slurmd needs root"
    path = f"{os.environ['PATH']}:/usr/sbin"
    required_programs = (*_DAEMONS, *(_ACCOUNTANTS if accounting else ()))
    absent = [name for name in required_programs if shutil.which(name, path=path) is None]
    if absent:
        packages = "slurm-wlm munge" + (" slurmdbd mariadb-server" if accounting else "")
        return f"{', '.join(absent)} not installed: apt-get install --no-install-recommends {packages}"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"{socket.gethostname()} does not resolve: slurmctld would stall"
    return ""


def slurm_version() -> tuple[int, ...]:
    """The version of the Slurm that is installed."""
    version_line = subprocess.run(
        ["/usr/sbin/slurmctld", "-V"], capture_output=True, text=True, check=True
    ).stdout
    return tuple(int(part) for part in version_line.split()[1].split("-")[0].split(".") if part.isdecimal())


@dataclass
class SlurmCluster:
    """A running cluster."""

    folder: Path
    spool: Path
    """Folder of what the nodes' daemons keep. Its path is short: those of their sockets may have 108 characters (unix(7))."""
    environment: dict[str, str]
    """For its commands."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    nodes: int = NODES

    def tool(self, *words: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
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
        (self.spool / f"n{number}").mkdir(parents=True, exist_ok=True)
        self.start_daemon(f"slurmd-n{number}", "slurmd", "-D", "-N", f"n{number}")

    def kill_node(self, name: str) -> None:
        """Kills everything of a node, as a power cut does: its slurmd, its steps' daemons, its tasks and all that they started.

        All are stopped first, so that none of them tells the controller of another's death. srun dies first: to a stopped process group whose parent
        dies the kernel sends SIGHUP and SIGCONT, at which srun, if it is given the time, would end the step on all nodes.
        """
        job_pids = sorted(self.processes_of(name), key=lambda pid: _command_of(pid) != "srun")
        doomed = [
            *job_pids,
            *{_step_daemon_of(pid) for pid in job_pids} - {0},
            self.daemons[f"slurmd-{name}"].pid,
        ]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        for pid in self.processes_of(name):  # begun meanwhile
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes_of(self, name: str) -> list[int]:
        """The processes of jobs on a node."""
        marks = (f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode())
        pids = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and set(marks) <= set(
                    (entry / "environ").read_bytes().split(b"\0")
                ):
                    pids.append(int(entry.name))
        return pids

    def wait_for_nodes(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until every node is idle."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            states = self.tool("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
            if states and all(state == "idle" for state in states):
                return
            if self.daemons["slurmctld"].poll() is not None:
                raise RuntimeError((self.folder / "slurmctld.log").read_text()[-1000:])
            time.sleep(0.1)
        raise TimeoutError(f"nodes are {self.tool('sinfo', '-h', '-N', '-o', '%N %T %E', check=False)}")

    def wait_until(self, true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Waits until ``true`` says so."""
        deadline_s = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline_s:
                raise TimeoutError(self.tool("squeue", "-a", check=False))
            time.sleep(0.1)

    def end_jobs(self) -> None:
        """Cancels whatever is queued or running, and waits until it is gone."""
        numbers = self.tool("squeue", "-h", "-o", "%A", check=False).split()
        if numbers:
            self.tool("scancel", *numbers, check=False)
        deadline_s = time.monotonic() + PATIENCE_S
        while self.tool("squeue", "-h", check=False).strip() and time.monotonic() < deadline_s:
            time.sleep(0.1)


def _command_of(pid: int) -> str:
    """The name of a process's program; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _step_daemon_of(pid: int) -> int:
    """The slurmstepd that has started a process; 0 if none has."""
    with suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes() else 0
    return 0


@contextmanager
def slurm_cluster(
    folder: Path,
    *,
    accounting: bool = False,
    topology: Literal["tree", "block"] = "tree",
    nodes: int = NODES,
) -> Iterator[SlurmCluster]:
    """Starts a cluster of nodes under leaf switches, or in blocks, of ``LEAF``, in ``folder``, and leaves nothing behind.

    With ``accounting`` it enforces the limits of its accounts, which a slurmdbd keeps in a MariaDB of its own.
    """
    with TemporaryDirectory(prefix="phalanx-slurm-") as others:
        yield from _running(folder, Path(others), accounting, topology, nodes)


def _running(
    folder: Path, others: Path, accounting: bool, topology: str, nodes: int
) -> Iterator[SlurmCluster]:
    """The cluster; what belongs to daemons of other users lies in ``others``: pytest closes its own folder to them whenever it starts somewhere."""
    first = free_port(nodes + 2)
    # The port of a coordinator follows from its job's number, and clusters share this host.
    first_job = 1 + 20 * (first - PORTS.start)
    for name in ("state", "dev"):
        (folder / name).mkdir(mode=0o755)
    others.chmod(0o711)
    munge = others / "munge"
    munge.mkdir(mode=0o711)
    key = munge / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    subprocess.run(["chown", "-R", "munge", str(munge)], check=True)
    for number in range(GPUS):
        os.mknod(folder / "dev" / f"gpu{number}", 0o20666, os.makedev(1, 3))
    (folder / "slurm.conf").write_text(
        _SETTINGS.format(
            folder=folder,
            spool=others / "spool",
            munge=munge,
            port=first,
            nodes=nodes,
            first=first + 1,
            last=first + nodes,
            gpus=GPUS,
            grace=GRACE_S,
            topology=topology,
            first_job=first_job,
        )
        + (_ACCOUNTING.format(munge=munge, port=first + nodes + 1) if accounting else "")
    )
    (folder / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu File={folder}/dev/gpu[0-{GPUS - 1}]\n")
    disabled = "CgroupPlugin=disabled\n" if slurm_version() >= (23,) else ""
    (folder / "cgroup.conf").write_text(disabled)
    kind, name = ("BlockName", "block") if topology == "block" else ("SwitchName", "leaf")
    leaves = range(1, nodes // LEAF + 1)
    lines = [f"{kind}={name}{leaf} Nodes=n[{LEAF * (leaf - 1) + 1}-{LEAF * leaf}]" for leaf in leaves]
    lines += [
        f"BlockSizes={LEAF}" if topology == "block" else f"SwitchName=core Switches=leaf[1-{len(leaves)}]"
    ]
    (folder / "topology.conf").write_text("\n".join([*lines, ""]))
    path = f"{os.environ['PATH']}:/usr/sbin"
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    cluster = SlurmCluster(folder, others / "spool", environment, nodes=nodes)
    try:
        words = [f"--socket={munge}/sock", f"--key-file={key}", f"--pid-file={munge}/pid"]
        words += [f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        cluster.start_daemon("munged", "runuser", "-u", "munge", "--", "munged", "-F", *words)
        _wait_for(munge / "sock")
        if accounting:
            _keep_accounts(cluster, others, first + nodes + 1)
        cluster.start_daemon("slurmctld", "slurmctld", "-D", "-c")
        for number in range(1, nodes + 1):
            cluster.start_node(number)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        with suppress(subprocess.TimeoutExpired):  # a controller that does not answer any more
            cluster.end_jobs()
        _end(cluster)


def _end(cluster: SlurmCluster) -> None:
    """Ends all processes of jobs, then the daemons."""
    for number in range(1, cluster.nodes + 1):
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


def _keep_accounts(cluster: SlurmCluster, others: Path, port: int) -> None:
    """Starts a MariaDB that listens on a socket alone, and the slurmdbd that keeps accounts in it."""
    folder, data = cluster.folder, others / "db"
    data.mkdir()
    shutil.chown(data, "mysql")
    settings = folder / "slurmdbd.conf"
    settings.write_text(_DATABASE.format(folder=folder, munge=others / "munge", port=port))
    settings.chmod(0o600)
    socket_only = ["--no-defaults", "--user=mysql", f"--datadir={data}/data"]
    root = ["--auth-root-authentication-method=socket", "--auth-root-socket-user=root", "--skip-test-db"]
    cluster.tool("mariadb-install-db", *socket_only, *root)
    small = ["--skip-networking", "--skip-log-bin", "--innodb-buffer-pool-size=64M", f"--socket={data}/sock"]
    cluster.start_daemon("mariadbd", "mariadbd", *socket_only, *small, f"--pid-file={data}/pid")
    _ask_until_answered(cluster, "mariadb-admin", "--no-defaults", "-S", f"{data}/sock", "ping")
    cluster.environment["MYSQL_UNIX_PORT"] = f"{data}/sock"
    cluster.start_daemon("slurmdbd", "slurmdbd", "-D")
    _ask_until_answered(cluster, "sacctmgr", "-n", "list", "cluster")
    cluster.tool("sacctmgr", "-i", "-Q", "add", "cluster", "test", check=False)


def _ask_until_answered(cluster: SlurmCluster, *words: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            cluster.tool(*words)
            return
        except AssertionError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} has not come")
        time.sleep(0.02)
