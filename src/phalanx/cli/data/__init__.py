"""``phalanx data``: prepares, copies, checks and inspects datasets."""
