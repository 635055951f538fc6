"""Identities of the shipped run files: the hash over every field that can reach the bits of the weights."""

from __future__ import annotations

from pathlib import Path

from contract.conftest import Contract
from phalanx.model.facts.presets import PRESETS
from phalanx.run.identity import identity
from phalanx.run.read import read_run, shipped_names


def test_a_shipped_run_file_has_the_identity_recorded(contract: Contract) -> None:
    names = [f"configs/{name}.toml" for name in shipped_names()]
    contract("run_identities", {name: identity(read_run(Path(name), PRESETS)) for name in names})
