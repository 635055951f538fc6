"""The most memory that a piece of Python takes, measured in a process of its own.

``tracemalloc`` counts what all threads of a process allocate: in the process of the tests, a thread that an earlier test has left would be
counted too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import forked_python

_PROGRAM = """
import json, tracemalloc
{before}
tracemalloc.start()
{measured}
print(json.dumps([tracemalloc.get_traced_memory()[1], found]))
"""


def peak_and_found(folder: Path, before: str, measured: str) -> tuple[int, Any]:
    """Runs ``before``, then ``measured``, which sets ``found``: the peak of ``measured`` in bytes, and what it found, as JSON carries it."""
    script = folder / "measured.py"
    parts = {name: textwrap.dedent(text) for name, text in (("before", before), ("measured", measured))}
    script.write_text(_PROGRAM.format(**parts))
    process = forked_python.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate()
    assert process.returncode == 0
    peak, found = json.loads(output)
    return peak, found
