"""Kinds of layers that a run file can describe: one file each, with the facts about a layer that need no module.

A kind's file has its rules, its parameters, its operations, its decode cache and its miniature. The module is in ``phalanx.model.layers``. The
files are in this package because a run file's rules are applied when it is read.
"""
