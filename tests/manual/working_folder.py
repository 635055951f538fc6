"""A working folder as a reader has it after ``make quickstart``, in small, and the blocks of a page run in it.

``configs/quickstart.toml`` is the shipped one with a model, a corpus and a number of steps that take seconds. Everything else of the
checkout is there as it is. So a block is executed exactly as it is printed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from manual.blocks import ROOT, Block
from phalanx_process import ENVIRONMENT, alive, run

_CHECKOUT = ("bench", "deploy", "docs", "examples", "src", "validation", "README.md")
_EXPECTED_CODE = re.compile(r"^(.*\S)\s+# exit code (\d+)\b.*$", re.MULTILINE)
_SMALLER = {
    'preset = "toy-4m"': 'preset = "toy-4m"\nlayers = 2\ndim = 32',
    'corpus = ["python-stdlib"]': 'corpus = ["src/phalanx/model/facts/*.py"]',
    "vocab_size = 4096": "vocab_size = 512",
    "steps = 340": "steps = 40",
    "seq_len = 256": "seq_len = 64",
    "every_steps = 100": "every_steps = 20",
    "every_steps = 80": "every_steps = 20",
    "sequences = 64": "sequences = 8",
    "tokens = 120": "tokens = 8",
}


def make_working_folder(folder: Path) -> None:
    """Fill ``folder`` with the checkout and the dataset and the finished run of a quickstart."""
    folder.mkdir()
    for name in _CHECKOUT:
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "configs", folder / "configs")
    quickstart = folder / "configs" / "quickstart.toml"
    text = quickstart.read_text(encoding="utf-8")
    for shipped, small in _SMALLER.items():
        assert shipped in text, shipped
        text = text.replace(shipped, small)
    quickstart.write_text(text, encoding="utf-8")
    done = run(["train", "configs/quickstart.toml"], folder)
    assert done.returncode == 0, done.stderr


def run_blocks(blocks: Sequence[Block], folder: Path, environment: Mapping[str, str] = ENVIRONMENT) -> None:
    """Run the blocks of a page in order, in one shell in ``folder``; the ``python`` blocks are one program, which runs last.

    Raises ``AssertionError`` with the block's line and the output if a command fails, or ends otherwise than its comment ``# exit code 1`` states.
    """
    programs = [block for block in blocks if block.language == "python"]
    script = ["set -e"]
    for block in blocks:
        if block.language == "sh":
            script += [
                f"echo {shlex.quote(f'--- {block}')}",
                _EXPECTED_CODE.sub(r"\1 || [ $? = \2 ]", block.text),
            ]
    if programs:
        (folder / "blocks.py").write_text("\n".join(block.text for block in programs), encoding="utf-8")
        script += [f"echo '--- {programs[0]} and the Python blocks behind it'", "python blocks.py"]
    (folder / "blocks.sh").write_text("\n".join(script), encoding="utf-8")
    (folder / "blocks.txt").touch()
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), environment.get("PATH", os.defpath)])
    with (folder / "blocks.txt").open("w") as output:
        shell = subprocess.Popen(
            ["bash", "blocks.sh"],
            cwd=folder,
            env={**environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait()
        finally:
            end_group(shell.pid)  # servers that a block has left in the background
    text = (folder / "blocks.txt").read_text(encoding="utf-8", errors="replace")
    assert code == 0, f"exit code {code} in the last of these blocks:\n{text[-6000:]}"


def end_group(group: int) -> None:
    """Kill the processes of a group, and wait until none is left: the next page's server takes the same port.

    Until a process has ended, its socket accepts connections, and resets them.
    """
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while any(
        _group(stat) == group and alive(int(stat.parent.name)) for stat in Path("/proc").glob("[0-9]*/stat")
    ):
        time.sleep(0.05)


def _group(stat: Path) -> int | None:
    """Return the group of a process; ``stat`` is its file of proc(5). None if it has gone."""
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None
