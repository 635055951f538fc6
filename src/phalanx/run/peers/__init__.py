"""What the processes of one run check of each other: that they belong to it, know its token, and agree on the time."""
