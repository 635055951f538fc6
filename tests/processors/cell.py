"""pytest in a process with a given number of PyTorch's threads, more than there are processors too: ``python cell.py THREADS PYTEST_ARGUMENTS``.

PyTorch takes ``OMP_NUM_THREADS`` only up to the number of processors, so the number is set before anything is computed.
"""

from __future__ import annotations

import sys

import pytest
import torch

if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.exit(pytest.main(sys.argv[2:]))
