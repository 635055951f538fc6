"""Kinds of layers that a run file can describe: one file each, with all that is known of a layer without building it.

A kind's file has its legality, its parameters, its operations, its decode cache and its miniature; the module is in
``phalanx.model.layers``. The files stand on the ground floor because a run file's rules are applied when it is read.
"""
