"""Files of a run directory and a dataset: names, keys and format versions as written now, and old files that stay readable."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.conftest import Contract
from contract.recorded import key_paths
from contract.test_json_keys import printed
from phalanx.checkpoint.format.image import PAGE_BYTES
from phalanx.checkpoint.pack.layout import MAGIC
from phalanx.checkpoint.pack.reader import damage, open_pack
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.fleet.core.invariants import JOURNAL_VERSION
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Finished, Step, Torn, Unknown
from phalanx.run.identity import identity
from phalanx.run.read import read_run

WEIGHTS = "d15fdf9759b8ee38071a295e9e14a50f0e0d2fcb2b6109afb31d586ad1251995"
"""Hash of the stored run's weights, computed when it was written."""
IDENTITY = "45b1e7294b17d53a2852b0687fa1627910962e652998119c6c128780246399ac"
FINGERPRINT = "1dc26ce846fcf17d21022035caba62b0f6282cc8c370fffaee423e0ac884141d"
STEP = Path("checkpoints/step-00000002")


def is_recorded(path: Path) -> bool:
    """Return False for hidden files, and for the patch of a checkout with changes."""
    return path.name[0] != "." and path.suffix != ".patch"


def named(path: Path) -> str:
    """Return a file's path with the parts that a machine names replaced."""
    name = re.sub(r"packages-[0-9a-f]+", "packages-SHA", path.as_posix())
    return re.sub(r"^machines/.+\.json$", "machines/NODE.json", name)


def keys_of_file(path: Path) -> dict[str, str]:
    """Return the keys in a file: of JSON and JSON lines, of the JSON at the head of a binary file, or its first bytes."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return valued(json.loads(data))
    if path.suffix == ".jsonl":
        return keys_of_lines([json.loads(line) for line in data.splitlines()])
    if path.suffix == ".safetensors":
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        return {
            name: f"{tensor['dtype']} {tensor['shape']}" for name, tensor in header.items() if name[0] != "_"
        }
    if path.suffix == ".catalog":
        return valued(json.loads(data.split(b"\n")[0]))
    if path.suffix == ".pack":
        magic, start, length = struct.unpack_from("<16sQQ", data)
        index = json.loads(data[start : start + length])["content"]
        index["files"] = sorted(index["files"])
        return {"magic": repr(magic), **valued(index)}
    if path.suffix in (".bin", ".sums") and data.startswith((b"PHX", b"phalanx ")):
        return {"head": repr(data[:8] if data.startswith(b"PHX") else data.split(b":")[0])}
    return {}


def valued(content: dict[str, Any]) -> dict[str, str]:
    """Return the key paths of an object, with the format's version as its value."""
    facts = key_paths(content)
    for path, table in (("", content), (".content", content.get("content", {}))):
        if "version" in table:
            facts[f"{path}.version"] = str(table["version"])
    return facts


def keys_of_lines(lines: list[Mapping[str, Any]]) -> dict[str, str]:
    """Return the key paths of JSON lines by their kind."""
    facts: dict[str, str] = {}
    for line in lines:
        facts |= {f"{line.get('kind', '')}{path}": kind for path, kind in key_paths(line).items()}
    return facts


def test_the_files_that_are_written_have_the_names_and_keys_recorded(
    contract: Contract, trained: tuple[Path, dict[str, object]]
) -> None:
    facts = {"journal version": str(JOURNAL_VERSION), "pack page": str(PAGE_BYTES), "pack magic": repr(MAGIC)}
    for kind, folder in (("run", trained[0] / "runs" / "tiny"), ("dataset", trained[0] / "words")):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and is_recorded(path))
        for path in files:
            name = f"{kind}/{named(path.relative_to(folder))}"
            facts[name] = "file"
            if path.name not in ("tokenizer.json", "tokenizer_config.json"):
                facts |= {f"{name}: {key}": value for key, value in keys_of_file(path).items()}
    contract("formats", facts)


@pytest.mark.parametrize("place", ["runs/tiny", "runs/tiny/checkpoints", f"runs/tiny/{STEP}"])
@pytest.mark.usefixtures("in_stored")
def test_the_stored_checkpoint_has_its_recorded_hash(place: str) -> None:
    assert printed(["hash", place, "--json"])["weights_sha256"] == WEIGHTS


@pytest.mark.usefixtures("in_stored")
def test_the_stored_checkpoint_has_good_checksums_and_its_step() -> None:
    assert printed(["checkpoint", "verify", "runs/tiny", "--json"])["good"]
    index = DiskTier(Path("runs/tiny/checkpoints")).index(2)
    assert (index.step, index.world_size, index.extra["next_sample"]) == (2, 1, 8)


@pytest.mark.usefixtures("in_stored")
def test_the_stored_pack_names_the_weights_that_it_was_made_of() -> None:
    pack = open_pack(Path("runs/tiny/packs/step-00000002-bf16.pack"), direct=False)
    assert (pack.index.weights_sha256, pack.index.format, pack.index.step) == (WEIGHTS, "bf16", 2)
    assert list(damage(pack, lambda _done, _total: None)) == []


@pytest.mark.usefixtures("in_stored")
def test_the_stored_dataset_is_intact_and_has_its_fingerprint() -> None:
    assert printed(["data", "copy", "words", "checked-words", "--json"])["fingerprint"] == FINGERPRINT


@pytest.mark.usefixtures("in_stored")
def test_the_stored_run_file_has_its_recorded_identity() -> None:
    assert identity(read_run(Path("runs/tiny/run.toml"), {})) == IDENTITY


@pytest.mark.usefixtures("in_stored")
def test_every_line_of_the_stored_event_stream_is_known() -> None:
    bodies = [event.body for event in read_events(Path("runs/tiny/events.jsonl"))]
    assert [body for body in bodies if isinstance(body, Unknown | Torn)] == []
    assert [body.step for body in bodies if isinstance(body, Step)] == [1, 2]
    (finished,) = (body for body in bodies if isinstance(body, Finished))
    assert finished.result["weights_sha256"] == WEIGHTS
