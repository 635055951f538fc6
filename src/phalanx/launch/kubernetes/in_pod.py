"""A pod beside its agent: liveness, the domains of its node, and the exit code that decides whether it is started again.

Kubernetes never starts a pod again that has ended with code 0, so only a finished run ends with 0.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from phalanx.launch.engines.order import FOLDER, EngineError
from phalanx.launch.engines.submission import OF_PODS, STOPPED
from phalanx.launch.kubernetes.manifests import EXIT_GOES_ON, EXIT_OVER
from phalanx.run.directory.files import write_atomically
from phalanx.run.directory.paths import RunDirectory, read_small_json

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the token and the authority of its API server (kubernetes.io/docs/tasks/run-application/access-api-from-pod)."""
_TOUCH_S = 5.0
_ASK_TIMES, _ASK_AGAIN_S = 5, 2.0


def show_life(path: Path) -> None:
    """Touch a file every few seconds, on a thread, while this process runs Python code; it stops if the process hangs in native code."""

    def touch() -> None:
        while True:
            path.touch()
            time.sleep(_TOUCH_S)

    threading.Thread(target=touch, name="alive", daemon=True).start()


def begin_submission(run_dir: Path, submission: str) -> None:
    """Remove the mark that an earlier start of the run was stopped for good; a later pod of the same start keeps it."""
    folder = run_dir / FOLDER
    newest = folder / OF_PODS
    folder.mkdir(parents=True, exist_ok=True)
    if not newest.exists() or newest.read_text() != submission:
        (folder / STOPPED).unlink(missing_ok=True)
        write_atomically(newest, submission.encode())


def exit_code(run_dir: Path, code: int, *, leads: bool) -> int:
    """Return the code with which a pod ends, given that of its agent.

    0: the run is finished. ``EXIT_GOES_ON``: it was saved, or this node has left it; it goes on, with another pod under this index.
    ``EXIT_OVER``, from the pod that leads: the run was stopped for good, or has failed. Any other: this pod has failed, which is
    counted.
    """
    if RunDirectory(run_dir).finished_result() is not None:
        return 0
    if leads:
        stopped = (run_dir / FOLDER / STOPPED).exists()
        return EXIT_GOES_ON if code == EXIT_GOES_ON and not stopped else EXIT_OVER
    return code or EXIT_GOES_ON


def is_over(run_dir: Path) -> bool:
    """True if the fleet of this run has ended, finished or not."""
    return read_small_json(run_dir / "fleet.json").get("phase") in ("finished", "failed")


def node_domains(
    labels: tuple[str, ...], environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> tuple[str, ...]:
    """Return the values that this pod's node has for some labels, in their order; a label that it lacks counts as a domain of its
    own.

    The downward API gives pods no labels of nodes but those of zone and region (KEP-4742, beta in Kubernetes 1.35), so they are
    read from the API server.

    Raises:
        EngineError: It does not answer, or does not let this pod see nodes.
    """
    if not labels:
        return ()
    name = environ.get("NODE_NAME", "")
    values = _node(name, environ, account).get("metadata", {}).get("labels", {})
    return tuple(str(values.get(label) or f"{name} alone") for label in labels)


def _node(name: str, environ: Mapping[str, str], account: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return a node as the API server describes it, by this pod's service account. Tries several times. Raises ``EngineError``."""
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
        f"launch.domain_labels: the API server at {where}:{port} does not tell the labels of node {name}: {wrong}"
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
