"""The figure of numerics: what changes of system and deployment do, and epochs by framework."""

FIGURES = ("numerics",)
