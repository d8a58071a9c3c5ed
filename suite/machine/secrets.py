"""Recognises passwords, tokens and keys by a variable's name, by their form and by their randomness."""

from __future__ import annotations

import math
import re
from collections import Counter

from suite import REDACTED

# A name is of a secret if one of its words is one of these: HF_TOKEN and wandb.api_key, not TOKENIZERS_PARALLELISM or
# max_tokens
_SECRET_WORDS = frozenset(
    (
        *("KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "CREDENTIAL", "CREDENTIALS"),
        *("AUTHORIZATION", "BEARER"),
    )
)
_NOT_SECRET = frozenset({"key", "PWD", "OLDPWD"})  # a JSON key called key, and the shell's working folder
_VALUE = r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,;"'}\]]+)"""
_ASSIGNED = (
    re.compile(r"""(?P<name>[A-Za-z_][\w.-]*)(?P<between>["']?[ \t]*[:=][ \t]*)""" + _VALUE),  # shell, YAML, JSON
    re.compile(
        r"""(?<=--)(?P<name>[A-Za-z][\w.-]*)(?P<between>[ \t]+|"\s*,\s*(?="))""" + _VALUE
    ),  # --token VALUE, ["--token", "VALUE"]
)
_HARMLESS = re.compile(r"""["']?(?:\$.*|[-+.\d]{0,5}|true|false|null|none|yes|no|REDACTED)["']?""", re.IGNORECASE)
SECRET_VALUES = re.compile(
    r"(?<=://)[^\s/:@\"']*:[^\s/@\"']+(?=@)"  # user:password of an address
    # GitHub, GitLab, Hugging Face, OpenAI, Slack
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # JSON web token
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_WORD = re.compile(r"[A-Za-z0-9+/=_-]{20,}")
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_LEAST_BITS = 3.7  # per character: English words and paths have 2 to 3.5, 24 random letters and digits 4.2 and more


def redact_secrets(text: str) -> str:
    """Replace the values of names such as HF_TOKEN or api_key, and what has the form of a password or token."""
    for pattern in _ASSIGNED:
        text = pattern.sub(_without_secret, text)
    return SECRET_VALUES.sub(REDACTED, text)


def is_secret_name(name: str) -> bool:
    """True if a variable or setting of this name holds a secret, judged by the words of the name."""
    if name in _NOT_SECRET:
        return False
    return not _SECRET_WORDS.isdisjoint(re.split(r"[_.-]", name.upper()))


def looks_random(text: str) -> bool:
    """True if a text holds a word that looks drawn at random, as tokens and keys do. Words and paths of people do not.

    A word of 20 characters or more with letters of both cases and digits, and many different ones; or 32 hexadecimal
    digits.
    """
    return any(_is_random(word) for word in _WORD.findall(text)) or _HEX.search(text) is not None


def redact_random(text: str) -> str:
    """Replace in a text the words that look random, except hexadecimal ones: most of those are checksums."""
    return _WORD.sub(lambda match: REDACTED if _is_random(match.group()) else match.group(), text)


def redact_variable(name: str, value: str) -> str:
    """The value of an environment variable, or `REDACTED` if by its name, form or randomness it is a secret."""
    secret = is_secret_name(name) or SECRET_VALUES.search(value) is not None or looks_random(value)
    return REDACTED if secret else redact_secrets(value)


def _is_random(word: str) -> bool:
    kinds = (str.islower, str.isupper, str.isdigit)
    if "/" in word.strip("/") or not all(any(map(kind, word)) for kind in kinds):
        return False
    counts = Counter(word)
    bits = -sum(count / len(word) * math.log2(count / len(word)) for count in counts.values())
    return bits >= _LEAST_BITS


def _without_secret(match: re.Match[str]) -> str:
    value = match["value"]
    if not is_secret_name(match["name"]) or _HARMLESS.fullmatch(value):
        return match.group()
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['name']}{match['between']}{quote}{REDACTED}{quote}"
