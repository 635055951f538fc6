"""``phalanx data``: datasets prepared, copied, checked, and looked into."""
