"""Models of a gradient's magnitudes: fits, tests, tails, compressibility. Import from the modules: SciPy loads late."""
