"""Runs on Kubernetes: their submission, and the commands that follow one whose run directory only its pods see."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path

import click
import tomli_w

from phalanx.launch.engines.order import EngineError
from phalanx.launch.kubernetes import cluster
from phalanx.launch.kubernetes.cluster import ClusterJob
from phalanx.launch.kubernetes.manifests import beside, job_of, node_reader, text_of
from phalanx.launch.kubernetes.request import PodRequest, request_of
from phalanx.run.read import to_table
from phalanx.run.spec import RunSpec

# ``phalanx submit`` on a Kubernetes cluster: kubectl creates the manifests.


def submit_to_kubernetes(spec: RunSpec, *, dry_run: bool, out: Path | None, as_json: bool) -> None:
    """Starts a run as one job of pods. Raises ``EngineError`` with everything that keeps it from starting."""
    request = request_of(spec, tomli_w.dumps(to_table(spec)))
    submission = secrets.token_hex(8)
    if dry_run:
        _show(request, submission, out, as_json)
        return
    if out is not None:
        raise click.UsageError(
            "--out is where --dry-run writes the manifests; without --dry-run they go to the cluster"
        )
    wrong = cluster.preflight(request)
    if wrong:
        raise EngineError("this job would never start:\n  " + "\n  ".join(wrong))
    job = cluster.submit(request, submission, secrets.token_hex(32))
    if as_json:
        click.echo(json.dumps({**asdict(job), "nodes": request.nodes, "spares": request.spares}))
        return
    spares = f" and {request.spares} spares" if request.spares else ""
    ranks = request.nodes * spec.fleet.workers_per_node
    click.echo(
        f"job {job.name}: {request.nodes} nodes{spares}, {ranks} ranks; run directory {request.run_dir} in the pods"
    )
    follow = [f"phalanx {verb} {job.name} --on kubernetes" for verb in ("status", "logs", "cancel")]
    click.echo(f"follow it with  {'  |  '.join(follow)}")


def _show(request: PodRequest, submission: str, out: Path | None, as_json: bool) -> None:
    """Prints the manifests, or writes them into a file; no token is in them, so that the leading pod makes it."""
    manifests = [*beside(request), job_of(request, submission)]
    if request.launch.domain_labels:
        manifests = [*node_reader(request.account, request.launch.namespace or "default"), *manifests]
    text = text_of(manifests)
    if out is not None:
        try:
            out.write_text(text)
        except OSError as error:
            raise EngineError(f"--out: cannot write {out}: {error.strerror}") from error
        click.echo(
            f"{out}: {len(manifests)} manifests of {request.name}; start it with kubectl create -f {out}",
            err=True,
        )
    click.echo(
        json.dumps({"manifests": manifests, "run_dir": request.run_dir}) if as_json else text, nl=as_json
    )


def list_jobs(namespace: str, *, as_json: bool) -> None:
    """Prints what the cluster does with the runs that were submitted to it."""
    found = cluster.jobs(namespace)
    if as_json:
        click.echo(json.dumps([asdict(job) for job in found]))
        return
    for job in found:
        click.echo(f"job {job.name}: {job.sentence}\n  {job.run_dir} in its pods")
    if not found:
        click.echo("no run of Phalanx is in this namespace")


def tell_status(name: str, namespace: str, last: int, *, as_json: bool) -> None:
    """Prints what the cluster does with a run, and what its fleet does, as the leading pod sees it."""
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
    """Deletes a run's job; one that trains saves first, unless ``now``."""
    job = _named(name, namespace)
    if not now and not job.ended:
        click.echo(f"job {job.name} saves and ends (phalanx cancel --now ends it at once)")
    cluster.end(job, at_once=now, wait=wait)
    done = "is cancelled; the same phalanx submit goes on from its newest checkpoint"
    click.echo(f"job {job.name} {done if wait and not now else 'is asked to end'}")


def print_log(name: str, namespace: str, *, index: int, follow: bool, last: int) -> int:
    """Prints what a pod of a run has printed; kubectl's exit code."""
    return cluster.print_logs(_named(name, namespace), index=index, follow=follow, last=last)


def _named(name: str, namespace: str) -> ClusterJob:
    job = cluster.job_named(name, namespace)
    if job is None:
        raise EngineError(
            f"there is no job {name} in this namespace: phalanx runs --on kubernetes lists them, --namespace names another; a finished job may have been "
            "removed, with its run directory left where it is"
        )
    return job
