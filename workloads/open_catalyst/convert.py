"""Converts the public OC20 data (LMDB files or extended XYZ) to shards. Downloads nothing.

Reads the public OC20 download: extended XYZ, compressed with xz, and a text file with one line per frame.

    80
    Lattice="..." Properties=species:S:1:pos:R:3:move_mask:L:1:tags:I:1:forces:R:3 energy=-1.0 pbc="T T T"
    Cu 0.0 0.0 0.0 0 0 0.1 0.2 0.3
    ...

The header may have ``free_energy`` in place of ``energy``. A line of the text file is ``random123,frame7,-301.5``:
system, frame, reference energy to subtract.

Reads the reference's LMDB files of pickled torch_geometric ``Data``, without torch_geometric.

Keys are b"0", b"1", ... and b"length"; values are pickles. A pickle can call any function by name, so loading one runs
a program. Reading one here runs none. The unpickler builds tensors, arrays and containers. For any class of
torch_geometric it builds a record without behaviour. It rejects every other name.

Computes a data set's manifest attributes (graph sizes, force and energy scales) from a summary of each shard.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import pickle
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mlhpc.suite.data.build import SPLITS, Arrays, DataSetPlan, Progress, ShardPlan, build_data_set, check_disjoint
from mlhpc.suite.data.pickles import PlainUnpickler, explain_damage
from mlhpc.suite.errors import InputError, explain_not_installed
from mlhpc.suite.world import World
from mlhpc.workloads.open_catalyst.structures import Neighbourhood, Structure, build_shard_arrays

# X stands at 0, so that the position of a symbol is its atomic number
SYMBOLS = re.findall(
    "[A-Z][a-z]?",
    "XHHeLiBeBCNOFNeNaMgAlSiPSClArKCaScTiVCrMnFeCoNiCuZnGaGeAsSeBrKrRbSrYZrNbMoTcRuRhPdAgCdInSnSbTeIXeCsBaLaCePrNdPm"
    "SmEuGdTbDyHoErTmYbLuHfTaWReOsIrPtAuHgTlPbBiPoAtRnFrRaAcThPaUNpPu",
)
NUMBER_OF = {symbol: number for number, symbol in enumerate(SYMBOLS)}
SUFFIXES = (".extxyz", ".extxyz.xz", ".extxyz.gz")

# key=value, where a value with spaces is in quotes of either kind
_KEY = re.compile(r"""([^\s=]+)=(?:"([^"]*)"|'([^']*)'|(\S+))""")
_OPEN: dict[str, Callable[..., IO[str]]] = {".xz": lzma.open, ".gz": gzip.open, ".extxyz": open}


def read_extxyz(path: Path, *, trajectory: int) -> Iterator[Structure]:
    """Read the frames of one file. ``trajectory`` is their trajectory number if there is no text file.

    InputError names file and frame.
    """
    labels = _labels(path)
    try:
        with _OPEN[path.suffix](path, "rt", encoding="utf-8") as file:
            for index, (header, lines) in enumerate(_frames(path, file)):
                if labels is None:
                    # without a text file there is no reference energy to subtract
                    label = (trajectory, index, 0.0)
                elif index < len(labels):
                    label = labels[index]
                else:
                    raise InputError(f"{path}: structure {index}: the text file has {len(labels)} lines only")
                try:
                    yield _structure(header, lines, *label)
                except (KeyError, ValueError, IndexError) as error:
                    text = f"no {error}" if isinstance(error, KeyError) else str(error)
                    raise InputError(f"{path}: structure {index}: {text}") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _frames(path: Path, file: IO[str]) -> Iterator[tuple[str, list[str]]]:
    index = 0
    while line := file.readline():
        if not line.strip():
            continue
        if not line.strip().isdigit():
            raise InputError(f"{path}: structure {index}: expected a number of atoms, found {line.strip()[:60]!r}")
        atoms = int(line)
        header = file.readline()
        lines = [file.readline() for _ in range(atoms)]
        # readline returns an empty text only at the end of the file
        if lines and not lines[-1]:
            raise InputError(f"{path}: structure {index}: the file ends inside it")
        yield header, lines
        index += 1


