"""``phalanx ui``: a page over run directories, its answers as JSON, and the same in one file that needs no server."""
