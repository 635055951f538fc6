"""The output of real processes is in their logs, also if it is large, binary or secret, and also after a crash."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from observe.logs.captured import run
from open_files import open_pipes_and_files_below
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import Bounds, LogOrder, last_lines, set_aside

C = "import ctypes; libc = ctypes.CDLL(None)\n"


def test_each_way_to_write_a_line_has_its_level_and_its_place(tmp_path: Path) -> None:
    captured = run(
        tmp_path,
        """
import logging, warnings
place.rank, place.epoch, place.step = 3, 1, 17
print("printed")
sys.stderr.write("Warning: of a library\\n")
logging.getLogger("phalanx.x").info("told")
logging.getLogger("lib").warning("of %s", "logging")
warnings.warn("of warnings")
place.step = 18
raise ValueError("uncaught")
""",
    )
    assert captured.code == 1
    assert [(line.level, line.step) for line in captured.lines] == [
        *(("info", 17), ("warning", 17), ("info", 17), ("warning", 17), ("warning", 17)),
        ("error", 18),
    ]
    assert captured.texts[:4] == ["printed", "Warning: of a library", "told", "lib: of logging"]
    assert captured.texts[5].startswith("Traceback")
    assert captured.texts[5].endswith("ValueError: uncaught")
    assert {(line.node, line.rank, line.epoch, line.attempt, line.process) for line in captured.lines} == {
        ("node-1", 3, 1, 2, "rank-00003")
    }


def test_a_record_whose_arguments_do_not_fit_its_text_is_kept(tmp_path: Path) -> None:
    captured = run(tmp_path, 'import logging\nlogging.getLogger("lib").error("%d of %d are left", 3)')
    records = [line for line in captured.lines if "of %d are left" in line.text]
    assert [line.level for line in records] == ["error"]
    assert records[0].text == "lib: %d of %d are left (its arguments do not fit: TypeError)"


def test_an_uncaught_error_of_a_thread_is_one_record(tmp_path: Path) -> None:
    captured = run(
        tmp_path,
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='loader'); t.start(); t.join()",
    )
    (line,) = captured.lines
    assert line.level == "error"
    assert line.text.endswith("ZeroDivisionError: division by zero\n(in thread loader)")


def test_native_code_and_other_programs_are_caught_with_the_place_of_the_process(tmp_path: Path) -> None:
    captured = run(
        tmp_path,
        C
        + "place.step = 5; libc.puts(b'from C'); libc.fflush(None); os.system('echo from a shell >&2'); os.write(2, b'NCCL WARN no newline')",
    )
    assert [(line.text, line.level, line.step) for line in captured.lines] == [
        ("from C", "info", 5),
        ("from a shell", "info", 5),
        ("NCCL WARN no newline", "warning", 5),
    ]


def test_output_before_kill_minus_9_in_the_middle_of_a_line_is_kept(tmp_path: Path) -> None:
    captured = run(
        tmp_path,
        "print('whole'); print('begun and flushed', end='', flush=True); os.write(1, b' and C'); os.kill(os.getpid(), 9)",
    )
    assert captured.code == -signal.SIGKILL
    assert captured.texts == ["whole", "begun and flushed and C"]


def test_a_crash_in_native_code_leaves_the_stack(tmp_path: Path) -> None:
    captured = run(tmp_path, C + "place.step = 9\ndef f(): libc.strlen(1)\nf()")
    assert captured.code == -signal.SIGSEGV
    (line,) = captured.lines
    assert (line.level, line.step) == ("error", 9)
    assert line.text.startswith("Fatal Python error: Segmentation fault")
    assert "in f" in line.text


@pytest.mark.parametrize("caught", [True, False], ids=["in Python", "past Python"])
def test_a_process_that_prints_200_mb_is_bounded_and_its_error_and_last_words_are_kept(
    tmp_path: Path, caught: bool
) -> None:
    program = """
line = "spam " * 20_000 + "\\n" + "x\\n" * 1_000
for _ in range(2_000):
    sys.stdout.write(line)
print("last words", flush=True)
raise ValueError("bad luck")
"""
    captured = run(tmp_path, program, caught=caught, bounds=Bounds(1 << 20, 3))
    assert captured.code == 1
    assert captured.bytes_on_disk() <= 2 * 3 << 20
    assert captured.texts[-1].endswith("ValueError: bad luck")
    if not caught:
        assert "last words" in captured.texts
    # Either lines were left out, or as many full files as are kept are beside the newest, of any sizes.
    full_files = [*set_aside(captured.order.path), *set_aside(captured.order.raw)]
    assert any("are left out here" in text for text in captured.texts) or len(full_files) == 2


def test_a_strangers_binary_output_is_readable_and_bounded(tmp_path: Path) -> None:
    captured = run(
        tmp_path, "sys.stdout.buffer.write(os.urandom(300_000)); sys.stdout.buffer.write(b'\\nafter\\n')"
    )
    assert captured.code == 0
    assert captured.texts[-1] == "after"
    assert all(re.sub(r"[\n\t]", "", text).isprintable() for text in captured.texts)


def test_no_planted_secret_reaches_the_disk(tmp_path: Path) -> None:
    planted = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIxK7MDENGbPxRfiCYEXAMPLEKEY",
        "PHALANX_RUN_TOKEN": "0123456789abcdef" * 4,
        "SOME_PASSWORD": "tr0ub4dor&3",
    }
    (tmp_path / "fleet.operator-token").write_text("feedface" * 8)
    captured = run(
        tmp_path,
        """
