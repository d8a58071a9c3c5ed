"""Judges by levels whether a package's result can be reproduced, and names the likeliest cause of a difference."""
