"""Builds a data set from a recipe, over ranks, and continues an interrupted build. Finds a complete data set.

The workload makes the samples and the manifest's attributes; this module writes shards, and the manifest last.

Generates data sets of numbered items for every workload with synthetic data.

An item is the unit of generation: a sample, or a universe, trajectory or family with several samples. The workload
defines how an item is made, and the attributes in the manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_type_hints

import msgspec
from numpy.typing import NDArray

from mlhpc.suite.data.lock import create_lock_for_all_ranks
from mlhpc.suite.data.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    ShardEntry,
    check_shard,
    read_manifest,
    write_manifest,
)
from mlhpc.suite.data.shards import Compression, build_shard_path, open_hdf5, write_shard
from mlhpc.suite.documents import render_json
from mlhpc.suite.errors import InputError, explain_unknown_name
from mlhpc.suite.files import PART_SUFFIX, add_path_to_errors, check_ownership, quote_path, write_file_atomically
from mlhpc.suite.path_kinds import explain_absent, refuse_odd
from mlhpc.suite.world import World

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LOCK_NAME = "generation.lock"  # exists while a process builds the data set
# Entries of complete shards, one file per writing process, because appends of several hosts to one file may mix.
RECORDS = "written.*.jsonl"

SPLITS = ("train", "validation")
# Validation items are numbered from here, so that a larger training split never repeats one.
VALIDATION_INDEX = 2**32

Arrays = dict[str, NDArray[Any]]
Count = Callable[[int], None]  # called with the number of items made since the last call
Progress = Callable[[int, int], None]  # called with the items of this rank made so far, and all of them
Settings = TypeVar("Settings")
Summary = TypeVar("Summary")


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write. ``make`` returns its arrays; their first dimension is samples."""

    split: str
    shard: int
    make: Callable[[], Arrays]


@dataclass(frozen=True)
class DataSetPlan(Generic[Summary]):
    """The data set to build.

    ``recipe`` determines every byte of the data set; the manifest stores it as ``generator``. ``summarise`` reduces one
    shard, new or from an interrupted build, to a small summary, which goes to rank 0. ``attributes`` gets the summaries
    of each split in order of shard and returns the manifest's attributes. It raises InputError if the data set is
    unusable, for example if a sample is in both splits.
    """

    workload: str
    size: str
    seed: int
    recipe: Mapping[str, Any]
    pieces: Sequence[ShardPlan]
    summarise: Callable[[Arrays], Summary]
    attributes: Callable[[Mapping[str, Sequence[Summary]]], dict[str, Any]]
    compression: Compression = "none"


def find_size_settings(workload: str, sizes: Mapping[str, Settings], size: str, seed: int) -> Settings:
    """Return a generator's settings for a size. InputError for an unknown size, or a seed outside 0 to 2^63 - 1."""
    if size not in sizes:
        raise InputError(f"{workload}: {explain_unknown_name('size', size, sizes)}")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed {seed}: expected an integer from 0 to 2^63 - 1")
    return sizes[size]


def plan_numbered_shards(
    train: int,
    validation: int,
    per_shard: int,
    make: Callable[[range, Count], Arrays],
    world: World,
    progress: Progress | None,
) -> list[ShardPlan]:
    """Plan the shards of numbered items: training items from 0, validation items from `VALIDATION_INDEX`.

    ``make(numbers, count)`` returns the arrays of a shard and calls ``count`` for the items it makes. ``progress`` gets
    the sum for this rank.
    """
    numbers = (range(train), range(VALIDATION_INDEX, VALIDATION_INDEX + validation))
    plan = [
        (split, shard, items[begin : begin + per_shard])
        for split, items in zip(SPLITS, numbers, strict=True)
        for shard, begin in enumerate(range(0, len(items), per_shard))
    ]
    total, done = sum(len(items) for _, _, items in plan[world.rank :: world.size]), 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    return [ShardPlan(split, shard, partial(make, items, count)) for split, shard, items in plan]