def _structure(header: str, lines: list[str], trajectory: int, frame: int, reference: float) -> Structure:
    # one of the three groups has matched; the others are empty
    facts = {
        key: next(value for value in values if value or values[-1] == value) for key, *values in _KEY.findall(header)
    }
    columns = _columns(facts["Properties"], lines)
    cell = np.array(facts["Lattice"].split(), dtype=np.float64).reshape(3, 3)
    species = columns["species"][:, 0].tolist()
    unknown = [symbol for symbol in species if symbol not in NUMBER_OF]
    if unknown:
        raise InputError(f"unknown element {unknown[0]!r}")
    atoms = len(species)
    energy = facts["energy"] if "energy" in facts else facts["free_energy"]
    movable = columns.get("move_mask")
    return Structure(
        position=columns["pos"].astype(np.float64),
        cell=cell,
        number=np.array([NUMBER_OF[symbol] for symbol in species], dtype=np.int64),
        tag=columns["tags"][:, 0].astype(np.int64) if "tags" in columns else np.zeros(atoms, dtype=np.int64),
        # writers differ: a letter, a number or a word
        fixed=np.zeros(atoms, bool) if movable is None else np.isin(movable[:, 0], ("F", "0", "False")),
        force=columns["forces"].astype(np.float64),
        energy=float(energy) - reference,
        trajectory=trajectory,
        frame=frame,
    )


def _columns(properties: str, lines: list[str]) -> dict[str, NDArray[Any]]:
    """Split text columns by name, as ``name:kind:count:...`` describes them."""
    parts = properties.split(":")
    if len(parts) % 3:
        raise InputError(f"Properties {properties!r} are not name:kind:count triples")
    table = [line.split() for line in lines]
    width = sum(int(count) for count in parts[2::3])
    for place, row in enumerate(table):
        if len(row) != width:
            raise InputError(f"atom {place} has {len(row)} columns, Properties say {width}")
    values = np.array(table, dtype=str).reshape(len(table), width)
    columns, begin = {}, 0
    for name, count in zip(parts[::3], map(int, parts[2::3]), strict=True):
        columns[name] = values[:, begin : begin + count]
        begin += count
    return columns


def _labels(path: Path) -> list[tuple[int, int, float]] | None:
    """Read (system, frame, reference energy) per frame from the text file next to ``path``.

    None without such a file.
    """
    stem = path.name.partition(".extxyz")[0]
    for suffix in (".txt", ".txt.xz", ".txt.gz"):
        beside = path.with_name(stem + suffix)
        if beside.exists():
            break
    else:
        return None
    opener = open if suffix == ".txt" else _OPEN[beside.suffix]
    labels = []
    with opener(beside, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            match = re.fullmatch(r"\D*(\d+),\D*(\d+),(\S+)", line.strip())
            try:
                assert match is not None
                labels.append((int(match[1]), int(match[2]), float(match[3])))
            except (AssertionError, ValueError):
                raise InputError(
                    f"{beside}:{number}: expected system,frame,reference energy, found {line.strip()[:60]!r}"
                ) from None
    return labels


FIELDS = ("pos", "cell", "atomic_numbers", "force", "fixed", "tags", "y")


class LmdbFile:
    """One LMDB file. ``trust_pickles`` uses Python's own unpickler, which runs any code in the file."""

    def __init__(self, path: Path, *, trust_pickles: bool = False) -> None:
        self.path = path
        self._load = pickle.loads if trust_pickles else load_restricted
        with _environment(path) as environment, environment.begin() as transaction:
            length = transaction.get(b"length")
            # a file without a count holds nothing but structures
            entries = int(environment.stat()["entries"])
            self._entries = entries if length is None else self._unpickle(length, "length")
        if not isinstance(self._entries, int) or self._entries < 1:
            raise InputError(f"{path}: holds {self._entries!r} structures, expected one or more")

    def __len__(self) -> int:
        """Return the number of structures."""
        return int(self._entries)

    def structures(self, begin: int, end: int) -> Iterator[Structure]:
        """Read structures ``begin`` to ``end``. InputError names file and index."""
        with _environment(self.path) as environment, environment.begin() as transaction:
            for index in range(begin, end):
                value = transaction.get(str(index).encode())
                if value is None:
                    raise InputError(f"{self.path}: structure {index}: missing")
                yield self._structure(self._unpickle(value, f"structure {index}"), index)

    def _structure(self, data: Any, index: int) -> Structure:
        fields = read_record_fields(data)
        missing = [name for name in FIELDS if fields.get(name) is None]
        if missing:
            listed = ", ".join(sorted(fields)) or "none"
            raise InputError(f"{self.path}: structure {index}: no field {missing[0]!r}; fields: {listed}")
        try:
            values = {name: np.asarray(fields[name]) for name in FIELDS}
            return Structure(
                position=values["pos"].astype(np.float64),
                cell=values["cell"].astype(np.float64).reshape(3, 3),
                number=values["atomic_numbers"].astype(np.int64),  # floats in the public files
                tag=values["tags"].astype(np.int64),
                fixed=values["fixed"] != 0,
                force=values["force"].astype(np.float64),
                energy=float(values["y"]),
                trajectory=_system(fields.get("sid"), index),
                frame=int(fields.get("fid", 0)),
            )
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.path}: structure {index}: {error}") from None

    def _unpickle(self, value: bytes, what: str) -> Any:
        try:
            return self._load(value)
        except Exception as error:  # a damaged pickle can raise any exception
            raise InputError(f"{self.path}: {what}: {explain_damage(error)}") from None