secrets = [os.environ[n] for n in ("AWS_SECRET_ACCESS_KEY", "PHALANX_RUN_TOKEN", "SOME_PASSWORD")]
secrets += ["feedface" * 8, "s3://user:planted-in-a-url@bucket/x"]
import logging
for secret in secrets:
    print("py", secret)
    logging.warning("log %s", secret)
    os.write(1, f"fd {secret}\\n".encode())
    for c in f"piecewise {secret}\\n": os.write(2, c.encode())
raise ValueError(" ".join(secrets))
""",
        environment=planted,
    )
    assert len(captured.lines) == 21
    everything = captured.everything().decode()
    for secret in (*planted.values(), "feedface" * 8, "planted-in-a-url"):
        assert secret not in everything
    assert everything.count("***") >= 25


def test_a_full_disk_costs_lines_and_no_error_in_the_process(tmp_path: Path) -> None:
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    captured = run(
        tmp_path,
        limited
        + "for n in range(5_000): print('line', n); sys.stderr.write('and this\\n')\nprint('goes on', flush=True); os._exit(7)",
    )
    assert captured.code == 7
    assert 0 < captured.order.path.stat().st_size <= 20_000
    warned = [text for text in captured.texts if "cannot be written" in text]
    assert len(warned) == 1, "by the parent, whose disk is not full"


def test_a_full_disk_is_reported_to_the_parent_once_and_never_to_the_child(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("attempt-002-rank-00003.jsonl", "attempt-002-rank-00003.out.jsonl"):
        (tmp_path / "logs" / name).symlink_to("/dev/full")
    captured = run(tmp_path, "for n in range(1000): print(n); os.write(1, b'x' * 999 + b'\\n')\nos._exit(3)")
    assert captured.code == 3
    assert len(captured.messages) == 1
    assert "No space left on device" in captured.messages[0]


def test_a_forked_child_does_not_write_into_the_log_of_its_parent(tmp_path: Path) -> None:
    captured = run(
        tmp_path,
        "print('before')\nif os.fork() == 0: print('in the child'); os._exit(0)\nos.wait(); print('after')",
        bounds=Bounds(1 << 20, 2),
    )
    assert set(captured.texts) == {"before", "in the child", "after"}
    assert "in the child" in captured.order.raw.read_text()


def test_a_program_that_a_process_has_started_may_outlive_it_and_still_write(tmp_path: Path) -> None:
    ended, done = tmp_path / "ended", tmp_path / "done"
    helper = f"while ! test -e {ended}; do sleep 0.05; done; echo late; echo $? > {done}"
    captured = run(tmp_path, f"import subprocess; subprocess.Popen(['sh', '-c', {helper!r}]); print('ends')")
    assert captured.texts == ["ends"]
    ended.touch()
    while not done.exists():
        time.sleep(0.02)
    assert done.read_text() == "0\n"
    while "late" not in [line.text for line in last_lines(captured.order.path, 99)]:
        time.sleep(0.02)


def test_programs_that_a_process_starts_do_not_inherit_the_variables_of_its_log(tmp_path: Path) -> None:
    captured = run(tmp_path, "os.system('env')", environment={"PHALANX_LOG_X": "y"})
    assert [text for text in captured.texts if text.startswith("PHALANX_LOG")] == ["PHALANX_LOG_X=y"]


def test_a_stopped_parent_does_not_delay_what_is_printed_in_python(tmp_path: Path) -> None:
    order = LogOrder(tmp_path / "logs" / "attempt-000-a.jsonl", "a", 0)
    program = f"""
import os, subprocess, sys
from observe.logs.captured import CAUGHT
from pathlib import Path
from phalanx.observe.logs.child_output import ChildOutput
from phalanx.observe.logs.log_file import LogOrder
output = ChildOutput(LogOrder(Path({str(order.path)!r}), "a", 0), {{}})
child = subprocess.Popen([sys.executable, "-c", CAUGHT + "for n in range(20_000): print('x' * 99)\\nopen('done', 'w')"],
    env={{**os.environ, **output.environment}}, stdout=output.descriptor, stderr=2, pass_fds=output.inherited)
output.started()
os.kill(os.getpid(), 19)
"""
    (tmp_path / "logs").mkdir()
    tests = str(Path(__file__).parents[2])
    path = os.pathsep.join([tests, *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        deadline_s = time.monotonic() + 120
        while not (tmp_path / "done").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


def test_a_child_that_cannot_be_started_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    before = open_pipes_and_files_below(tmp_path)
    started = [ChildOutput(LogOrder(tmp_path / "logs" / "a.jsonl", "a", 0), {}) for _ in range(3)]
    assert open_pipes_and_files_below(tmp_path) - before
    for output in started:
        output.failed()
    assert open_pipes_and_files_below(tmp_path) - before == set()


def test_the_last_words_after_a_flood_without_newlines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    order = LogOrder(tmp_path / "logs" / "a.jsonl", "a", 0)
    output = ChildOutput(order, {})
    for _ in range(64):
        output._take(b"y" * (1 << 18))  # through a pipe it would be chance which piece is thrown away
    output._take(b"y" * (4 << 20) + b"\nlast words")
    output._settle()
    output.failed()
    assert last_lines(order.path, 10)[-1].text == "last words"
