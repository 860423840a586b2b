"""Models of a gradient's magnitudes: fits, tests, tails, compressibility.

Import from the modules. Nothing is imported here, so that SciPy loads only where it is used.
"""
