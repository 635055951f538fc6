"""Diagnosis of a run: what is wrong, since when, the evidence, the automatic response, and the user's next step."""
