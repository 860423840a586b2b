"""Compiled loops over one contiguous float32 block, without Python's interpreter lock.

NumPy on cache-sized chunks makes one sweep of the cache and one temporary per operation; these loops make one sweep in
all (`docs/measurements.md` has both). A loop is compiled when it is first called, and its code is kept on disk, see
:mod:`gradstats.primitives.loops.compiled`. Above each stands the same in NumPy.
"""
