"""Runs kubectl, with errors that say what to do where it reaches no cluster, or the cluster lacks what Phalanx builds on."""

from __future__ import annotations

from phalanx.launch.engines.tools import EngineError, run_tool

JOB_SETS, VOLCANO_JOBS = "jobsets.jobset.x-k8s.io", "jobs.batch.volcano.sh"
"""The kinds of a run's job, as kubectl names them."""
ANSWER_S = 60.0
"""Seconds in which an API server answers."""
_UNREACHED = (
    "connection refused",
    "was refused",
    "Unable to connect",
    "no configuration has been provided",
    "i/o timeout",
    "no such host",
    "couldn't get current server",
)
_NO_KIND = (
    "the server doesn't have a resource type",
    "no matches for kind",
    "could not find the requested resource",
)
_INSTALL = {
    JOB_SETS: "JobSet is not installed in this cluster (jobset.sigs.k8s.io/docs/installation), or take --set launch.scheduler='\"volcano\"'",
    VOLCANO_JOBS: "Volcano is not installed in this cluster (volcano.sh/en/docs/installation)",
    "localqueues.kueue.x-k8s.io": "Kueue is not installed in this cluster (kueue.sigs.k8s.io/docs/installation): leave --queue out",
    "queues.scheduling.volcano.sh": "Volcano is not installed in this cluster (volcano.sh/en/docs/installation)",
}


class MissingKindError(EngineError):
    """A cluster does not know a kind of object."""


def kubectl(*words: str, namespace: str = "", stdin: str | None = None, timeout_s: float = ANSWER_S) -> str:
    """Runs kubectl and returns what it printed. Raises ``EngineError`` with its words and what to do."""
    where = ["--namespace", namespace] if namespace else []
    try:
        return run_tool(["kubectl", *where, *words], stdin=stdin, timeout_s=timeout_s)
    except EngineError as error:
        said = str(error)
        if any(sign in said for sign in _NO_KIND):
            raise MissingKindError(
                next((why for kind, why in _INSTALL.items() if kind.split(".")[0] in said), said)
            ) from error
        if any(sign in said for sign in _UNREACHED):
            raise EngineError(
                f"kubectl reaches no cluster: choose one by kubectl config use-context NAME or KUBECONFIG; it said: {said[-300:]}"
            ) from error
        raise
