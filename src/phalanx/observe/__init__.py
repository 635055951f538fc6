"""Observability: one event stream of a run, and views that are functions of it.

Begin with ``events`` (the event types) and ``event_log`` (their file). Drawn from it: ``display/`` (the terminal panel, the
fold over events that it shows, the loss curve), ``goodput`` over all attempts, and ``sinks`` for outside trackers.
``rank_stream`` is the second file of a run: what every rank measured of itself, over time; ``rank_file`` is its format.
``ledger`` accounts for a rank's every nanosecond, ``record/`` for the code, packages and hosts it ran on, ``throughput`` for
speed.
"""
