"""Child processes: started, given a log, signaled, waited for, restarted and ended; and calls in daemon threads."""
