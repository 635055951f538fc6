"""The expert axis: experts divided over ranks, tokens sent to them by all-to-all."""
