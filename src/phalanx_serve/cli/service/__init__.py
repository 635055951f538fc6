"""``phalanx serve`` behind its command line: the rules between its options, and the start of the service."""
