"""`mlhpc data`: makes, converts, verifies, describes and fetches data sets, by functions of each workload."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlhpc.suite.cli.group import Subcommands
from mlhpc.suite.cli.options import IntegerRange, output_option, ranks_option, size_option
from mlhpc.suite.cli.progress import TERMINAL_NAME, start_progress
from mlhpc.suite.config import choose_default_data_root
from mlhpc.suite.descriptor import load_descriptor
from mlhpc.suite.errors import InputError
from mlhpc.suite.exit_codes import ExitCode
from mlhpc.suite.files import print_line, quote_path, render_bytes, render_duration, write_file_atomically
from mlhpc.suite.launch.local import make_suite_command, run_attached
from mlhpc.suite.launcher import find_world
from mlhpc.suite.path_kinds import refuse_odd
from mlhpc.suite.plugins import EXCHANGE, load_export, mark_missing_wing

if TYPE_CHECKING:
    from mlhpc.suite.data.manifest import Manifest
    from mlhpc.suite.world import World


@click.group(
    cls=Subcommands,
    epilog="""\b
Examples:
  mlhpc data generate cosmoflow --size mini --ranks 2
  srun -n 128 mlhpc data generate cosmoflow --size small -o /scratch/cosmoflow-small
  mlhpc data verify data/cosmoflow-mini --deep
  mlhpc data describe data/cosmoflow-mini
  mlhpc data fetch cosmoflow -o public --from /shared/cosmoUniverse_2019_05_4parE_tf_v2
  mlhpc data convert cosmoflow public -o data/cosmoflow-full
