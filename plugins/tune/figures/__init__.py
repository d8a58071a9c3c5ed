"""The figures of a report that searches and contests add."""

FIGURES = ("tuning", "contests")
