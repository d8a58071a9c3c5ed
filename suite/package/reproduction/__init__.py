"""Judges whether the result of a package can be reproduced: levels, what was compared, the first cause of a difference."""
