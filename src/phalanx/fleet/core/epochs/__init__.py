"""The life of an epoch: forming, planning, seating, faults and deadlines, progress, and the end of the run."""
