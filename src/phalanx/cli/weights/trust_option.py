"""The option ``--trust-code``, and what needs it: a model of one's own (``model.factory``) is code, which computing with it runs."""

from __future__ import annotations

from pathlib import Path

import click

trust_option = click.option(
    "--trust-code",
    is_flag=True,
    help="Run the code that the run names (model.factory) also where its run file has no digest of it, where it lies in the run directory, and "
    "where that is another user's.",
)


def require_trusted_code(run_dir: Path, *, trust_code: bool, place: Path | None = None) -> None:
    """Raise FactoryError if computing with the run in ``run_dir`` runs code that nobody here has plainly chosen; ``place`` is the pack that the run
    directory was taken from."""
    from phalanx.run.directory.paths import RunDirectory, read_resolved
    from phalanx.run.factory import require_trusted

    if not RunDirectory(run_dir).run_file.exists():
        return  # refused by what reads it
    model = read_resolved(RunDirectory(run_dir)).model
    if model.factory and not trust_code:
        require_trusted(model.factory, model.factory_sha256, place or run_dir)
