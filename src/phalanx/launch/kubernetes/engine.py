"""Runs on Kubernetes: one job of pods, created by kubectl. Only the pods see the run directory, so commands name the job instead."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import tomli_w

from phalanx.launch.engines.engine import FIELDS_OF_PODS, SubmitReport, SubmitRequest
from phalanx.launch.engines.order import FOLDER, EngineError, refuse_for
from phalanx.launch.engines.submission import OF_PODS, STOPPED, Submitted
from phalanx.launch.kubernetes import cluster
from phalanx.launch.kubernetes.manifests import beside, job_of, node_reader, text_of
from phalanx.launch.kubernetes.request import PodRequest, request_of, with_pod_run_dir
from phalanx.process.exit_codes import EXIT_OVER, EXIT_STOPPED
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, read_small_json
from phalanx.run.read import to_table
from phalanx.run.spec import RunSpec


@dataclass(frozen=True)
class KubernetesEngine:
    """``launch.engine = "kubernetes"``."""

    name: str = "kubernetes"
    needs_nodes: bool = True
    has_queue: bool = True
    options: frozenset[str] = frozenset({"out", *FIELDS_OF_PODS})

    def prepare(self, spec: RunSpec, working_dir: Path) -> tuple[RunSpec, list[str]]:  # noqa: ARG002
        """Return the run with its directory in the pods. Raises ``EngineError`` if that is in no mount."""
        return with_pod_run_dir(spec), []

    def doubts(self, spec: RunSpec, working_dir: Path) -> Iterator[str]:  # noqa: ARG002
        """Yield nothing: this machine sees none of what the pods see."""
        return iter(())

    def submit(self, spec: RunSpec, working_dir: Path, request: SubmitRequest) -> SubmitReport:  # noqa: ARG002
        """Check the cluster and create the job of the run, with a new token.

        With ``dry_run`` only return the manifests, without contacting the cluster. Raises ``EngineError`` with all
        problems.
        """
        pods = request_of(spec, tomli_w.dumps(to_table(spec)))
        submission = secrets.token_hex(8)
        if request.dry_run:
            return _dry_run(pods, submission, request.out, request.notify)
        refuse_for(cluster.preflight(pods), "this job would never start")
        job = cluster.submit(pods, submission, secrets.token_hex(32))
        spares = f" and {pods.spares} spares" if pods.spares else ""
        ranks = pods.nodes * spec.fleet.workers_per_node
        follow = [f"phalanx {verb} {job.name} --on kubernetes" for verb in ("status", "logs", "cancel")]
        text = (
            f"job {job.name}: {pods.nodes} nodes{spares}, {ranks} ranks; run directory {pods.run_dir} in the pods\n"
            f"follow it with  {'  |  '.join(follow)}"
        )
        return SubmitReport({**asdict(job), "nodes": pods.nodes, "spares": pods.spares}, text)

    def jobs(self, namespace: str) -> list[cluster.ClusterJob]:
        """Return the runs that were submitted to the cluster."""
        return cluster.jobs(namespace)

    def queued(self, run_dir: Path) -> None:
        """Return ``None``: this machine sees no run directory of a pod."""

    def submitted(self, run_dir: Path, made: Submitted) -> NoReturn:  # noqa: ARG002
        """Raise ``EngineError``: this machine sees no run directory of a pod."""
        raise EngineError(f"{made.job} runs in pods: phalanx status {made.job} --on kubernetes")


ENGINE = KubernetesEngine()


def _dry_run(
    pods: PodRequest, submission: str, out: Path | None, notify: Callable[[str], None]
) -> SubmitReport:
    """Return the report of a dry run: the manifests as kubectl reads them, also written to ``out`` if it is given.

    They have no token, which the leading pod makes, and include the role to read node labels if that is needed.
    Raises ``EngineError`` if ``out`` cannot be written.
    """
    manifests = [*beside(pods), job_of(pods, submission)]
    if pods.launch.domain_labels:
        manifests = [*node_reader(pods.account, pods.launch.namespace or "default"), *manifests]
    text = text_of(manifests)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise EngineError(f"--out: cannot write {out}: {error.strerror}") from error
        notify(f"{out}: {len(manifests)} manifests of {pods.name}; start it with kubectl create -f {out}")
    return SubmitReport({"manifests": manifests, "run_dir": pods.run_dir}, text)


# Inside an agent's pod: liveness, the domains of its node, and the exit code that decides whether the pod is restarted.
#
# Kubernetes never restarts a pod that ended with code 0, so only a finished run ends with 0.


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the authority of its API server (kubernetes.io/docs/tasks/run-application/access-api-from-pod)."""
_TOUCH_S = 5.0
_ASK_TIMES, _ASK_AGAIN_S = 5, 2.0


