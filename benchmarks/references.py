"""Clones of public reference codes, which a person puts beside the project."""

from __future__ import annotations

import os
from pathlib import Path

REFERENCES = "MLHPC_REFERENCES"  # environment variable: a folder of clones, each named owner+name or name


def find_clone(repository: str) -> Path | None:
    """The clone of ``owner/name``, or None if there is none or no folder is named."""
    folder = os.environ.get(REFERENCES)
    owner, name = repository.split("/")
    names = (f"{owner}+{name}", name) if folder else ()
    return next((path for each in names if (path := Path(str(folder), each)).is_dir()), None)
