"""Every block of the manual runs as it is printed, one page after the other, each in a working folder of its own."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from manual.blocks import Block, blocks, pages, phalanx_commands
from manual.working_folder import make_working_folder, run_blocks

QUICK = {
    *(
        "data",
        "goodput",
        "hardware",
        "hash",
        "logs",
        "models",
        "new",
        "plan",
        "ranks",
        "runs",
        "show",
        "spec",
    ),
    *("status", "why"),
}
"""Commands that take a second or two. Pages that call others are among the tests of servers."""
PAGE_S = 1800.0
"""Time limit of a page, whose commands train models on a machine that may have much else to do."""


def _runs(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language in ("sh", "python") and not block.reason]


def _is_quick(page: str) -> bool:
    texts = [block.text for block in _runs(page) if block.language == "sh"]
    commands = {arguments[0] for text in texts for arguments in phalanx_commands(text) if arguments}
    has_programs = any(block.language == "python" for block in _runs(page))
    return (
        commands <= QUICK
        and not has_programs
        and not any(re.search(r"python -m|make ", text) for text in texts)
    )


PAGES = [page for page in pages() if _runs(page)]


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which a small quickstart has run; not to be changed."""
    folder = tmp_path_factory.mktemp("manual") / "work"
    make_working_folder(folder)
    return folder


@pytest.mark.timeout(PAGE_S)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if _is_quick(page) else pytest.mark.servers) for page in PAGES],
)
def test_the_blocks_of_a_page_run_as_printed(page: str, after_quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(after_quickstart, folder, symlinks=True)
    run_blocks(_runs(page), folder)
