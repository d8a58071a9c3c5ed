"""Finds the fastest setting of a space of settings for this machine (`mlhpc tune`)."""
