"""What is wrong with a run, since when, by which evidence, what is being done about it, and what its user should do."""