def build_data_set(root: Path, plan: DataSetPlan[Summary], world: World, progress: Progress | None = None) -> None:
    """Write the data set under ``root``. Intact shards of an interrupted build stay, and so does a complete data set.

    All ranks call it. ``progress(done, total)`` counts this rank's shards. InputError on every rank if the folder holds
    other data, another process is building it, or a shard cannot be made.
    """
    # As a file has it, lists in place of tuples: it is compared with the recipe in a file.
    recipe = json.loads(json.dumps(plan.recipe))
    # A complete data set may lie on a read-only file system, where no lock can be made.
    if world.broadcast((root / MANIFEST_NAME).exists() if world.is_first else None):
        _start_build(root, recipe, world)
        return
    with create_lock_for_all_ranks(root / LOCK_NAME, "this data set", world):
        # Another process may have completed it while this one waited.
        if not _start_build(root, recipe, world):
            _build(root, plan, recipe, world, progress)


def _build(
    root: Path, plan: DataSetPlan[Summary], recipe: dict[str, Any], world: World, progress: Progress | None
) -> None:
    recorded = world.broadcast(_read_records(root) if world.is_first else None, dict[str, list[ShardEntry]])
    shards = _write_shards(root, plan, recorded, world, progress)
    problem = None
    if world.is_first:
        try:
            # Only now: while other ranks write, their part files are in use.
            _remove_parts(root)
            write_manifest(root, _make_manifest(plan, recipe, shards))
            # After the manifest: a kill in between leaves a complete data set with two superfluous files.
            for path in (*root.glob(RECORDS), root / UNFINISHED_NAME):
                path.unlink()
        except (OSError, ValueError) as error:
            problem = error
    world.check_together(problem)


def explain_part(path: Path) -> str | None:
    """Name the data set that a path is a part of, such as a shard or the manifest. None without such a data set."""
    whole = next((each for each in (path.parent, path.parent.parent) if (each / MANIFEST_NAME).is_file()), None)
    if whole is None:
        return None
    above = f"MLHPC_DATA={quote_path(whole.absolute().parent)}"
    return f"{path}: no data set, but in one: give {quote_path(whole)}; MLHPC_DATA names the folder above: {above}"


def find_data(root: Path, workload: str, size: str) -> Manifest:
    """Read the manifest of a complete data set. InputError says how to make it, or which data set the folder holds."""
    if not (root / MANIFEST_NAME).exists():
        if part := explain_part(root):
            raise InputError(part)
        if (root / f"{workload}-{size}" / MANIFEST_NAME).exists():
            raise InputError(f"{root}: no data set here, but below it: give {quote_path(root / f'{workload}-{size}')}")
        refuse_odd(root)
        command = f"mlhpc data generate {workload} --size {size} -o {quote_path(root)}"
        if (root / UNFINISHED_NAME).exists():
            raise InputError(f"{root}: an unfinished data set; {_find_way_on(root, command)}")
        like = "" if root.parent.exists() else explain_absent(str(root.parent))
        other = f" {root.parent} does not exist, {like}" if like.startswith("did you mean") else ""
        raise InputError(f"{root}: no data set here;{other} make it with: {command}")
    manifest = read_manifest(root)
    if (manifest.workload, manifest.size) != (workload, size):
        raise InputError(f"{root}: holds data of {manifest.workload} {manifest.size}; expected {workload} {size}")
    return manifest


def _find_way_on(root: Path, command: str) -> str:
    """Return how an unfinished data set is finished: by the command that generates it, or by the one that began it."""
    with suppress(OSError, ValueError):
        recipe = json.loads((root / UNFINISHED_NAME).read_text())
        if "seed" in recipe and recipe["name"] != "converted":
            return f"this goes on with it: {command}" + (f" --seed {recipe['seed']}" if recipe["seed"] else "")
    return "the command that began it goes on with it"


