"""Wings: parts that a reader of the core need not pass. The core imports none; it finds them by entry points.

Each lies in a folder of its own, and its ``__init__`` lists in USES the modules of the core that it imports. Without
the folder and its entry points the core works: help and report say which wing is missing.
"""
