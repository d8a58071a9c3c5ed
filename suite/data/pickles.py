"""Reads pickles of strangers. A pickle is a program: it names functions, calls them and changes what it gets.

Python's own unpickler in C also fills memory up to any number that a pickle names, so this one is Python's other one.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, ClassVar

# Nothing of these is in plain data: names of a registry, objects of somebody else, old classes, buffers of any length
REFUSED = (
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.BINPERSID, pickle.INST, pickle.OBJ),
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)


class PlainUnpickler(pickle._Unpickler):
    """Unpickles numbers, texts, bytes and containers. pickle.UnpicklingError for a name, call or change of state."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    CHANGED: ClassVar[tuple[type, ...]] = ()  # the classes whose objects are given a state
    stack: list[Any]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        """Refuse a name: importing one is enough to run a program."""
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code: refused")

    def load_build(self) -> None:
        """Give an object its state. A class or a function would be changed for the whole program."""
        changed = self.stack[-2] if len(self.stack) > 1 else None
        if type(changed) not in self.CHANGED:
            raise pickle.UnpicklingError(f"it changes a {type(changed).__name__}: refused")
        super().load_build()  # type: ignore[misc]  # typeshed knows the one in C

    def refuse(self) -> None:
        """Refuse an operation that plain data do not need."""
        raise pickle.UnpicklingError("it has an operation that data do not need: refused")

    dispatch[pickle.BUILD[0]] = load_build
    dispatch.update(dict.fromkeys((each[0] for each in REFUSED), refuse))


def explain_damage(error: Exception) -> str:
    """Explain in one line why a pickle cannot be read: damaged ones raise any exception, some without a word."""
    said = str(error).splitlines()[:1]
    return said[0] if said and isinstance(error, pickle.UnpicklingError) else ": ".join([type(error).__name__, *said])
