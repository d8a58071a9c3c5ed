"""The one class of errors that are the user's to mend."""

from __future__ import annotations


class InputError(ValueError):
    """A file, a value or a setting from outside is at fault: one line that says where, what was found and what was expected.

    `suite.cli` prints it and ends with exit code 2. Every other exception, a ValueError of Python, NumPy or PyTorch among
    them, is a defect of mlhpc itself (`suite.cli.DEFECT`): code that reads what a user wrote turns such errors into this
    class where it knows the place.
    """
