"""Forgeries of a package, generated from what it holds."""
