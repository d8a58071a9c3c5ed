"""The report as a page: its questions, tables, figures as SVG, and doubts in words."""
