"""Arithmetic of differences, spread and scaling. Numbers in, numbers out."""
