"""Writes ro-crate-metadata.json: a package as an RO-Crate 1.1 of the profile Process Run Crate 0.5.

A crate has one action for each run. It is read from the files of the package, so redacted words stay out. A package
that grows gets a new description. Nothing is executed and no link is followed. https://w3id.org/ro/wfrun/process/0.5
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlhpc.suite.errors import InputError
from mlhpc.suite.files import read_json, render_printable
from mlhpc.suite.log.reader import read_events, read_limits
from mlhpc.suite.log.record import RunRecord, summarise_log
from mlhpc.suite.log.results_tree import CRATE, MANIFEST, Group, find_results, list_files
from mlhpc.suite.machine.facts import Facts, read_facts

CONTEXT = ("https://w3id.org/ro/crate/1.1/context", "https://w3id.org/ro/terms/workflow-run/context")
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_PYPI = "https://pypi.org/project/{}/"
_MEDIA_TYPES = {
    ".json": "application/json",
    ".md": "text/markdown",
    ".sh": "application/x-sh",
    ".sha256": "text/plain",
    ".txt": "text/plain",
    ".yaml": "application/yaml",
}
_ABSOLUTE = re.compile(r"(?:^|[\s:=,;'\"])~?/\w")
_PROVENANCE_LOG = re.compile(r"(?:result|resumed|failed)_.*\.txt")
Entity = dict[str, Any]


# Not rocrate: it would replace this class and the head of `render_crate` only, and cost every `mlhpc package` 8 more
# distributions and 377 modules to import (0.16.0). tests/plugins/exchange/test_crate.py reads a crate with it.
@dataclass
class _Graph:
    """The entities of a crate by @id, in the order in which they were added."""

    entities: dict[str, Entity] = field(default_factory=dict)

    def add(self, identity: str, kind: str, **properties: Any) -> dict[str, str]:
        """Add an entity unless its @id exists already, and return a reference to it.

        Leaves out properties that are None or empty. Writes a list of one item as that item, as RO-Crate asks.
        """
        entity: Entity = {"@id": identity, "@type": kind}
        for name, value in properties.items():
            if value not in (None, []):
                entity[name] = value[0] if isinstance(value, list) and len(value) == 1 else value
        self.entities.setdefault(identity, entity)
        return {"@id": identity}


@dataclass(frozen=True)
class _RunOrigin:
    """The files of a run folder in the package: their folder, and the facts of the nodes."""

    folder: Path
    nodes: tuple[Facts, ...]


def render_crate(package: Path) -> str:
    """Render the crate of a package as JSON-LD, the same for the same files."""
    graph = _Graph()
    submitter = package.absolute().name
    agent = {"@id": f"#{quote(submitter)}"}
    described = {path for path in list_files(package) if _is_described(path)} | {package / MANIFEST}
    files = [_add_file(graph, package, path) for path in sorted(described)]
    runs = list(_list_runs(package))
    actions = [_add_action(graph, package, agent, *run) for run in runs]
    # The date of the newest run, not of today: the same files give the same crate.
    stops = [stop for _, _, record in runs if (stop := record.run_stop_s) is not None]
    results = sorted({f"{record.benchmark} {record.size or ''}".strip() for _, _, record in runs if record.benchmark})
    about = f"results package of {submitter} in the tree of MLPerf HPC: {', '.join(results) or 'no results'}"
    head = _Graph()
    specification = {"@id": "https://w3id.org/ro/crate/1.1"}
    head.add(CRATE, "CreativeWork", conformsTo=specification, about={"@id": "./"})
    head.add(
        "./",
        "Dataset",
        name=f"mlhpc results of {submitter}",
        description=f"The {about}. {len(runs)} logs; each says by itself when it ran and what it reached.",
        datePublished=_render_time(max(stops, default=0.0))[:10],
        license={"@id": "#licence"},
        conformsTo={"@id": PROFILE},
        author=agent,
        publisher=agent,
        hasPart=files,
        mentions=actions,
    )
    head.add(PROFILE, "CreativeWork", name="Process Run Crate", version="0.5")
    head.add(agent["@id"], "Organization", name=submitter)
    text = "The submitter has stated no licence in this package; ask before you use more of it than its facts."
    head.add("#licence", "CreativeWork", name="no licence stated", description=text)
    # RO-Crate asks for its own descriptor and the root data entity first.
    document = {"@context": list(CONTEXT), "@graph": [*head.entities.values(), *graph.entities.values()]}
    return json.dumps(document, indent=1) + "\n"


def _is_described(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.name != CRATE


def _add_file(graph: _Graph, package: Path, path: Path) -> dict[str, str]:
    """Add a file."""
    size = None if path.name == MANIFEST else str(path.stat().st_size)  # the manifest is written after the crate
    kind = _MEDIA_TYPES.get(path.suffix)
    name = render_printable(path.relative_to(package).as_posix())
    return graph.add(_build_id(package, path), "File", name=name, contentSize=size, encodingFormat=kind)


def _build_id(package: Path, path: Path) -> str:
    return quote(os.fsencode(path.relative_to(package).as_posix()))


def _list_runs(package: Path) -> Iterator[tuple[Path, _RunOrigin | None, RunRecord]]:
    """Yield each log of a run with its origin: the logs of results, then those kept as provenance."""
    for group in find_results(package, partly=True).groups:
        if group.package is None:
            continue
        origins = dict(_list_origins(group))
        for path in (*group.logs, *group.pruned):
            name = path.relative_to(group.folder).as_posix()
            yield path, origins.get(name), summarise_log(read_events(path))
        for origin in {origin.folder: origin for origin in origins.values()}.values():
            for path in sorted(origin.folder.iterdir()):
                if _PROVENANCE_LOG.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    yield path, origin, summarise_log(read_events(path))


def _list_origins(group: Group) -> Iterator[tuple[str, _RunOrigin]]:
    """Yield (name of a log in the result's folder, its run folder), as origin.json of the provenance says."""
    assert group.package is not None
    code = group.package / "benchmarks" / str(group.benchmark) / "implementations"
    names = "/".join(map(escape, (str(group.system), str(group.scenario))))
    for path in sorted(code.glob(f"*/{names}/provenance/run_*/origin.json")):
        if not _is_inside(group.package, path):
            continue
        origin = _RunOrigin(path.parent, tuple(_read_facts(group.package, path.parent)))
        logs = _read_object(path).get("logs")
        for name in logs.values() if isinstance(logs, dict) else ():
            if isinstance(name, str):
                yield name, origin


def _read_facts(package: Path, folder: Path) -> Iterator[Facts]:
    """Yield the facts that can be read: those of another version of the suite may not."""
    for path in sorted((folder / "facts").glob("*.json")):
        if _is_inside(package, path):
            with suppress(InputError):
                yield read_facts(path)


def _is_inside(package: Path, path: Path) -> bool:
    """Return False if a symbolic link in the package leads to the path, or nowhere."""
    try:
        return path.resolve() == package.resolve() / path.relative_to(package)
    except (OSError, RuntimeError):  # a link to itself
        return False


def _read_object(path: Path) -> Mapping[str, Any]:
    """Read a small JSON object; empty if there is none."""
    try:
        found = read_json(path, read_limits().json)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _add_action(
    graph: _Graph, package: Path, agent: dict[str, str], path: Path, origin: _RunOrigin | None, record: RunRecord
) -> dict[str, str]:
    """Add the action of one run. RO-Crate wants inputs in ``object``, outputs in ``result``."""
    log = _build_id(package, path)
    subject = " ".join(filter(None, (record.benchmark, record.size))) or "run"
    shape = f"{record.nodes or 'unknown'} nodes, {record.ranks or 'unknown'} ranks"
    nodes = origin.nodes if origin else ()
    error = _find_error(record)
    return graph.add(
        f"#run-{log}",
        "CreateAction",
        name=f"{subject}, {render_printable(path.name)}",
        description=f"One training run of {subject} on {shape}.",
        agent=agent,
        instrument=_add_software(graph, record, nodes),
        object=_add_inputs(graph, package, origin, record),
        result=[{"@id": log}],
        startTime=None if record.run_start_s is None else _render_time(record.run_start_s),
        endTime=None if record.run_stop_s is None else _render_time(record.run_stop_s),
        actionStatus=f"http://schema.org/{'Completed' if error is None else 'Failed'}ActionStatus",
        error=error,
        environment=[_add_variable(graph, name, value) for name, value in _list_variables(nodes)],
    )


def _add_inputs(graph: _Graph, package: Path, origin: _RunOrigin | None, record: RunRecord) -> list[dict[str, str]]:
    """Add the data set of a run; its configuration and card are files that the crate describes already."""
    inputs = [_add_data(graph, record)] if record.data_manifest else []
    if origin is not None:
        files = (origin.folder / name for name in ("config.yaml", "card.yaml"))
        inputs += [{"@id": _build_id(package, path)} for path in files if _is_described(path)]
    return inputs


def _find_error(record: RunRecord) -> str | None:
    """Return why the run did not do its work, as its log says; None if it did."""
    if record.run_start_s is None:
        return "the log has no run_start"
    if record.run_stop_s is None:
        return "the log has no run_stop"
    return None if record.status == "success" else f"the log ends with status {render_printable(str(record.status))}"


def _add_software(graph: _Graph, record: RunRecord, nodes: tuple[Facts, ...]) -> dict[str, str]:
    """Add the suite with the packages of the first node. Nodes that differ are not packaged together.

    Its @id is a digest of both (RFC 6920). RO-Crate requires an absolute URI, and the suite has no address of its own.
    """
    packages = sorted(nodes[0].software.packages.items()) if nodes else []
    parts = [_add_package(graph, name, version) for name, version in packages]
    version = record.suite_version or "unknown"
    digest = hashlib.sha256(json.dumps(["mlhpc", version, packages]).encode()).digest()
    name = f"ni:///sha-256;{urlsafe_b64encode(digest).decode().rstrip('=')}"
    return graph.add(name, "SoftwareApplication", name="mlhpc", softwareVersion=version, softwareRequirements=parts)


def _add_package(graph: _Graph, name: str, version: str) -> dict[str, str]:
    url = _PYPI.format(quote(name))
    return graph.add(f"{url}#{quote(version)}", "SoftwareApplication", name=name, softwareVersion=version, url=url)


def _add_data(graph: _Graph, record: RunRecord) -> dict[str, str]:
    manifest = quote(str(record.data_manifest))
    name = f"data set of {record.benchmark or 'an unknown benchmark'}{f' {record.size}' if record.size else ''}"
    text = (
        "It is not in the package; the identifier is the sha256 of its manifest, which has the checksum of every file."
    )
    return graph.add(f"#data-{manifest}", "CreativeWork", name=name, description=text, identifier=record.data_manifest)


def _list_variables(nodes: tuple[Facts, ...]) -> list[tuple[str, str]]:
    """List the environment variables in the facts that do not name a place on the machine."""
    found = {(name, value) for facts in nodes for name, value in (facts.slurm | facts.tuning).items()}
    return sorted((name, value) for name, value in found if not _ABSOLUTE.search(value))


def _add_variable(graph: _Graph, name: str, value: str) -> dict[str, str]:
    return graph.add(f"#variable-{quote(name)}={quote(value)}", "PropertyValue", name=name, value=value)


def _render_time(seconds: float) -> str:
    """Render Unix time in ISO 8601 with milliseconds, UTC; 1970 for a time that is out of range."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC).isoformat(timespec="milliseconds")
