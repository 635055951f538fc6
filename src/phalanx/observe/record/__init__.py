"""Records of a run: code, packages, hosts, and notes that its processes leave in the run directory."""