def show_life(path: Path, pause_s: float = _TOUCH_S) -> None:
    """Start a thread that touches a file every ``pause_s``. It stops if this process hangs in native code.

    If the file cannot be touched, that is printed, and tried again after the pause.
    """

    def touch() -> None:
        while True:
            try:
                path.touch()
            except OSError as error:
                print(
                    f"cannot touch {path}: {error.strerror}; the pod is ended if that lasts",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(pause_s)

    threading.Thread(target=touch, name="alive", daemon=True).start()


def begin_submission(run_dir: Path, submission: str) -> None:
    """Record ``submission`` as the run's present start; at its first pod also remove the mark of a stop of an
    earlier start.

    Raises ``OSError``.
    """
    folder = run_dir / FOLDER
    newest = folder / OF_PODS
    folder.mkdir(parents=True, exist_ok=True)
    if not newest.exists() or newest.read_text() != submission:
        (folder / STOPPED).unlink(missing_ok=True)
        write_atomically(newest, submission.encode())


def exit_code(run_dir: Path, code: int, *, leads: bool) -> int:
    """Return the code with which a pod ends, given ``code``, that of its agent.

    0: the run is finished. ``EXIT_STOPPED``: another pod replaces this one, since the run was saved, or this
    node left it. ``EXIT_OVER``, only if it ``leads``: the run was stopped for good, or has failed. Any other is
    the code of an agent that does not lead, and is counted as a failure.
    """
    if RunDirectory(run_dir).finished_result() is not None:
        return 0
    if leads:
        stopped = (run_dir / FOLDER / STOPPED).exists()
        return EXIT_STOPPED if code == EXIT_STOPPED and not stopped else EXIT_OVER
    return code or EXIT_STOPPED


def is_over(run_dir: Path) -> bool:
    """True if the fleet of this run has ended, finished or not."""
    return read_small_json(run_dir / "fleet.json").get("phase") in ("finished", "failed")


def node_domains(
    labels: tuple[str, ...], environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> tuple[str, ...]:
    """Return the values that this pod's node has for ``labels``, in their order; a label that it lacks is a domain
    of its own.

    They are read from the API server: the downward API has few labels of nodes (KEP-4742, beta in Kubernetes 1.35).
    Raises ``EngineError`` if that does not answer, or does not let this pod see nodes. No labels, no request.
    """
    if not labels:
        return ()
    name = environ.get("NODE_NAME", "")
    values = _node(name, environ, account).get("metadata", {}).get("labels", {})
    return tuple(str(values.get(label) or f"{name} alone") for label in labels)


def _node(name: str, environ: Mapping[str, str], account: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return a node as the API server describes it, by this pod's service account.

    Tries five times, 2 s apart, but once if it is refused (401, 403). Raises ``EngineError``.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        token = (account / "token").read_text().strip()
        trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise EngineError(f"launch.domain_labels: this pod has no service account: {error}") from error
    where = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{where}:{port}/api/v1/nodes/{name}", headers={"Authorization": f"Bearer {token}"}
    )
    for again in range(_ASK_TIMES):
        try:
            with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
                read: dict[str, dict[str, dict[str, str]]] = json.loads(answer.read())
                return read
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise EngineError(
                    f"launch.domain_labels: the pods' service account may not read node {name} ({error.code}): an administrator creates what "
                    "phalanx submit --dry-run writes as ClusterRole and ClusterRoleBinding, or take launch.domain_labels out"
                ) from error
            wrong: OSError = error
        except OSError as error:
            wrong = error
        if again < _ASK_TIMES - 1:
            time.sleep(_ASK_AGAIN_S)
    raise EngineError(
        f"launch.domain_labels: the API server at {where}:{port} does not return the labels of node {name}: {wrong}"
    )


def made_directory(path: Path) -> Path:
    """Return the run directory, made with its parents if it is missing. Raises ``EngineError``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"user {os.getuid()} of this pod cannot make {path}: {error.strerror}; launch.run_as names another user, or give the volume to "
            "this one"
        ) from error
    return path
