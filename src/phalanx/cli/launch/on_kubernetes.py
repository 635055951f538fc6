"""The commands that follow a run on Kubernetes by its job's name: ``status``, ``logs`` and ``cancel``.

Only its pods see the run directory.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from phalanx.launch.engines.order import EngineError
from phalanx.launch.kubernetes import cluster
from phalanx.launch.kubernetes.cluster import ClusterJob


def print_status(name: str, namespace: str, last: int, *, as_json: bool) -> None:
    """Print the state of a run in the cluster; if it runs, also that of its fleet, as the leading pod sees it. Raises ``EngineError``."""
    job = _named(name, namespace)
    if not as_json:
        click.echo(f"job {job.name} (kubernetes): {job.sentence}")
    elif job.state != "running":
        click.echo(json.dumps(asdict(job)))
        return
    if job.state == "running":
        words = ["--json"] if as_json else ["--last", str(last)]
        click.echo(cluster.ask_in_pod(job, "status", job.run_dir, *words), nl=False)


def cancel_job(name: str, namespace: str, *, now: bool, wait: bool) -> None:
    """Delete a run's job, and print so; one that trains saves first, unless ``now``. Raises ``EngineError`` if there is none."""
    job = _named(name, namespace)
    if not now and not job.ended:
        click.echo(f"job {job.name} saves and ends (phalanx cancel --now ends it at once)")
    cluster.end(job, at_once=now, wait=wait)
    done = "is cancelled; the same phalanx submit resumes from its newest checkpoint"
    click.echo(f"job {job.name} {done if wait and not now else 'gets a request to end'}")


def print_log(name: str, namespace: str, *, index: int, follow: bool, last: int) -> int:
    """Print the output of a run's pod. Return kubectl's exit code."""
    return cluster.print_logs(_named(name, namespace), index=index, follow=follow, last=last)


def _named(name: str, namespace: str) -> ClusterJob:
    """Return the job of a name. Raises ``EngineError`` if there is none."""
    job = cluster.job_named(name, namespace)
    if job is None:
        raise EngineError(
            f"there is no job {name} in this namespace: phalanx runs --on kubernetes lists them, --namespace names another; a finished job may have been "
            "removed, with its run directory left where it is"
        )
    return job
