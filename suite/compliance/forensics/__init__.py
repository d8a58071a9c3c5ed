"""Looks for logs and results that were edited, copied or made up. MLCommons' checkers do not look for these."""
