"""One replica of a model under torchft, for ``bench.fleet.recovery``: the loop of torchft's own DDP example.

Run by an interpreter that has torchft 0.2 and PyTorch (with this repository's ``src`` in ``PYTHONPATH``, for the same
model). Each replica is a process of its own, as in the example (train_ddp.py of github.com/pytorch/torchft); all meet at the
lighthouse whose address is in ``TORCHFT_LIGHTHOUSE``. For each step that was committed it prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from phalanx.model.transformer import Transformer
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec


def main() -> None:
    """Train on random tokens until it is killed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--model", type=json.loads, required=True, help="fields of the model, as JSON")
    parser.add_argument("--sequences", type=int, required=True, help="of this replica, each step")
    parser.add_argument("--seq-len", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    spec = resolve(ModelSpec(**arguments.model), arguments.model["vocab_size"])
    model = Transformer(spec)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=2,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{arguments.replica}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    # The example's own wrapper ends the survivors too: an assertion in its hook (torchft 0.2, PyTorch 2.13).
    parallel = PureDistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(parallel.parameters(), lr=1e-3))
    shape = (arguments.sequences, arguments.seq_len + 1)
    while True:
        before, begin_s = manager.current_step(), time.monotonic()
        optimizer.zero_grad()
        tokens = torch.randint(0, spec.vocab_size, shape)
        scores = parallel(tokens[:, :-1])
        F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        if manager.current_step() > before:
            line = {"t": time.time(), "step": manager.current_step(), "step_s": time.monotonic() - begin_s}
            print(json.dumps(line | {"replicas": manager.num_participants()}), flush=True)


if __name__ == "__main__":
    main()
