"""Pages of keys and values between workers over NIXL: a process beside each worker holds the agent, and reads what another one's offers."""
