"""A real worker that can unpickle nothing: any attempt ends its epoch with an error."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed import distributed_c10d

from phalanx.fleet.node.rank import worker  # noqa: F401 - it is imported before pickle is taken away
from phalanx.fleet.node.rank.worker_main import main as serve


class PickleRefusedError(RuntimeError):
    """Something was about to be unpickled."""


def refuse(*_: Any, **__: Any) -> Any:
    raise PickleRefusedError("this process was about to unpickle what another one had sent")


class RefusingUnpickler:
    """A class, since libraries that are imported later derive from ``pickle.Unpickler``."""

    __init__ = load = refuse


def main() -> None:
    """The process of a worker."""
    for name in ("load", "loads"):
        setattr(pickle, name, refuse)
    for name in ("Unpickler", "_Unpickler"):
        setattr(pickle, name, RefusingUnpickler)
    distributed_c10d._unpickler = refuse  # type: ignore[attr-defined]
    torch.load = refuse
    serve()


if __name__ == "__main__":
    main()
