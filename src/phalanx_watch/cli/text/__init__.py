"""Text that commands print of a run: tables, maps and verdicts, as functions of values."""