def check_disjoint(splits: Mapping[str, Collection[int]], kind: str, leak: str) -> None:
    """Check that training and validation share no number. InputError names the ``kind`` and what would ``leak``."""
    shared = set(splits["train"]) & set(splits["validation"])
    if shared:
        which = " is" if len(shared) == 1 else f" and {len(shared) - 1} more are"
        raise InputError(f"{kind} {min(shared)}{which} in the training and in the validation split: {leak} would leak")


@dataclass(frozen=True)
class _WrittenShard(Generic[Summary]):
    split: str
    shard: int
    entry: ShardEntry
    summary: Summary


def _start_build(root: Path, recipe: dict[str, Any], world: World) -> bool:
    """Return True on every rank if the data set is complete. Otherwise rank 0 writes the recipe into the folder."""
    return bool(world.compute_on_first(partial(_write_or_compare_recipe, root, recipe)))


def _write_or_compare_recipe(root: Path, recipe: dict[str, Any]) -> bool:
    """Write the recipe into an empty folder, or compare it with the one there. Returns True for a complete data set."""
    complete = (root / MANIFEST_NAME).exists()
    note = root / UNFINISHED_NAME
    if complete:
        existing = read_manifest(root).generator
    elif note.exists():
        existing = json.loads(note.read_text())
    elif root.exists() and any(path.suffix != PART_SUFFIX and path.name != LOCK_NAME for path in root.iterdir()):
        raise InputError(f"{root}: has files but no data set, finished or not; choose another folder with -o")
    else:
        write_file_atomically(note, json.dumps(recipe, indent=1) + "\n")
        return False
    different = sorted(key for key in existing.keys() | recipe.keys() if existing.get(key) != recipe.get(key))
    if different:
        key = different[0]
        raise InputError(
            f"{root}: holds a data set with {key} = {existing.get(key)!r}, not {recipe.get(key)!r}; "
            "choose another folder with -o"
        )
    return complete


Records = Mapping[str, Collection[ShardEntry]]


def _write_shards(
    root: Path, plan: DataSetPlan[Summary], recorded: Records, world: World, progress: Progress | None
) -> list[_WrittenShard[Summary]]:
    """Write this rank's missing shards.

    Rank 0 returns the shards of all ranks in order; an error on one rank ends all.
    """
    shards, problem = [], None
    record = root / RECORDS.replace("*", f"{os.uname().nodename}.{os.getpid()}")
    try:
        mine = plan.pieces[world.rank :: world.size]
        for piece in mine:
            path = build_shard_path(root, piece.split, piece.shard)
            entry = _find_intact(root, path, recorded)
            if entry is not None:
                arrays = _read_arrays(path)
            else:
                arrays = piece.make()
                entry = write_shard(path, arrays, compression=plan.compression)
                _write_record(record, entry)
            shards.append(_WrittenShard(piece.split, piece.shard, entry, plan.summarise(arrays)))
            if progress is not None:
                progress(len(shards), len(mine))
    except (OSError, ValueError) as error:
        problem = error
    world.check_together(problem)
    summarise = getattr(plan.summarise, "func", plan.summarise)  # a partial has no annotations of its own
    kind = get_type_hints(summarise).get("return", Any)  # what the workload calls a summary
    gathered = world.gather(shards, list[_WrittenShard[kind]]) or []  # type: ignore[valid-type]
    all_shards = [shard for rank_shards in gathered for shard in rank_shards]
    return sorted(all_shards, key=lambda shard: (shard.split, shard.shard))


def _write_record(path: Path, entry: ShardEntry) -> None:
    """Add the entry of a complete shard to this process's record, and force the record to the disk."""
    check_ownership()
    with add_path_to_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(render_json(entry) + "\n")
        file.flush()
        # A record must not survive a crash that its shard does not: the shard was forced to the disk before.
        os.fsync(file.fileno())


