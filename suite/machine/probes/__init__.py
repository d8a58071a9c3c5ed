"""Probes: what this node says of itself in /proc, /sys and /etc and through vendors' tools. Each takes the file-system root.

`collect` runs them all and returns `Facts`; every other module reads one resource.
"""
