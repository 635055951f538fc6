"""The one error of this package."""


class HardwareError(ValueError):
    """A name, file or value of hardware that cannot be used; the message names the field and the remedy."""