def _read_records(root: Path) -> Records:
    """Read the entries that interrupted builds recorded, by file. A line cut off by a kill is no entry."""
    found: dict[str, list[ShardEntry]] = {}
    for path in sorted(root.glob(RECORDS)):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError):
                entry = msgspec.json.decode(line, type=ShardEntry)
                found.setdefault(entry.file, []).append(entry)
    return found


def _find_intact(root: Path, path: Path, recorded: Records) -> ShardEntry | None:
    """Return the recorded entry of a shard of an interrupted build if the file is undamaged, else None."""
    entries = recorded.get(path.relative_to(root).as_posix(), ())
    return next((entry for entry in entries if check_shard(root, entry, deep=True) is None), None)


def _remove_parts(root: Path) -> None:
    """Remove the files of killed builds: their names have a process id, so no later build overwrites them."""
    check_ownership()
    for path in root.rglob(f"*{PART_SUFFIX}"):
        path.unlink(missing_ok=True)


def _read_arrays(path: Path) -> Arrays:
    with open_hdf5(path) as file:
        return {name: file[name][...] for name in file}


def _make_manifest(
    plan: DataSetPlan[Summary], recipe: dict[str, Any], shards: list[_WrittenShard[Summary]]
) -> Manifest:
    splits = dict.fromkeys(piece.split for piece in plan.pieces)
    by_split = {split: [shard for shard in shards if shard.split == split] for split in splits}
    return Manifest(
        workload=plan.workload,
        size=plan.size,
        seed=plan.seed,
        generator=recipe,
        splits={split: tuple(shard.entry for shard in by_split[split]) for split in splits},
        attributes=plan.attributes({split: [shard.summary for shard in by_split[split]] for split in splits}),
    )


GeneratorSettings = TypeVar("GeneratorSettings", bound="DataclassInstance")


@dataclass(frozen=True)
class Synthetic(Generic[Summary]):
    """The data set of one size and seed.

    ``make(numbers, count)`` gives the arrays of one shard and calls ``count`` with each number of items made.
    ``summarise`` and ``attributes`` are those of a `DataSetPlan`.
    """

    train_items: int
    validation_items: int
    items_per_shard: int
    make: Callable[[range, Count], Arrays]
    summarise: Callable[[Arrays], Summary]
    attributes: Callable[[Mapping[str, Sequence[Summary]]], dict[str, Any]]
    compression: Compression = "none"


@dataclass(frozen=True)
class Generator(Generic[GeneratorSettings]):
    """A workload's generator. ``data_set`` makes the data set of a size's settings and a seed.

    ``name``, ``version``, the seed, ``constants`` and the fields of the settings are the recipe that names the data.
    ``check_tools`` raises ValueError if a package that generating needs is missing.
    """

    workload: str
    version: int
    sizes: Mapping[str, GeneratorSettings]
    data_set: Callable[[GeneratorSettings, int], Synthetic[Any]]
    name: str = "synthetic"
    constants: Mapping[str, Any] | None = None
    check_tools: Callable[[], None] | None = None

    def generate(self, root: Path, size: str, *, seed: int, world: World, progress: Progress | None = None) -> None:
        """Generate a data set. A complete one stays as it is, an interrupted one is continued.

        ``progress(done, total)`` counts this rank's items. ValueError for an unknown size, a seed out of range, a
        missing tool, or a folder that holds other data.
        """
        settings = find_size_settings(self.workload, self.sizes, size, seed)
        if self.check_tools is not None and not (root / MANIFEST_NAME).exists():  # before anything is written
            self.check_tools()
        data = self.data_set(settings, seed)
        recipe = {
            "name": self.name,
            "version": self.version,
            "seed": seed,
            **(self.constants or {}),
            **asdict(settings),
        }
        pieces = plan_numbered_shards(
            data.train_items, data.validation_items, data.items_per_shard, data.make, world, progress
        )
        plan = DataSetPlan(self.workload, size, seed, recipe, pieces, data.summarise, data.attributes, data.compression)
        build_data_set(root, plan, world)
