"""A small cluster on one machine: every rank has a network namespace of its own, joined by links of a given rate."""
