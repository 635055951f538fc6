"""Checkpoints: sets of boxes, the places that hold them, and the plan that brings them back.

A checkpoint is a set of *boxes* (``format/boxes.py``): rectangular parts of named tensors. A *tier* (``tiers/tier.py``) is a
place where boxes are, such as a disk (``tiers/disk.py``). Saving copies a rank's boxes once into a reusable image
(``save/staging.py``, ``format/image.py``) that a background thread writes (``save/saver.py``). Restoring is a pure plan over
boxes (``format/restore_plan.py``, ``committed/restore.py``), so the layout that saved need not be the layout that loads.
*Snapshots* (``snapshot/``) are the same images in memory that outlives the worker, pushed to a buddy and read back over a
data port. ``interop/`` reads and writes other software's formats.

Nothing is imported here: ``format/`` (but for ``shards``), the tiers and the agent's side of snapshots do without torch, and
importing the package must not bring it in.
"""
