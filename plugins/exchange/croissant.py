"""Renders croissant.json: a data set as Croissant 1.1 (MLCommons), from its manifest and headers of a few shards.

The checksums are those of the manifest: no data are read. http://mlcommons.org/croissant/1.1
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlhpc.suite.data.manifest import Manifest, ShardEntry
from mlhpc.suite.data.shards import OFFSETS, Column, build_offsets_name, map_columns
from mlhpc.suite.errors import InputError

_HDF5 = "application/x-hdf5"
_KINDS = {"b": "sc:Boolean", "f": "cr:Float{}", "i": "cr:Int{}", "u": "cr:UInt{}"}
# Not mlcroissant: it installs 343 MiB in 27 distributions, pandas and rdflib among them (1.1.1), for this one document.
# tests/reference/test_tools.py reads ours with it.
# The terms of Croissant's own vocabulary
_TERMS = (
    *("arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field", "fileObject"),
    *("fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5"),
    *("parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate"),
    *("separator", "source", "subField", "transform"),
)
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    **{term: f"cr:{term}" for term in _TERMS},
}


def render_croissant(root: Path, manifest: Manifest, about: str) -> str:
    """Render the description of a data set; ``about`` is a sentence on the data.

    Unknown fields (licence, date, citation) are left out. InputError if the first shard of a split is missing or
    damaged.
    """
    recipe = manifest.generator
    name, version = recipe.get("name", "of its workload"), recipe.get("version")
    document = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": f"{manifest.workload}-{manifest.size}",
        "description": f"{about} Made by the recipe {name!r} with seed {manifest.seed}; "
        f"{manifest.bytes} bytes in {len(manifest.shards)} shards (HDF5), "
        "listed with their checksums in manifest.json.",
        "identifier": f"sha256:{manifest.sha256}",
        # Croissant asks for three numbers (semantic versioning).
        "version": f"{version}.0.0" if isinstance(version, int) else "1.0.0",
        "distribution": [item for split in manifest.splits for item in _describe_files(split, manifest.splits[split])],
        "recordSet": [_describe_records(root, split, entries) for split, entries in manifest.splits.items() if entries],
    }
    return json.dumps(document, indent=1) + "\n"


def _describe_files(split: str, entries: tuple[ShardEntry, ...]) -> Iterator[dict[str, Any]]:
    """Yield each shard with its checksum, then all shards of the split as one set."""
    for entry in entries:
        yield {
            "@type": "cr:FileObject",
            "@id": quote(entry.file),
            "name": entry.file,
            "contentUrl": quote(entry.file),
            "contentSize": f"{entry.bytes} B",
            "encodingFormat": _HDF5,
            "sha256": entry.sha256,
        }
    yield {
        "@type": "cr:FileSet",
        "@id": _build_set_id(split),
        "name": f"shards of {split}",
        "encodingFormat": _HDF5,
        "includes": sorted({f"{entry.file.rpartition('/')[0]}/*.h5".lstrip("/") for entry in entries}),
    }


def _build_set_id(split: str) -> str:
    return f"{quote(split)}-shards"


def _describe_records(root: Path, split: str, entries: tuple[ShardEntry, ...]) -> dict[str, Any]:
    path = root / entries[0].file  # all shards of a split have the same datasets
    columns = {name: column for name, column in map_columns(path).items() if not name.endswith(OFFSETS)}
    samples = sum(entry.samples for entry in entries)
    return {
        "@type": "cr:RecordSet",
        "@id": quote(split),
        "name": split,
        "description": f"The {samples} samples of the split {split}, in order of the shards.",
        "field": [_describe_field(path, split, name, column) for name, column in columns.items()],
    }


def _describe_field(path: Path, split: str, name: str, column: Column) -> dict[str, Any]:
    """Describe one dataset of the shards. Samples of a ragged one differ in their number of rows: -1."""
    dtype = column.dtype
    # Croissant's numeric types end at 64 bits.
    if dtype.kind not in _KINDS or dtype.itemsize > 8:
        raise InputError(
            f"{path}: dataset {name!r} has type {dtype}; "
            "Croissant describes only booleans, integers and floats of up to 64 bits"
        )
    shape = (*((-1,) if column.ragged else ()), *column.shape)
    rows = f"; the rows of a sample are told by dataset {build_offsets_name(name)}" if column.ragged else ""
    field: dict[str, Any] = {
        "@type": "cr:Field",
        "@id": f"{quote(split)}/{quote(name)}",
        "name": name,
        "description": f"Dataset {name} of the shards{rows}.",
        "dataType": _KINDS[dtype.kind].format(8 * dtype.itemsize),
        "source": {"fileSet": {"@id": _build_set_id(split)}, "extract": {"column": name}},
    }
    if shape:
        field |= {"isArray": True, "arrayShape": ",".join(map(str, shape))}
    return field
