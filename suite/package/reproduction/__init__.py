"""Judges by levels whether the result of a package can be reproduced, and names the likeliest cause of a difference."""
