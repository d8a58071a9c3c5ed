"""Reads what this node states in /proc, /sys, /etc and through vendors' tools. Each probe takes the root folder.

`collect` runs them all and returns `Facts`; every other module reads one resource.
"""
