"""Processes of a fleet on one machine: started in sessions of their own, looked after, ended."""
