"""Validation of the planner against published training runs: rows, their set-up, errors, factors and the accuracy document.

Run from the repository's root as ``python -m validation``. It stands beside ``bench/`` and is not part of the installed package:
nothing in ``phalanx`` imports it.
"""
