"""Reads what the processes of a run have said: merged in time, filtered, grouped, followed; the failure that came first."""
