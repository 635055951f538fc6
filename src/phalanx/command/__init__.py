"""Commands as typed fields: a dataclass describes a command's arguments and options."""
