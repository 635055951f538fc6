"""The context axis: each sequence divided over ranks, with ring or all-gather attention."""
