"""Coefficients of the elementary functions in C, and the check of all 2^32 inputs."""