""",
)
def data() -> None:
    """Generate, convert and check data sets.

    Without -o a data set is the folder <workload>-<size> in $MLHPC_DATA, else in ./data. Its manifest is written last.
    A data set without a manifest is unfinished: repeat the command that began it, and it continues.
    """


@data.command()
@click.argument("workload")
@size_option()
@click.option(
    "--seed",
    type=IntegerRange(0),
    default=0,
    show_default=True,
    help="Random seed of the data; another seed gives other data.",
)
@ranks_option()
@output_option("Folder of the data set.", "$MLHPC_DATA or data/<workload>-<size>")
def generate(workload: str, size: str, seed: int, ranks: int, output: Path | None) -> None:
    """Generate the synthetic data set of a size. Inside srun or mpiexec all ranks take part."""
    chosen = load_descriptor(workload)
    needed = chosen.card().size(size).data_bytes
    root = output or choose_default_data_root(workload, size)
    refuse_odd(root)
    if _is_made_already(root, workload, size, seed):
        return
    _check_disk_space(root, f"{workload} {size}", needed)
    words = ["generate", workload, "--size", size, "--seed", str(seed), "-o", str(root)]
    _start_ranks(ranks, words)
    with _connect_ranks() as world:
        with start_progress(f"{workload} {size}", shown=world.is_first) as tell:
            chosen.load_generator().generate(root, size, seed=seed, world=world, progress=tell)
        _print_data_set(root, world)


@data.command()
@click.argument("workload")
@click.argument("source", type=click.Path(path_type=Path))
@size_option(None, "Size of the workload that the data set is for. [the size with samples of this shape]")
@ranks_option()
@output_option("Folder of the data set.", "$MLHPC_DATA or data/<workload>-<size>, converted without --size")
@click.option(
    "--trust-pickles", is_flag=True, help="Also read pickles that may run code. Use it only for files that you trust."
)
def convert(
    workload: str, source: Path, size: str | None, ranks: int, output: Path | None, trust_pickles: bool
) -> None:
    """Convert public data files in their original format to a data set of the suite.

    SOURCE is the folder of the files, such as the one that `mlhpc data fetch` made."""
    chosen = load_descriptor(workload)
    if not source.exists():
        raise InputError(f"{source}: does not exist; expected the folder of the {workload} files to convert")
    if size is not None:
        chosen.card().size(size)
    root = output or choose_default_data_root(workload, size or "converted")
    words = [*(["--size", size] if size else []), *(["--trust-pickles"] if trust_pickles else [])]
    _start_ranks(ranks, ["convert", workload, str(source), *words, "-o", str(root)])
    with _connect_ranks() as world:
        function = _find_generator_function(chosen.load_generator(), workload, "convert")
        if trust_pickles and "trust_pickles" not in signature(function).parameters:
            raise InputError(f"--trust-pickles: the files of {workload} are no pickles; leave the option out")
        trust = {"trust_pickles": True} if trust_pickles else {}
        with start_progress(f"convert {workload}", shown=world.is_first) as tell:
            function(source, root, world=world, size=size, progress=tell, **trust)
        _print_data_set(root, world)


@data.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.option(
    "--deep",
    is_flag=True,
    help="Also read every byte and compare checksums. [existence, sizes, layout, number of samples]",
)
def verify(root: Path, deep: bool) -> None:
    """Check that the files of a data set are complete and unchanged.

    Exit code 1 if one is missing, is damaged, or may not be read by this user.
    """
    from mlhpc.suite.data.build import explain_part
    from mlhpc.suite.data.manifest import MANIFEST_NAME, NOT_JUDGED, compare_files, read_manifest

    if not root.exists():
        raise InputError(f"{root}: does not exist; expected the folder of a data set")
    # A manifest that is a broken link makes a damaged data set, not a folder without one.
    if not os.path.lexists(root / MANIFEST_NAME) and not any(root.glob("*/shard_*")):
        made = f"{root}: not a data set (no {MANIFEST_NAME} and no shard); mlhpc data generate makes one"
        raise InputError(explain_part(root) or made)
    begin = time.monotonic()
    try:
        manifest = read_manifest(root)
    except ValueError as problem:
        print_line(str(problem), error=True)
        sys.exit(ExitCode.FINDINGS)
    seen = 0
    with start_progress(f"verify {root}", shown=deep) as tell:

        def count(amount: int) -> None:
            nonlocal seen
            seen += amount
            tell(seen, manifest.bytes)

        problems = compare_files(root, deep=deep, read=_read_shard, progress=count)
    for text in problems:
        print_line(text, error=True)
    unread = [text for text in problems if NOT_JUDGED in text]
    if unread:
        print_line(f"{root}: {len(unread)} of {len(manifest.shards)} shards cannot be judged by this user", error=True)
    if len(unread) < len(problems):
        print_line(
            f"{root}: damaged: copy these files again, or remove the folder and make the data set again", error=True
        )
    if problems:
        sys.exit(ExitCode.FINDINGS)
    what = "checksums of every byte" if deep else "presence, sizes and samples (--deep compares every byte)"
    print_line(f"{_render_summary(root, manifest)}: fine: {what}, {render_duration(time.monotonic() - begin)}")


@data.command(epilog=mark_missing_wing(EXCHANGE))
@click.argument("root", type=click.Path(path_type=Path))
@output_option("File to write.", "croissant.json in the data set")
def describe(root: Path, output: Path | None) -> None:
    """Write a description of a data set in the format Croissant 1.1, which other tools read."""
    from mlhpc.suite.data.manifest import read_manifest

    if not root.exists():
        raise InputError(f"{root}: does not exist; expected the folder of a data set")
    manifest = read_manifest(root)
    text = load_export("croissant", "data describe")(root, manifest, _describe_data(manifest))
    path = output or root / "croissant.json"
    if path.is_file() and path.read_bytes() != text.encode():
        raise InputError(f"{path}: exists already with other content; choose another file with -o")
    write_file_atomically(path, text)
    print_line(f"{path}: Croissant 1.1 of {_render_summary(root, manifest)}")


@data.command()
@click.argument("workload")
@click.option(
    "--from",
    "source",
    help=(
        "Archive or folder on this machine with the public files. "
        "Without it, moe_lm is downloaded by pip; for others the command prints the address."
    ),
)
@output_option("Folder for the public files.", "$MLHPC_DATA or data/<workload>-public")
def fetch(workload: str, source: str | None, output: Path | None) -> None:
    """Copy the public data of a workload here and verify them; `mlhpc data convert` makes a data set of them."""
    function = _find_generator_function(load_descriptor(workload).load_generator(), workload, "fetch")
    folder = output or choose_default_data_root(workload, "public")
    with start_progress(f"fetch {workload}") as tell:
        # A workload of another package may have a `fetch` without progress.
        told = {"progress": tell} if "progress" in signature(function).parameters else {}
        function(folder, source=source, **told)
    print_line(
        f"{folder}: checked and complete; mlhpc data convert {workload} {quote_path(folder)} makes a data set of it"
    )


def _read_shard(path: Path, samples: int) -> None:
    """Raise InputError for a shard of another layout or number of samples."""
    from mlhpc.suite.data.shards import map_columns

    map_columns(path, samples)


def _is_made_already(root: Path, workload: str, size: str, seed: int) -> bool:
    """Return True if the folder holds this data set, by presence and sizes. InputError for another or damaged one."""
    from mlhpc.suite.data.manifest import MANIFEST_NAME, NOT_JUDGED, compare_files, read_manifest

    if not (root / MANIFEST_NAME).exists():
        return False
    manifest = read_manifest(root)
    present, wanted = (manifest.workload, manifest.size, manifest.seed), (workload, size, seed)
    if present != wanted:
        raise InputError(
            f"{root}: holds {present[0]} {present[1]} of seed {present[2]}, not {workload} {size} of seed {seed}; "
            "choose another folder with -o"
        )
    problems = compare_files(root, deep=False)  # deep would read every byte; `mlhpc data verify --deep` does
    if unread := next((text for text in problems if NOT_JUDGED in text), None):
        raise InputError(unread)
    if problems:
        raise InputError(
            f"{problems[0]}; to repair the data set, remove the damaged files and {root / MANIFEST_NAME}, "
            "then repeat this command"
        )
    print_line(f"{_render_summary(root, manifest)}: complete already; presence and sizes verified")
    return True


def _check_disk_space(root: Path, name: str, needed: int) -> None:
    """Raise InputError if a data set of this size does not fit on the disk. What exists already counts as fitting."""
    made = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    # The free space of a folder can be asked only if it exists; this one is made later.
    place = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > made + free:
        raise InputError(
            f"{root}: {name} takes {render_bytes(needed)}, {render_bytes(free)} are free here; "
            "choose another folder with -o, or a smaller --size (mlhpc workload list)"
        )


def _start_ranks(ranks: int, words: Sequence[str]) -> None:
    """Run the command on several ranks of this machine, and end with their exit code.

    Return if one rank is wanted, or if a launcher started this process as a rank.
    """
    if find_world(ranks) is not None or ranks == 1:
        return
    terminal = {TERMINAL_NAME: "1"} if sys.stderr.isatty() else {}
    sys.exit(run_attached(make_suite_command("data", *words), ranks=ranks, environ={**os.environ, **terminal}))


@contextmanager
def _connect_ranks() -> Iterator[World]:
    """Return the ranks of this command. Rank 0 reports an error that all ranks raise; any other error aborts all."""
    from mlhpc.suite.world import World

    world = World.create()
    try:
        yield world
    except (InputError, OSError):
        if world.is_first:
            raise
        sys.exit(ExitCode.USAGE)
    except KeyboardInterrupt:
        if world.size > 1:  # the others would wait for this rank
            world.transport.abort(ExitCode.INTERRUPTED)
        raise
    except Exception:
        if world.size == 1:
            raise
        traceback.print_exc()
        # The other ranks wait for this one in a collective.
        world.transport.abort(1)


def _print_data_set(root: Path, world: World) -> None:
    if world.is_first:
        from mlhpc.suite.data.manifest import read_manifest

        print_line(f"{_render_summary(root, read_manifest(root))}: complete")


def _render_summary(root: Path, manifest: Manifest) -> str:
    samples = ", ".join(f"{manifest.samples(split):,} {split}" for split in manifest.splits)
    content = f"{samples} samples, {manifest.bytes / 1e9:.2f} GB in {len(manifest.shards)} shards"
    return f"{root}: {manifest.workload} {manifest.size}, {content}"


def _describe_data(manifest: Manifest) -> str:
    """Describe the data in a sentence, with the card's words on workload and size if they are known here."""
    # The workload of the data may not be installed here.
    with suppress(InputError):
        card = load_descriptor(manifest.workload).card()
        size = f": {card.sizes[manifest.size].description}" if manifest.size in card.sizes else ""
        return f"Data of {card.title} ({card.domain}), size {manifest.size}{size}."
    return f"Data of {manifest.workload}, size {manifest.size}."


def _find_generator_function(generator: Any, workload: str, name: str) -> Callable[..., None]:
    """Return the function of that name in a workload's generator module. InputError if it has none."""
    function = getattr(generator, name, None)
    if function is None:
        raise InputError(
            f"{workload}: `mlhpc data {name}` does not support this workload: its generator module has no function"
            f" {name}"
        )
    return function  # type: ignore[no-any-return]
