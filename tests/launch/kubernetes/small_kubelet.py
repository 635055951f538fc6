"""A kubelet and a Job controller in small: run a manifest's pods as processes in Linux namespaces of their own, replaced under their index.

A pod has its own process tree (its command is process 1, as in a container), host name, mounts, and an address that its replacement does not have; the
name of the pod that leads is in a hosts file, as it would be in DNS. What becomes of a pod that ends is decided by the Job's own fields: its
podFailurePolicy, backoffLimitPerIndex and successPolicy. What this is not: limits, a network between machines. The pods see the file system of this machine, or
with PHALANX_IMAGE_ROOT that of an image that is mounted there (``build_image.sh``), as its user.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx_process import ENVIRONMENT

_POLL_S = 0.05
IMAGE_USER = "1000:1000"
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_UNSHARE = ("unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child")


def missing() -> str:
    """What keeps pods from being started here; empty if nothing does."""
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run(
        [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class SmallPod:
    """One pod: a process in namespaces."""

    index: int
    address: str
    process: subprocess.Popen[bytes]
    evicted_s: float | None = None
    """When it was asked to end, by the monotonic clock."""

    @property
    def first(self) -> int:
        """The process that is number 1 in the pod, by its number outside."""
        own = self.process.pid
        children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        return int(children[0])


@dataclass
class SmallJob:
    """The Job of a JobSet, and its pods."""

    folder: Path
    manifest: dict[str, Any]
    run_file: str
    pods: dict[int, SmallPod] = field(default_factory=dict)
    started: Counter[int] = field(default_factory=Counter)
    """Pods that each index has had."""
    failures: Counter[int] = field(default_factory=Counter)
    """Pods that failed, by index, those that are ignored left out."""
    done: set[int] = field(default_factory=set)
    state: str = "running"
    """ "running", "completed" or "failed"."""
    deleted: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def spec(self) -> dict[str, Any]:
        """The Job's."""
        found: dict[str, Any] = self.manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        return found

    @property
    def name(self) -> str:
        """The JobSet's."""
        return str(self.manifest["metadata"]["name"])

    @property
    def logs(self) -> str:
        """What all pods have printed."""
        return "".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log"))
        )

    # --- what people and clusters do ---------------------------------------------------------------

    def kill(self, index: int) -> SmallPod:
        """Loses a pod, as with its machine; returns it."""
        with self.lock:
            pod = self.pods[index]
            os.kill(pod.first, signal.SIGKILL)
            return pod

    def evict(self, index: int) -> SmallPod:
        """Asks a pod to end, and kills it after its grace; returns it."""
        with self.lock:
            pod = self.pods[index]
            pod.evicted_s = time.monotonic()
            os.kill(pod.first, signal.SIGTERM)
            return pod

    def delete(self) -> None:
        """Asks all pods to end, and replaces none."""
        with self.lock:
            self.deleted = True
            for index in list(self.pods):
                self.evict(index)

    # --- the controller ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the folders that pods will see in the place of volumes."""
        etc = self.folder / "etc"
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        (etc / "phalanx").mkdir()
        (etc / "phalanx" / "run.toml").write_text(self.run_file)
        (self.folder / "volume").mkdir(exist_ok=True)

    def look(self) -> None:
        """Starts pods that are missing, and decides about those that have ended."""
        with self.lock:
            for pod in list(self.pods.values()):
                code = pod.process.poll()
                if code is not None:
                    del self.pods[pod.index]
                    self._ended(pod, code if code >= 0 else 128 - code)
                elif pod.evicted_s is not None and time.monotonic() > pod.evicted_s + self._grace_s:
                    os.kill(pod.first, signal.SIGKILL)
            if self.state != "running":
                for pod in self.pods.values():
                    if pod.evicted_s is None:
                        self.evict(pod.index)
            elif not self.deleted:
                for index in range(self.spec["completions"]):
                    if index not in self.pods and index not in self.done:
                        self._start(index)

    @property
    def _grace_s(self) -> float:
        return float(self.spec["template"]["spec"]["terminationGracePeriodSeconds"])

    def _ended(self, pod: SmallPod, code: int) -> None:
        if code == 0:
            self.done.add(pod.index)
            if str(pod.index) == self.spec["successPolicy"]["rules"][0]["succeededIndexes"]:
                self.state = "completed"
            return
        action = next(
            (rule["action"] for rule in self.spec["podFailurePolicy"]["rules"] if _applies(rule, pod, code)),
            "Count",
        )
        if action == "FailJob":
            self.state = "failed"
        elif action == "Count":
            self.failures[pod.index] += 1
            if self.failures[pod.index] > self.spec["backoffLimitPerIndex"]:
                self.state = "failed"

    def _start(self, index: int) -> None:
        self.started[index] += 1
        address = f"127.0.{self.started[index]}.{10 + index}"
        host = f"{self.name}-node-0-{index}"
        if index == 0:
            hosts = f"127.0.0.1 localhost\n{address} {host}.{self.name}\n"
            (self.folder / "etc" / "hosts").write_text(hosts)
        (agent,) = self.spec["template"]["spec"]["containers"]
        variables = {
            "JOB_COMPLETION_INDEX": str(index),
            "POD_IP": address,
            "NODE_NAME": f"machine-{self.started.total()}",
        }
        words = [_expanded(word, variables) for word in agent["command"]]
        words = [word.replace("/tmp/", f"{self.folder}/{index}-") for word in words]
        image = os.environ.get("PHALANX_IMAGE_ROOT", "")
        in_place = f"cd {agent['workingDir']} && exec {shlex.join(words)}"
        steps = [
            *(self._mounts_in(image) if image else [f"mount --bind {self.folder}/etc /etc"]),
            f"mount -t tmpfs none {image}/dev/shm",
            f"mount -t tmpfs none {image}/mnt",
            f"mkdir {image}{self.manifest_mount} && mount --bind {self.folder}/volume {image}{self.manifest_mount}",
            f"mount -t proc proc {image}/proc",
            f"hostname {host}",
            f"exec chroot --userspec={IMAGE_USER} {image} /bin/sh -c {shlex.quote(in_place)}"
            if image
            else in_place,
        ]
        path = IMAGE_PATH if image else f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        inherited = {} if image else ENVIRONMENT
        log = (self.folder / f"{index}-{self.started[index]}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [*_UNSHARE, "bash", "-c", " && ".join(steps)],
                env={**inherited, **variables, "PATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.pods[index] = SmallPod(index, address, process)

    def _mounts_in(self, image: str) -> Iterator[str]:
        """What a pod of an image sees of this machine: devices, the names of pods, the run file, and where the test keeps its data."""
        shared = self.folder.parent
        shared.chmod(0o755)
        for folder in (self.folder, self.folder / "volume"):
            folder.chmod(0o777)
        yield f"mount --rbind /dev {image}/dev && touch {image}/etc/hosts && mount --bind {self.folder}/etc/hosts {image}/etc/hosts"
        for path, seen in ((self.folder / "etc" / "phalanx", Path("/etc/phalanx")), (shared, shared)):
            yield f"mkdir -p {image}{seen} && mount --bind {path} {image}{seen}"

    @property
    def manifest_mount(self) -> str:
        """Where the pods see the first of their volumes."""
        (agent,) = self.spec["template"]["spec"]["containers"]
        return str(agent["volumeMounts"][0]["mountPath"])


@contextmanager
def small_job(folder: Path, manifest: dict[str, Any], run_file: str) -> Iterator[SmallJob]:
    """Runs the Job of a JobSet's manifest as long as the context lasts; nothing of it is left then."""
    folder.mkdir()
    job, over = SmallJob(folder, manifest, run_file), threading.Event()
    job.prepare()

    def control() -> None:
        while not over.is_set():
            job.look()
            time.sleep(_POLL_S)

    thread = threading.Thread(target=control)
    thread.start()
    try:
        yield job
    finally:
        over.set()
        thread.join()
        for pod in job.pods.values():
            pod.process.kill()  # and with it, as unshare was told, all of the pod
            pod.process.wait()


def _expanded(word: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        word = word.replace(f"$({name})", value)
    return word


def _applies(rule: dict[str, Any], pod: SmallPod, code: int) -> bool:
    if "onExitCodes" in rule:
        return code in rule["onExitCodes"]["values"]
    return pod.evicted_s is not None  # condition DisruptionTarget
