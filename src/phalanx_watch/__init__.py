"""What people and their tools look at of a run: the page, curves, comparisons, logs, profiles, and what is wrong with it."""
