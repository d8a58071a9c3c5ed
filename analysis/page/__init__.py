"""Renders the report as a page: its questions, tables, charts, and doubts in words."""
