"""What a run needs before its ranks start: a directory, data and checks; child runs and imported models. Nothing here needs torch."""
