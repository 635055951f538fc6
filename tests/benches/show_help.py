"""Calls the ``main`` of benches with ``--help`` in one process: ``show_help.py NAME ...``; ends with an error at the first without it."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    text, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(text):
            importlib.import_module(f"bench.{name}").main()
    except SystemExit as end:
        code = end.code
    assert "usage: " in text.getvalue(), name
    assert code == 0, name
