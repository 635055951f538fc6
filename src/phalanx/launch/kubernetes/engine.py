"""Runs on Kubernetes: one job of pods, created by kubectl. Only the pods see the run directory, so commands name the job instead."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import tomli_w

from phalanx.launch.engines.engine import FIELDS_OF_PODS, SubmitReport, SubmitRequest
from phalanx.launch.engines.order import EngineError
from phalanx.launch.engines.submission import Submitted
from phalanx.launch.kubernetes import cluster
from phalanx.launch.kubernetes.manifests import beside, job_of, node_reader, text_of
from phalanx.launch.kubernetes.request import PodRequest, request_of, with_pod_run_dir
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
        """Return the run with its directory in the pods."""
        return with_pod_run_dir(spec), []

    def doubts(self, spec: RunSpec, working_dir: Path) -> Iterator[str]:  # noqa: ARG002
        """Yield nothing: this machine sees none of what the pods see."""
        return iter(())

    def submit(self, spec: RunSpec, working_dir: Path, request: SubmitRequest) -> SubmitReport:  # noqa: ARG002
        """Check the cluster and create the job of the run, with a new token. With ``dry_run`` only return the manifests. Raises
        ``EngineError``."""
        pods = request_of(spec, tomli_w.dumps(to_table(spec)))
        submission = secrets.token_hex(8)
        if request.dry_run:
            return _dry_run(pods, submission, request.out, request.notify)
        wrong = cluster.preflight(pods)
        if wrong:
            raise EngineError("this job would never start:\n  " + "\n  ".join(wrong))
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
    """Return the report of a dry run: the manifests as kubectl reads them, also written to ``out`` if it is given. Creates nothing.

    They hold no token; the leading pod makes one. Raises EngineError if ``out`` cannot be written.
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
