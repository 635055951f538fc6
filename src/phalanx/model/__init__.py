"""The transformer, its presets and its counts. All code here runs in one process."""
