"""The workload: operations, stages, parameters per rank and software stack, for arrays of candidate layouts."""
