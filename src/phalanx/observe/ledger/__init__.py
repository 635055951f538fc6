"""Where the time of a run went: the ledger, goodput, and the cost of each recovery."""
