"""The version of this package, at the bottom, so that every room may import it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
