"""Every block of the manual runs as it is printed, one page after the other, each in a working folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from launch.engines.slurm_cluster import missing, slurm_cluster
from manual.blocks import ROOT, Block, blocks, pages, phalanx_commands
from manual.working_folder import make_working_folder, run_blocks
from phalanx_process import ENVIRONMENT, alive

QUICK = "data goodput hardware hash logs models new ranks runs show spec status why"
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
        commands <= set(QUICK.split())
        and not has_programs
        and not any(re.search(r"python -m|make ", text) for text in texts)
    )


# Reference pages are generated from examples that have a test of their own (tests/cli/test_help.py).
PAGES = [page for page in pages() if _runs(page) and not page.startswith("docs/reference/")]
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]
SLURM = "docs/tutorials/slurm-and-resize.md"


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder in which a small quickstart has run; not to be changed."""
    folder = tmp_path_factory.mktemp("manual") / "work"
    make_working_folder(folder)
    return folder


@pytest.mark.timeout(PAGE_S)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if _is_quick(page) else pytest.mark.servers)
        for page in PAGES
        if page not in TUTORIALS
    ],
)
def test_the_blocks_of_a_page_run_as_printed(page: str, after_quickstart: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(after_quickstart, folder, symlinks=True)
    run_blocks(_runs(page), folder)


@pytest.mark.servers
@pytest.mark.timeout(PAGE_S)
@pytest.mark.parametrize("page", [page for page in TUTORIALS if page != SLURM])
def test_a_tutorial_runs_from_an_empty_folder_to_its_end(page: str, tmp_path: Path) -> None:
    run_blocks(_runs(page), tmp_path)


@pytest.mark.servers
@pytest.mark.timeout(PAGE_S)
@pytest.mark.skipif(bool(missing()), reason=f"no Slurm cluster can be started: {missing()}")
def test_the_tutorial_of_slurm_runs_on_a_real_slurm(tmp_path: Path) -> None:
    for name in ("work", "slurm"):
        (tmp_path / name).mkdir()
    with slurm_cluster(tmp_path / "slurm") as cluster:
        run_blocks(_runs(SLURM), tmp_path / "work", {**ENVIRONMENT, **cluster.environment})


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_has_at_most_1500_words(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= 1500


def _block(text: str) -> Block:
    return Block("page.md", 7, "sh", text, "")


def test_a_command_that_fails_is_an_error_with_the_line_of_its_block(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"--- page\.md:7\nbefore\n$"):
        run_blocks([_block("echo before\nfalse\necho behind\n")], tmp_path)


def test_a_command_ends_with_the_exit_code_that_its_comment_states(tmp_path: Path) -> None:
    run_blocks([_block("test -e absent   # exit code 1: there is no such file\n")], tmp_path)
    with pytest.raises(AssertionError, match="exit code 1"):
        run_blocks([_block("test -d .   # exit code 1: it is no folder\ntest -e absent\n")], tmp_path)


def test_the_blocks_of_a_page_share_one_shell_and_python_follows(tmp_path: Path) -> None:
    program = Block("page.md", 9, "python", 'assert open("name").read() == "phalanx\\n"\n', "")
    run_blocks([_block("NAME=phalanx\n"), program, _block("echo $NAME > name\n")], tmp_path)


def test_what_a_block_leaves_in_the_background_ends_with_its_page(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    run_blocks([_block("sleep 1000 > held &\n")], tmp_path)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # returns when no process holds the other end
    os.close(reader)


def test_what_a_block_leaves_in_the_background_has_ended_when_its_page_has(tmp_path: Path) -> None:
    run_blocks([_block("sleep 3600 &\necho $! > number\n")], tmp_path)
    assert not alive(int((tmp_path / "number").read_text()))


_SERVER = """
import os, socket, threading, time
memory = bytearray(200 << 20)  # the last thread that ends gives it back before it closes the socket
server = socket.create_server(("127.0.0.1", 0))
for _ in range(200):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
print(server.getsockname()[1], file=open("port.new", "w"), flush=True)
os.rename("port.new", "port")
time.sleep(3600)
"""


def test_no_server_with_threads_takes_connections_when_its_page_has_ended(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(_SERVER)
    run_blocks([_block("python server.py &\nuntil [ -e port ]; do sleep 0.01; done\n")], tmp_path)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int((tmp_path / "port").read_text())))
