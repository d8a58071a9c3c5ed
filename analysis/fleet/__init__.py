"""The nodes of a machine: what was measured of each, which of them is slow and how sure that is."""
