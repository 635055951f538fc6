"""Child processes: started with arguments and a log, signaled, waited for, restarted and ended; calls in daemon threads; lock files."""
