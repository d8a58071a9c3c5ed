"""How an error is said to a person: one line with the place and the reason."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """The message of an error: of an OSError the file and the reason, without Python's error number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
