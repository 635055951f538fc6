"""Runs the command-line tools of schedulers (sbatch, squeue, kubectl, ssh), with errors that say what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

_MEANS = {
    "Could not establish a configuration source": "this machine belongs to no Slurm cluster (SLURM_CONF, /etc/slurm/slurm.conf): give the command on a login node",
    "Unable to contact slurm controller": "slurmctld does not answer: try again in a moment, or ask who runs the cluster",
}
"""Words of a tool that say little to who did not set it up -> what they mean, and what to do."""


class EngineError(RuntimeError):
    """An engine cannot do what was asked; the message says why and what to do."""


def run_tool(
    words: Sequence[str],
    *,
    timeout_s: float = 60.0,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    errors_too: bool = False,
) -> str:
    """What a tool printed that ran in ``folder`` (by default here), and with ``errors_too`` what it wrote as errors although it had none.

    Raises ``EngineError`` if it is not installed, ended with an error (with its own words), or took too long.
    """
    try:
        done = subprocess.run(
            list(words),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",  # what a host greets with may be in any encoding
            timeout=timeout_s,
            cwd=folder,
            env=None if environment is None else dict(environment),
            check=False,
        )
    except FileNotFoundError as error:
        raise EngineError(
            f"there is no {words[0]} on this machine: give the command where the cluster is used from (a login node), or install its client"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"{words[0]} has not answered for {timeout_s:.0f} s: is what it talks to up? Try again"
        ) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        meaning = next((meaning for word, meaning in _MEANS.items() if word in said), said)
        raise EngineError(f"{words[0]}: {meaning}")
    return done.stdout + (done.stderr if errors_too else "")
