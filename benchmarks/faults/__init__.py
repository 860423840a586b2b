"""The parts of ``benchmarks/campaign.py``: trials that break something on purpose, and look at what is left.

A trial is a function of its number, which seeds it, and an empty folder. It returns in a word or two what happened,
such as ``"refused"``; what must not happen is an exception, which the campaign counts as a fault.
"""
