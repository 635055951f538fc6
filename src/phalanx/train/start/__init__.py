"""Preparation of a run before its ranks start: directory, data and checks; child runs and imported models. Nothing here needs torch."""
