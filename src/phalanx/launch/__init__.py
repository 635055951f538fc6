"""Where a run's ranks are started."""