@contextmanager
def _environment(path: Path) -> Iterator[Any]:
    """Open an LMDB file for reading, without its lock: data may be on a read-only file system."""
    try:
        import lmdb
    except ImportError:
        raise InputError(f"open_catalyst: LMDB files cannot be read: {explain_not_installed('lmdb')}") from None
    try:
        environment = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False)
    except lmdb.Error as error:
        raise InputError(f"{path}: not a readable LMDB file: {error}") from None
    with environment:
        yield environment


class Record:
    """Stands for an object of any class. It has the pickled attributes and no behaviour; no class is imported."""

    def __init__(self, *arguments: object) -> None:
        """Take what the class would be called with, such as the value of an enumeration, and forget it."""

    def __setitem__(self, name: str, value: object) -> None:
        """Set a field, as ``Data`` does."""
        self.__dict__[name] = value


def read_record_fields(data: Any) -> dict[str, Any]:
    """Read the fields of a ``Data`` of torch_geometric: attributes before version 2.0, a mapping in its store since."""
    attributes = vars(data) if hasattr(data, "__dict__") else {}
    store = attributes.get("_store")
    mapping = vars(store).get("_mapping") if store is not None and hasattr(store, "__dict__") else None
    fields = mapping if isinstance(mapping, dict) else attributes
    return {str(name): _convert_to_plain(value) for name, value in fields.items() if not str(name).startswith("_")}


def load_restricted(value: bytes) -> Any:
    """Unpickle tensors, arrays, containers and inert records. pickle.UnpicklingError for any other name."""
    return _RestrictedUnpickler(value).load()


class _Dtype:
    """A type of numbers or text. numpy's own takes objects for numbers if a pickle says so."""

    def __init__(self, code: str, *_: object) -> None:
        if not re.fullmatch(r"[biufcSU]\d{1,4}", code):
            raise pickle.UnpicklingError(f"arrays of {code!r}: refused")
        self.type = np.dtype(code)

    def __setstate__(self, state: Sequence[Any]) -> None:
        self.type = self.type.newbyteorder(state[1])


class _Array:
    """The values of a tensor, its storage or an array. Their own classes would take any size from the pickle."""

    def __init__(self, values: NDArray[Any] | None = None) -> None:
        self.values = values

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, kind, fortran, content = state
        self.values = np.frombuffer(content, kind.type).reshape(shape, order="F" if fortran else "C")


def _make_storage(value: bytes) -> _Array:
    storage = torch.load(io.BytesIO(value), weights_only=True)
    return _Array(torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage).numpy())


def _make_tensor(storage: _Array, offset: int, size: Sequence[int], stride: Sequence[int], *_: object) -> _Array:
    values = torch.from_numpy(storage.values)
    if math.prod(size) > len(values):  # a stride of 0 would repeat a value for ever
        raise pickle.UnpicklingError(f"a tensor of {list(size)} of {len(values)} values: refused")
    return _Array(values.as_strided(size, stride, offset).numpy())


def _make_scalar(kind: _Dtype, content: bytes) -> Any:
    return np.frombuffer(content, kind.type, 1)[0]


def _bytes_of_protocol_2(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}: refused")
    return text.encode("latin1")


# Names in pickles of the public data. None of them opens a file, imports, executes, or is what the rest of the program uses.
ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    **{(module, "set"): set for module in ("builtins", "__builtin__")},
    ("_codecs", "encode"): _bytes_of_protocol_2,
    ("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
    ("torch.storage", "_load_from_bytes"): _make_storage,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): lambda *_: _Array() for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _make_scalar for core in ("core", "_core")},
}
RECORDS = "torch_geometric"  # a package: none of its classes is imported, so new ones of later versions do no harm


