"""Seeing what a run does: one event stream, and views that are functions of it.

Begin with ``events`` (what is said) and ``event_log`` (the file it is said in). From it are drawn the
display (``display_state``, ``display``), the loss curve (``curve``), goodput over all attempts
(``goodput``) and what outside trackers get (``sinks``). ``ledger`` accounts for a rank's every
nanosecond, ``records`` for the code, packages and host it ran on, ``throughput`` for speed.
"""
