"""The version of this package, without what it takes to import the package itself."""

__all__ = ["__version__"]

__version__ = "0.1.0"
