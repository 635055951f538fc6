"""The run directory: its names, its result and its lineage, and how a file is written so that a power cut tears nothing."""