class _RestrictedUnpickler(PlainUnpickler):
    CHANGED = (Record, _Array, _Dtype)

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == RECORDS:
            return Record
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data do not need: refused")


def _system(value: Any, index: int) -> int:
    """Read the number of a system, in some files ``random123``; the structure's index if there is none."""
    return index if value is None else int(str(np.asarray(value).item()).removeprefix("random"))


def _convert_to_plain(value: Any) -> Any:
    """Convert to an array, number or text.

    None for all else: numpy would follow a pointer in ``__array_interface__``.
    """
    if isinstance(value, _Array):
        value = value.values
    if isinstance(value, torch.Tensor):  # of a file that is trusted
        value = value.detach().numpy()
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return None
    return value if isinstance(value, np.ndarray | np.generic | int | float | str) else None


@dataclass(frozen=True)
class Summary:
    """Sums over one shard.

    They are added in the order of the shards, so the result is the same on any number of ranks.
    """

    samples: int
    atoms: int
    edges: int
    triplets: int
    components: int  # force components of free atoms: three each
    force_absolute: float
    force_square: float
    energy: float
    energy_square: float
    most_atoms: int
    most_triplets: int
    trajectories: frozenset[int]


def summarise(arrays: Arrays) -> Summary:
    """Summarise the arrays of `structures.build_shard_arrays`.

    Forces on fixed atoms do not count: they are not predicted.
    """
    force: NDArray[np.float64] = arrays["atom.force"][arrays["atom.fixed"] == 0].astype(np.float64)
    lengths = np.diff(arrays["atom.offsets"])
    return Summary(
        samples=len(lengths),
        atoms=int(lengths.sum()),
        edges=int(arrays["edges"].sum()),
        triplets=int(arrays["triplets"].sum()),
        components=force.size,
        force_absolute=float(np.abs(force).sum()),
        force_square=float(np.square(force).sum()),
        energy=float(arrays["energy"].sum()),
        energy_square=float(np.square(arrays["energy"]).sum()),
        most_atoms=int(lengths.max()),
        most_triplets=int(arrays["triplets"].max()),
        trajectories=frozenset(arrays["trajectory"].tolist()),
    )


def compute_attributes(neighbourhood: Neighbourhood, splits: Mapping[str, Sequence[Summary]]) -> dict[str, Any]:
    """Return the neighbourhood, mean and largest graph sizes, scales of forces and energies of the training split.

    ValueError if a trajectory is in both splits.
    """
    trajectories = {split: frozenset().union(*(each.trajectories for each in splits[split])) for split in SPLITS}
    check_disjoint(trajectories, "trajectory", "its frames")
    train, everything = splits["train"], [each for split in SPLITS for each in splits[split]]
    samples, components = sum(each.samples for each in train), sum(each.components for each in train)

    def mean(name: str, count: int) -> float:
        return float(sum(getattr(each, name) for each in train) / count)

    energy = mean("energy", samples)
    return {
        "cutoff_angstrom": neighbourhood.cutoff_angstrom,
        "max_neighbours": neighbourhood.max_neighbours,
        "mean_atoms": mean("atoms", samples),
        "mean_edges": mean("edges", samples),
        "mean_triplets": mean("triplets", samples),
        "most_atoms": max(each.most_atoms for each in everything),
        "most_triplets": max(each.most_triplets for each in everything),
        "force_mean_absolute": mean("force_absolute", components),
        "force_rms": float(np.sqrt(mean("force_square", components))),
        "energy_mean": energy,
        # rounding may leave a variance below zero
        "energy_std": float(np.sqrt(max(mean("energy_square", samples) - energy**2, 0.0))),
        **{f"{split}_trajectories": len(trajectories[split]) for split in SPLITS},
    }


CONVERTER_VERSION = 1  # raised when the same files give other shards
REFERENCE_NEIGHBOURHOOD = Neighbourhood(6.0, 50)
STRUCTURES_PER_SHARD = 10_000
# val_id is the public archive's name
FOLDERS = {"train": ("train",), "validation": ("validation", "val_id", "val")}
WHERE_THE_DATA_ARE = (
    "open_catalyst: the public data are not downloaded here, because compute nodes have no internet: "
    "on a login or transfer node get s2ef_train_2M.tar (3.4 GB, 17 GB unpacked) and s2ef_val_id.tar from "
    "https://dl.fbaipublicfiles.com/opencatalystproject/data/ (listed in the OCP repository's DATASET.md), "
    "unpack them as FOLDER/train and FOLDER/val_id, then `mlhpc data convert open_catalyst FOLDER`; "
    "LMDB files made from them work as well"
)


