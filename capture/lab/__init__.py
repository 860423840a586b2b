"""A small cluster on one machine: ranks in network namespaces of their own, joined by links of a given rate."""
