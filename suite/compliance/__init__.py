"""Judging logs and packages: rules are small pure functions and data. Nothing in a checked file is executed."""
