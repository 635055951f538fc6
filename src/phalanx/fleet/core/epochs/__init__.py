"""The life of an epoch, each phase of a recovery in a file: formed and left, planned, seated, lost nodes, deadlines, blame, the end."""
