"""A port that another server has is told before anything is imported that takes long, let alone read."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from serve.packed_runs import DENSE, make_run


def test_a_port_that_is_taken_is_refused_before_pytorch_is_imported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", DENSE)
    program = (
        "import sys\n"
        "from phalanx.cli.main import exit_code\n"
        "code = exit_code(sys.argv[1:])\n"
        "print(code, 'torch' in sys.modules)"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["serve", str(run), "--port", port]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.stderr == (
        f"Error: cannot listen at 127.0.0.1, port {port}: Address already in use; give another --port, or 0 for any\n"
    )
    assert done.stdout == "1 False\n"
