"""Removes secrets from the files of a package; host names, paths and accounts only if the submitter asks.

Logs are never edited. A log with such a word is an error.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mlhpc.suite import REDACTED
from mlhpc.suite.errors import InputError
from mlhpc.suite.machine.facts import Facts
from mlhpc.suite.machine.secrets import find_secret_forms, remove_secrets

KINDS = ("hosts", "paths", "account")

# The characters before it exclude URLs, host:path and paths that begin with a variable.
_PATH = re.compile(r"(?<![\w.$:/@-])~?(?:/[\w.@%+=,{}$*-]+)+/?")
# Paths below these folders are the same on all machines.
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", "/run", "/var", "/boot")
_ACCOUNT = re.compile(  # -A is an account for Slurm only: od -An and grep -A 30 have one too
    r"""(?:--account[= ]|^\#SBATCH[ \t][^\n]*?(?<=[ \t])-A[ \t=]*
    |\b(?:srun|sbatch|salloc)[ \t](?:[^\n|;&]*?[ \t])?-A[ \t=]+|(?:SLURM_JOB|SBATCH|SALLOC|SLURM)_ACCOUNT\W+)
    ["']?(?!\d+\b)([\w.@+-]{2,})""",
    re.MULTILINE | re.VERBOSE,
)
_NODE_LISTS = re.compile(r'("SLURM\w*_NODELIST": )"[^"]*"')


@dataclass(frozen=True)
class PersonalNames:
    """The personal names in the files of some run folders: host names, accounts, the name of the user."""

    hosts: tuple[str, ...]
    accounts: tuple[str, ...]
    user: str

    @staticmethod
    def collect(nodes: Iterable[Facts], texts: Iterable[str], others: Iterable[str] = ()) -> PersonalNames:
        """Collect the names in the facts of nodes and in job scripts (``texts``), and further hosts (``others``)."""
        hosts = dict.fromkeys(name for facts in nodes for name in (facts.node, facts.hostname) if name)
        hosts |= dict.fromkeys(others)
        accounts = dict.fromkeys(name for text in texts for name in _ACCOUNT.findall(text))
        return PersonalNames(tuple(hosts), tuple(accounts), _find_user())


@dataclass(frozen=True)
class Redaction:
    """Replaces secrets in a text, and the personal words of some ``kinds`` of `KINDS`."""

    personal: PersonalNames
    kinds: Collection[str]

    def apply(self, text: str) -> str:
        """Return the text without secrets and, if asked for, without host names, personal paths and accounts."""
        text = remove_secrets(text)
        if "account" in self.kinds:
            for name in self.personal.accounts:
                text = re.sub(_match_whole_word(name), "REDACTED-ACCOUNT", text)
        if "paths" in self.kinds:
            text = _PATH.sub(_short_path, text)
        if "hosts" in self.kinds:
            # A list such as node[1-4] contains no whole name that an alias could replace.
            text = _NODE_LISTS.sub(rf'\1"{REDACTED}"', text)
            for name in sorted(self.personal.hosts, key=len, reverse=True):  # node1.site before node1
                text = re.sub(_match_whole_word(name), self.alias(name), text)
        return text

    def alias(self, host: str) -> str:
        """Return a host's name in the package, ``node<i>`` in order of the facts.

        All names of a host have one alias.
        """
        short = list(dict.fromkeys(name.partition(".")[0] for name in self.personal.hosts))
        return f"node{short.index(host.partition('.')[0]) + 1}"

    def name(self, path: Path) -> Path:
        """Return the name of a file in the package. A file of facts is named after its node's alias."""
        if "hosts" in self.kinds and path.stem in self.personal.hosts:
            return path.with_name(self.alias(path.stem) + path.suffix)
        return path

    def check_log(self, path: Path) -> None:
        """Raise InputError if a log, which is never edited, contains a secret or a word to redact."""
        text = path.read_text("utf-8", "replace")
        self.check_secrets(path, text)
        for number, line in enumerate(text.splitlines(), 1):
            for kind, what in self.find(line):
                if kind in self.kinds:
                    raise InputError(
                        f"{path}:{number}: --redact {kind}: contains {what!r}; logs are never edited, "
                        f"so leave --redact {kind} or this run out"
                    )

    @staticmethod
    def check_secrets(path: Path, text: str) -> None:
        """Raise InputError if a file that is never edited contains a secret."""
        secret = min(find_secret_forms(text), default=None)
        if secret is not None:
            number = text.count("\n", 0, secret[0]) + 1
            what = "contains what looks like a password or token; this file is never edited"
            raise InputError(f"{path}:{number}: {what}, so leave this run out")

    def find(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (kind, words) for the personal words in a text, each once."""
        names = (("hosts", self.personal.hosts), ("account", self.personal.accounts))
        for kind, values in names:
            yield from ((kind, name) for name in values if re.search(_match_whole_word(name), text))
        paths = dict.fromkeys(match.group() for match in _PATH.finditer(text))
        yield from (("paths", path) for path in paths if self._is_personal(path))

    def _is_personal(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        return path.startswith(("/home/", "/Users/", "/root/", "~")) or (len(parts) > 1 and self.personal.user in parts)


def describe_personal_words(personal: Sequence[tuple[Path, str, str]]) -> Iterator[str]:
    """Yield one line per kind: the personal words and their files. ``personal`` has file, kind and words."""
    for kind in KINDS:
        found = [(path, what) for path, of, what in personal if of == kind]
        if found:
            words = list(dict.fromkeys(what for _, what in found))
            files = list(dict.fromkeys(path.as_posix() for path, _ in found))
            more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            shown = ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
            yield f"personal data: {kind} {shown} in {files[0]}{more}; --redact {kind} removes them"


def _short_path(match: re.Match[str]) -> str:
    """Shorten a path to its last component. Paths of the operating system say nothing about a person and stay."""
    path = match.group()
    if path.startswith(tuple(f"{folder}/" for folder in _SYSTEM_FOLDERS)) or path in _SYSTEM_FOLDERS:
        return path
    return f"/{REDACTED}/{PurePosixPath(path).name}"


def _match_whole_word(name: str) -> str:
    return rf"(?<![\w.-]){re.escape(name)}(?![\w-])"


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return ""
