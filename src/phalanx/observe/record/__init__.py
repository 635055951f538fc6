"""The record of what a run was made with: code, packages, machines."""
