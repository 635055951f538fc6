"""Facts that the processes of one run compare: the start they belong to, their clocks, and addresses of one machine."""
