"""Checkpoints: sets of boxes, the tiers that store them, and the plan that restores them.

A checkpoint is a set of *boxes* (``format/boxes.py``): rectangular parts of named tensors. A *tier* (``tiers/tier.py``) is a storage
back end, such as a disk (``tiers/disk.py``). A save copies a rank's boxes once into a reusable image (``save/staging.py``,
``format/image.py``), which a background thread writes (``save/saver.py``). A restore is a pure plan over boxes
(``format/boxes.py``, ``committed/restore.py``), so it may use another layout than the save. *Snapshots* (``snapshot/``) are
the same images in memory that outlives the worker. They are pushed to a buddy and read over a data port. ``interop/`` reads and writes
other software's formats.

This module imports nothing: ``format/`` (except ``shards``), the tiers and the agent's side of snapshots work without torch, and
importing the package must not load it.
"""
