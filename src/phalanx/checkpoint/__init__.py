"""Checkpoints: sets of boxes, the places that hold them, and the plan that brings them back.

A checkpoint is a set of *boxes* (`boxes.py`): rectangular parts of named tensors. A *tier* (`tier.py`) is a place
where boxes are: a disk (`disk.py`), memory (`memory.py`). Saving copies a rank's boxes once into a reusable image
(`staging.py`, `layout.py`) that a background thread writes (`saver.py`). Restoring is a pure plan over boxes
(`plan.py`, `restore.py`), so the layout that saved need not be the layout that loads. *Snapshots* (`snapshot_memory.py`)
are the same images in memory that outlives the worker, pushed to a buddy and read back over a data port.

Nothing is imported here: `boxes`, `plan`, `layout`, `manifest`, `blocks`, `tier`, `memory`, `disk`, `retention`,
`verify`, `digest` and the agent's side of snapshots (`snapshot_memory`, `snapshot_server`, `snapshot_client`) do without
torch, and importing the package must not bring it in.
"""