def convert(
    source: Path,
    root: Path,
    *,
    world: World,
    size: str | None = None,
    progress: Progress | None = None,
    trust_pickles: bool = False,
) -> None:
    """Convert a folder with ``train`` and ``validation`` (or ``val_id``) of LMDB or extxyz files to shards.

    Edges in the source are ignored: training computes them. LMDB values are pickles, which may run code when loaded. A
    pickle that needs more than plain data is refused. ``trust_pickles`` loads it anyway and so runs its code.
    """
    files: dict[str, list[_SourceFile]] = world.compute_on_first(
        partial(_list_files, source, trust_pickles), dict[str, list[_SourceFile]]
    )
    pieces = [piece for split in SPLITS for piece in _plan_shards(split, files[split], trust_pickles)]
    recipe: dict[str, Any] = {
        "name": "converted",
        "version": CONVERTER_VERSION,
        "source": str(source),
        "files": {split: len(files[split]) for split in SPLITS},
        "cutoff_angstrom": REFERENCE_NEIGHBOURHOOD.cutoff_angstrom,
        "max_neighbours": REFERENCE_NEIGHBOURHOOD.max_neighbours,
    }
    of_graphs = partial(compute_attributes, REFERENCE_NEIGHBOURHOOD)
    build_data_set(
        root, DataSetPlan("open_catalyst", size or "full", 0, recipe, pieces, summarise, of_graphs), world, progress
    )


def fetch(destination: Path, *, source: str | None = None) -> None:
    """Always raise InputError, which says where to get the data."""
    raise InputError(WHERE_THE_DATA_ARE)


@dataclass(frozen=True)
class _SourceFile:
    path: Path
    structures: int | None  # None: text, whose structures nobody has counted


def _list_files(source: Path, trusted: bool) -> dict[str, list[_SourceFile]]:
    return {split: [_count(path, trusted) for path in _find_files(source, split)] for split in SPLITS}


def _count(path: Path, trusted: bool) -> _SourceFile:
    return _SourceFile(path, len(LmdbFile(path, trust_pickles=trusted)) if path.suffix == ".lmdb" else None)


def _find_files(source: Path, split: str) -> list[Path]:
    for name in FOLDERS[split]:
        folder = source / name
        if not folder.is_dir():
            continue
        paths = sorted(path for path in folder.rglob("*") if path.suffix == ".lmdb" or path.name.endswith(SUFFIXES))
        if not paths:
            raise InputError(f"{folder}: no *.lmdb and no *.extxyz, *.extxyz.xz or *.extxyz.gz in it")
        return paths
    raise InputError(f"{source}: no folder {' or '.join(map(repr, FOLDERS[split]))} in it: {split} data are missing")


def _plan_shards(split: str, files: list[_SourceFile], trusted: bool) -> list[ShardPlan]:
    ranges = []
    for number, file in enumerate(files):
        if file.structures is None:
            ranges.append(partial(_extxyz_shard, file.path, number))
            continue
        for begin in range(0, file.structures, STRUCTURES_PER_SHARD):
            end = min(begin + STRUCTURES_PER_SHARD, file.structures)
            ranges.append(partial(_lmdb_shard, file.path, begin, end, trusted))
    return [ShardPlan(split, shard, make) for shard, make in enumerate(ranges)]


def _lmdb_shard(path: Path, begin: int, end: int, trusted: bool) -> Arrays:
    structures = list(LmdbFile(path, trust_pickles=trusted).structures(begin, end))
    return _arrays(path, begin, structures)


def _extxyz_shard(path: Path, number: int) -> Arrays:
    # negative, so that it equals no system number from a text file
    return _arrays(path, 0, list(read_extxyz(path, trajectory=-1 - number)))


def _arrays(path: Path, begin: int, structures: list[Structure]) -> Arrays:
    if not structures:
        raise InputError(f"{path}: no structure in it")
    return build_shard_arrays(
        structures, REFERENCE_NEIGHBOURHOOD, [f"{path}: structure {begin + place}" for place in range(len(structures))]
    )
