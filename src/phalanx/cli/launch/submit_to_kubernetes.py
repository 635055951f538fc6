"""``phalanx submit`` on a Kubernetes cluster: writes the manifests, and has kubectl create them."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path

import click
import tomli_w

from phalanx.launch.engines.tools import EngineError
from phalanx.launch.kubernetes import cluster
from phalanx.launch.kubernetes.manifests import beside, job_of, node_reader, text_of
from phalanx.launch.kubernetes.request import PodRequest, request_of
from phalanx.run.read import to_table
from phalanx.run.spec import RunSpec


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
