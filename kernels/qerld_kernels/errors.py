"""What can be wrong with a model that a user points at."""


class CheckpointError(ValueError):
    """A model folder cannot be read, is broken, or holds something that this package does not serve."""


class UnsupportedArchitectureError(CheckpointError):
    """The model's architecture has no row in `architectures.ARCHITECTURES`."""


class QuantizationError(ValueError):
    """Weights or an output folder that cannot be quantised (non-finite weights, odd shapes, a folder in use)."""
