"""Renders the environment of a package's runs as a requirements file, for pip or uv, offline too."""

from __future__ import annotations

from pathlib import Path

from mlhpc.suite.documents import read_json_document
from mlhpc.suite.errors import InputError
from mlhpc.suite.log.limits import read_limits
from mlhpc.suite.log.origin.installed import ENVIRONMENT_VERSION, Environment, convert_distribution_name

SUITE = "mlhpc"
_IN_PACKAGE = "benchmarks/*/implementations/mlhpc-*/*/*/provenance/run_*/environment.json"


def find_environment(package: Path) -> Environment:
    """Find the environment of a package's runs. InputError if there is none, or if they had several."""
    paths = [
        path
        for path in sorted(package.glob(_IN_PACKAGE))
        if not any(part.is_symlink() for part in (path, *path.parents) if part != package)
    ]
    if not paths:
        raise InputError(f"{package}: no environment.json in its provenance; only packages of runs by mlhpc have one")
    found = [
        read_json_document(path, Environment, "an environment", ENVIRONMENT_VERSION, largest=read_limits().json)
        for path in paths
    ]
    for path, environment in zip(paths, found, strict=True):
        if environment != found[0]:
            raise InputError(
                f"{package}: its runs were made with different packages or Pythons, expected the same for all: "
                f"compare {paths[0]} and {path}"
            )
    return found[0]


def render_requirements(environment: Environment) -> str:
    """Render every distribution but the suite itself with its version.

    Names and versions fit the patterns of `InstalledPackage`, so a package cannot bring options of pip in.
    """
    lines = [f"# {environment.python} on {environment.machine}"]
    for each in environment.distributions:
        if convert_distribution_name(each.name) == SUITE:
            lines.append(f"# {SUITE} {each.version}: install it from its checkout or wheel")
        # No index has the state of that checkout.
        elif each.source == "editable":
            lines.append(f"# {convert_distribution_name(each.name)}=={each.version}: was installed from a checkout")
        else:
            lines.append(f"{convert_distribution_name(each.name)}=={each.version}")
    return "\n".join(lines) + "\n"
