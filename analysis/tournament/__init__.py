"""Tournaments: entries with equal budgets run in paired blocks until all but one are dropped, or nobody can tell."""
