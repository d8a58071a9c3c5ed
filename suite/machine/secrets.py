"""Recognises passwords, tokens and keys by a variable's name, their place, their form and their randomness.

The forms of some 200 services are the rules of gitleaks (MIT), kept as data in gitleaks_rules.json.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlhpc.suite import REDACTED

# A name is of a secret if one of its words is one of these: HF_TOKEN, wandb.api_key and authToken, not
# TOKENIZERS_PARALLELISM or max_tokens.
_SECRET_WORDS = frozenset(
    (
        *(
            "APIKEY",
            "TOKEN",
            "SECRET",
            "PASSWORD",
            "PASSWD",
            "PASSPHRASE",
            "PWD",
            "CREDENTIAL",
            "CREDENTIALS",
            "SSHPASS",
        ),
        *("AUTHORIZATION", "BEARER", "COOKIE"),
    )
)
# Without a separator: PGPASSWORD, CLIENTSECRET, AWSACCESSKEY
_SECRET_ENDS = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "TOKEN", "APIKEY", "ACCESSKEY", "ACCOUNTKEY", "SECRETKEY")
_SECRET_LAST = frozenset({"KEY", "SIGNATURE"})  # only as the last word: cache_key_size is none
# The last word of a name that says where a secret is, or how many there are
_NOT_LAST = frozenset(
    ("STDIN", "FILE", "PATH", "DIR", "TYPE", "LENGTH", "SIZE", "COUNT", "PY", "JSON", "YAML", "TXT", "SH")
)
_NOT_SECRET = frozenset({"key", "PWD", "OLDPWD"})  # a JSON key called key, and the shell's working folder
_IN_QUERY = frozenset({"sig", "signature", "key", "auth", "pass", "pwd", "code"})  # of an address

# Before a value: a line that goes on, a tag of YAML or the beginning of a block, the scheme of an Authorization, a
# letter of Python's b"TEXT"
_BEFORE_VALUE = (
    r"""(?:\\\n[ \t]*|[|>][-+]?\n[ \t]+|!!?\w+[ \t]+)?(?:[bfru]{1,2}(?=["']))?(?P<quote>["']?)"""
    r"""(?:(?:Bearer|Basic|Token|Digest|ApiKey|Negotiate)[ \t]+)?"""
)
_NAMED = (
    # Shell, YAML, JSON, Python's os.environ["NAME"] = VALUE, headers, a query of an address
    re.compile(
        r"""(?<![A-Za-z0-9_])(?P<name>[A-Za-z_][\w.-]{0,99})["']?\]?[ \t]*(?::=|=>|[:=](?!=))(?P<blank>[ \t]*)"""
        + _BEFORE_VALUE,
        re.I,
    ),
    # --token VALUE, ["--token", "VALUE"]
    re.compile(r"""(?<![\w-])--(?P<name>[A-Za-z][\w.-]{0,99})(?:[ \t]+|["']\s*,\s*(?=["']))(?P<quote>["']?)"""),
    # csh, fish and Lua modules, settings of tools: setenv NAME VALUE, setenv("NAME", "VALUE"), aws configure set NAME
    # VALUE
    re.compile(
        r"""\b(?:setenv|putenv|setdefault|set[ \t]+-\w+|config(?:ure)?[ \t]+(?:--\w+[ \t]+)*(?:set)?)"""
        r"""[ \t(]+["']?(?P<name>[\w./:@-]+)["']?[ \t,]+(?P<quote>["']?)"""
    ),
)
_UNQUOTED = re.compile(r"""(?:[^\s,;&"'`}\])]|,(?=[^\s,=:"']+(?:[\s"']|$)))+""")  # a comma may be part of a password
_HARMLESS = re.compile(  # a variable of the shell, a place to fill in, a word or a short number
    r"""\$\w+(?:/.*)?|\$\{[^}]*\}?(?:/.*)?|\$\(.*|[<{%*\[(].*|--.*|,.*|[-+.\d]{0,5}|.*REDACTED.*"""
    r"""|true|false|null|none|yes|no|value|\.{3}""",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[].*")
_CODE = re.compile(r"[A-Za-z_]+(?:\.[A-Za-z_]+)+|[A-Za-z_]{0,15}")

# What stands in these places is a secret, whatever its form; the group is what to take out.
_PLACES = tuple(
    re.compile(expression)
    for expression in (
        # User and password of an address; of the web a user alone is a token, except those names
        r"://(?!\$\{?\w+\}?(?::\$\{?\w+\}?)?@)([^\s/\"'?#@:]*:[^\s/\"'?#]+)@",
        r"(?i)https?://(?!(?:git|user|anonymous|guest|oauth2|\$\{?\w+\}?)@)([^\s/\"'?#@:]+)@",
        r"\bBearer[ \t]+((?=[^\s\"']*\d)[\w.~+/=-]{8,})",
        # -u user:password, --user=user:password, -U user%password
        r"(?<![\w-])(?:-[uU]|--(?:proxy-|http-)?user(?:name)?)[ \t=]*[\"']?"
        r"(?![\w.-]+\.py:)[\w.@\\-]+[:%]((?![\d$%:]+(?:[\s\"']|$))[^\s\"']{3,})",
        r"\blftp\b[^\n|;&]{0,300}?[ \t]-u[ \t]*[\"']?[\w.@-]+,([^\s\"'$]+)",
        r"\bsshpass[ \t]+(?:-\w[ \t]+)*?-p[ \t]*[\"']?([^\s\"'$][^\s\"']*)",
        r"\b(?:mysql|mysqldump|mysqladmin|mariadb)\b[^\n|;&]{0,300}?[ \t]-p([^\s\"'$][^\s\"']*)",
        r"\blogin\b[^\n|;&]{0,300}?[ \t]-p[ \t=]*[\"']?([^\s\"'$-][^\s\"']*)",
        r"\bredis-cli\b[^\n|;&]{0,300}?[ \t]-a[ \t]+[\"']?([^\s\"'$][^\s\"']*)",
        r"\b(?:wandb|ngc|kaggle)[ \t]+login[ \t]+(?:--?[\w-]+[ \t]+)*([A-Za-z0-9_-]{20,})",
        r"-pass(?:in|out)?[ \t]+pass:([^\s\"'$]{3,})",  # openssl
        r"\blogin[ \t]+\S+\s+password[ \t]+(\S+)",  # .netrc
        # echo PASSWORD | docker login --password-stdin
        (
            r"\b(?:echo|printf)[ \t]+(?:-n[ \t]+)?[\"']?([^\s\"'$|]+)[\"']?["
            r" \t]*\|[^\n]{0,300}(?:-stdin|--with-token|\bsudo[ \t]+-S)"
        ),
        r"\b(?:login|passwd|with-token|stdin)\b[^\n]{0,300}<<<[ \t]*[\"']?([^\s\"'$]{3,})",
    )
)
SECRET_FORMS = re.compile(
    # GitHub, GitLab, Hugging Face, OpenAI, Slack; of any length, unlike gitleaks'
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-)[\w-]{16,}"
    r"|\b(?:npm_|pypi-|dckr_pat_|nvapi-|gsk_|glsa_|dop_v1_|sk_live_|rk_live_|ya29\.|AIza)(?=[\w-]*\d)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_WORD = re.compile(r"[A-Za-z0-9+/=_-]{20,}")
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_MIN_ENTROPY_BITS = (
    3.7  # per character: English words and paths have 2 to 3.5, 24 random letters and digits 4.2 and more
)

Span = tuple[int, int]


@dataclass(frozen=True)
class _Rule:
    """A rule of gitleaks. It applies to a text that contains one of ``keywords``, in lower case."""

    regex: str
    keywords: tuple[str, ...]
    entropy: float = 0.0
    group: int | None = None

    def find(self, text: str) -> Iterator[Span]:
        """Yield the places of the secrets in a text."""
        for match in re.finditer(self.regex, text):
            group = self.group
            if group is None:  # the first that matched, as gitleaks does; groups with names are parts of a secret
                named = match.re.groupindex
                group = next((n for n, part in enumerate(match.groups(), 1) if part), 0) if not named else 0
            if _compute_entropy_bits(match.group(group)) >= self.entropy:
                yield match.span(group)


def remove_secrets(text: str) -> str:
    """Remove secrets from a text, found by name, place and form.

    Names are HF_TOKEN or apiKey, for example. Places are a header, a flag, an address. Forms are those of passwords and
    tokens.
    """
    for find in (_find_named, find_secret_forms):
        for begin, end in _merge_places(find(text)):
            text = text[:begin] + REDACTED + text[end:]
    return text


def find_secret_forms(text: str) -> Iterator[Span]:
    """Yield the places of secrets that are recognised by form or place, under any name."""
    for pattern in _PLACES:
        yield from (match.span(1) for match in pattern.finditer(text) if not _HARMLESS.fullmatch(match[1]))
    yield from (match.span() for match in SECRET_FORMS.finditer(text))
    lower = text.lower()
    for rule in _read_gitleaks_rules():
        if any(word in lower for word in rule.keywords):
            yield from rule.find(text)


def is_secret_name(name: str) -> bool:
    """Return True if a variable or setting of this name holds a secret, judged by the words of the name."""
    if name in _NOT_SECRET:
        return False
    words = re.split(r"[_.-]", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())
    if words[-1] in _NOT_LAST:
        return False
    if not _SECRET_WORDS.isdisjoint(words) or words[-1] in _SECRET_LAST or (name.isupper() and words[-1] == "PASS"):
        return True
    return words[-1].endswith(_SECRET_ENDS)


def has_random_word(text: str) -> bool:
    """Return True if a text has a word that looks random, as tokens and keys do. Words and paths of people do not.

    Such a word has at least 20 characters, letters of both cases and digits, and many different ones. 32 hexadecimal
    digits count too.
    """
    return any(_is_random(word) for word in _WORD.findall(text)) or _HEX.search(text) is not None


def remove_random_words(text: str) -> str:
    """Replace random-looking words in a text, except hexadecimal ones: most are checksums."""
    return _WORD.sub(lambda match: REDACTED if _is_random(match.group()) else match.group(), text)


def remove_secret_value(name: str, value: str) -> str:
    """Return the value of an environment variable, or `REDACTED` if name, form or randomness make it a secret."""
    secret = is_secret_name(name) or any(find_secret_forms(value)) or has_random_word(value)
    return REDACTED if secret else remove_secrets(value)


@cache
def _read_gitleaks_rules() -> tuple[_Rule, ...]:
    document = json.loads(Path(__file__).with_name("gitleaks_rules.json").read_text(encoding="utf-8"))
    return tuple(
        _Rule(rule["regex"], tuple(rule["keywords"]), rule.get("entropy", 0.0), rule.get("secretGroup"))
        for rule in document["rules"]
    )


def _find_named(text: str) -> Iterator[Span]:
    """Yield the places of values whose names are those of secrets."""
    for pattern in _NAMED:
        for match in pattern.finditer(text):
            name = match["name"]
            in_query = text[match.start() - 1 : match.start()] in ("?", "&")
            if is_secret_name(name) or (in_query and name.lower() in _IN_QUERY):
                span = _find_value(text, match)
                if span is not None and (in_query or not _is_code(match, text[slice(*span)])):
                    yield span


def _find_value(text: str, match: re.Match[str]) -> Span | None:
    """Return the place of the value that follows a name, without its quotes. None if it is no secret."""
    quote = match["quote"]
    pattern = re.compile(rf"(?:[^{quote}\\\n]|\\.)*") if quote else _UNQUOTED
    found = pattern.match(text, match.end())
    return None if found is None or _HARMLESS.fullmatch(found.group()) else found.span()


def _is_code(match: re.Match[str], value: str) -> bool:
    """Return True if an unquoted value is an expression, a type, or a word of prose: ``token: str``, ``key = row[``.

    A password may be a word. Tokens and keys have digits, or are long.
    """
    name = match["name"]
    if match["quote"]:
        return False
    if _CALL.fullmatch(value) or (not name.isupper() and _NUMBER.fullmatch(value)):
        return True
    blank = match.groupdict().get("blank")
    if blank is None or _is_password(name) or (name.isupper() and not blank):
        return False
    return _CODE.fullmatch(value) is not None


def _is_password(name: str) -> bool:
    return re.search(r"pass|pwd|secret|credential", name, re.IGNORECASE) is not None


def _merge_places(spans: Iterator[Span]) -> list[Span]:
    """Return the places, overlapping ones joined, from last to first. Then one can be replaced after another."""
    joined: list[Span] = []
    for begin, end in sorted(set(spans)):
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined[::-1]


def _is_random(word: str) -> bool:
    kinds = (str.islower, str.isupper, str.isdigit)
    if "/" in word.strip("/") or not all(any(map(kind, word)) for kind in kinds):
        return False
    return _compute_entropy_bits(word) >= _MIN_ENTROPY_BITS


def _compute_entropy_bits(word: str) -> float:
    """Return the entropy of a word's characters, in bits per character."""
    return -sum(count / len(word) * math.log2(count / len(word)) for count in Counter(word).values())
