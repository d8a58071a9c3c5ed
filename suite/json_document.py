"""Reading a versioned JSON document into its model, with one clear line for whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)
LONGEST = 60  # characters of a wrong value that are shown


def read_json_document(path: Path, model: type[Model], kind: str, version: int) -> Model:
    """The document in a file. ValueError says file, what was wanted (``kind`` names it, as "facts") and what was found."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(data, dict) or data.get("version") != version:
        found = repr(data.get("version")) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: expected {kind} of version {version}, found {found}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f" = {_brief(first['input'])}"
        raise ValueError(f"{path}: {where}{value}: {first['msg']}") from None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
