"""Recognises passwords, tokens and keys by a variable's name, by the structure around, by form and randomness.

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
from itertools import accumulate, chain, pairwise
from pathlib import Path

from mlhpc.suite import REDACTED

# A name is of a secret if one of its words is one of these: HF_TOKEN, wandb.api_key and authToken, not
# TOKENIZERS_PARALLELISM or max_tokens.
_SECRET_WORDS = frozenset(
    (
        *("APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE"),
        *("PASSKEY", "PWD", "PW", "PSK", "CREDENTIAL", "CREDENTIALS", "CRED", "CREDS"),
        *("SSHPASS", "AUTHORIZATION", "BEARER", "COOKIE", "JWT"),
    )
)
# Parts of names in other languages
_SECRET_PARTS = re.compile(
    "PASSWORT|KENNWORT|GEHEIM|MOTDEPASSE|MOTPASSE|CONTRASE[NÑ]A|SENHA|SEGREDO|SECRETO|SEGRETO|WACHTWOORD|L[OÖ]SENORD"
    "|PASSORD|ADGANGSKODE|SALASANA|HAS[LŁ]O|HESLO|JELSZ[OÓ]|PAROLA|PAROLD|[SŞ][IİI]FRE|LOZINKA|JETON|CLAVEDEACCESO|CLAVESECRETA"
    "|ПАРОЛЬ|ПАРОЛА|СЕКРЕТ|ТОКЕН|ΚΩΔΙΚ|ΣΥΝΘΗΜΑ"
    "|密码|密碼|口令|パスワード|비밀번호|암호|סיסמה|كلمةالمرور|पासवर्ड"
)
# Without a separator: PGPASSWORD, CLIENTSECRET, AWSACCESSKEY
_SECRET_ENDS = (
    *("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "TOKEN", "SESSIONID", "SESSID"),
    *(f"{of}KEY" for of in ("API", "ACCESS", "ACCOUNT", "SECRET", "PRIVATE", "SHARED", "MASTER")),
    *(f"{of}KEY" for of in ("SIGNING", "ENCRYPTION", "LICENSE", "AUTH", "SUBSCRIPTION")),
    *("MASTERAUTH", "KEYDATA"),
    *(f"{of}PASS" for of in ("STORE", "KEY", "REQUIRE", "PROXY", "MAIL", "SMTP", "LDAP", "CERT")),
    *(f"{of}{word}" for of in ("BIND", "ROOT", "ADMIN", "USER", "DB") for word in ("PASS", "PW")),
)
# Only last: cache_key_size is none
_SECRET_LAST = frozenset({"KEY", "SIGNATURE", "AUTH", "CLAVE", "CHIAVE", "SCHLUESSEL", "SCHLÜSSEL"})
_ALWAYS_LAST = _SECRET_WORDS | _SECRET_LAST - {"KEY"}  # whose values are secrets even if they are words
# The last word of a name that says where a secret is, or how many there are
_NOT_LAST = frozenset(
    (
        *("REF", "POLICY", "NAME", "ENV", "STDIN", "FILE", "PATH", "DIR", "JAR", "URL"),
        *("TYPE", "DTYPE", "LENGTH", "SIZE", "COUNT", "PY", "JSON", "YAML", "TXT", "SH"),
        *("SCHEME", "METHOD", "ALGORITHM", "MODE", "FORMAT", "PROVIDER", "BACKEND"),
    )
)
_FOLDERS = frozenset({"PWD", "OLDPWD"})  # of the shell, if the value is a path: PWD=VALUE is a password of ODBC
_NOT_SECRET = _FOLDERS | {"key"}  # a JSON key called key
_PATH = re.compile(r"[~/.$]|[A-Za-z]:[\\/]")
# Between separators, an identifier has words with a number, and sizes: nid001234, train_2048x2048, conv2d, 300B20x
_PART_OF_IDENTIFIER = re.compile(r"(?:[A-Z]?[a-z]{1,15}|[A-Z]{1,15})(?:\d{0,6}|[123]d)|(?:\d{1,10}[A-Za-z]{0,2}){1,2}")
_IN_QUERY = frozenset({"sig", "signature", "key", "auth", "pass", "pwd", "code"})  # of an address

_ECHO = r"""(?:echo|printf|yes|print|cat[ \t]+<<<)[ \t]+(?:-\w+[ \t]+|["']%s(?:\\n)?["'][ \t]+)*"""
# Before a value: a line that goes on, a tag, anchor or beginning of a block of YAML, one word on an indented line of
# its own, the scheme of an Authorization, a letter of Python's b"TEXT" or the shell's $'TEXT'
_BEFORE_VALUE = (
    rf"""(?:["']?(?:\$\(|`)[ \t]*{_ECHO})?"""
    r"""(?:\\\n[ \t]*|[|>][-+]?\n[ \t]+|(?:!!?|&)\w+[ \t]+|(?:[\w.]{1,50}\(default=|\(\s*+)(?=["'])"""
    r"""|\n[ \t]+(?=["'](?!["'])|(?!["']|[\w.-]+(?:=[^\s=]|:\s))[^\s#-]\S*[ \t]*(?:\n|\Z)))?"""
    r"""(?:(?:[bfru]{1,2}|\$)(?=["']))?(?P<quote>\"{3}|'{3}|["']?)(?:(?<=\"{3}|'{3})\s+)?"""
    r"""(?:(?:Bearer|Basic|Token|Digest|ApiKey|Negotiate)[ \t]+)?"""
)
# A type: str, &'a str, Option<String>
_TYPE = r"""(?:&(?:'\w+[ ])?)?[A-Za-z_][\w.:]{0,50}[?!]?(?:[<\[][^\n]{0,99}?[>\]])?"""
# A value of at least eight characters with letters and digits, as passwords have and prose has not
_STRONG = r"(?=[\w+/=.@#!%^*-]*\d)(?=[\w+/=.@#!%^*-]*[A-Za-z])(?=[\w+/=.@#!%^*-]{8})"
_NAMED = (
    # Shell, YAML, JSON, Python's os.environ["NAME"] = VALUE, headers, a query of an address, NAME: TYPE = VALUE
    re.compile(
        r"""(?<!\w)(?P<name>mots?[ ]de[ ]passe|[^\W\d][\w.-]{0,99})"""
        r"""(?=["']?(?:\]|\}(?=[ \t]*=[ \t]*["']))?(?:[ ]<const>)?[ \t\xa0]*"""
        rf"""(?::[ \t]*{_TYPE}(?:[ \t]*\|[ \t]*{_TYPE}){{0,3}}(?=[ \t]+=[ \t]|=["'])[ \t]*)?"""
        r"""(?:=>|[:+?]=|::(?=[ ])|[:=：](?!=)|\{(?=["'][^"'\n]{1,200}["']\}))"""
        r"""(?P<blank>[ \t]*)""" + _BEFORE_VALUE + "(?P<after>))",
        re.I,
    ),
    # --token VALUE, ["--token", "VALUE"], after one dash as of Java's and PuTTY's tools. Openssl's -key is a file
    re.compile(
        r"""(?<![\w-])-(?P<flag>-)?(?P<name>[A-Za-z][\w.-]{0,99})(?:[ \t]+|["']\s*,\s*(?=["']))"""
        r"""(?P<quote>["']?)(?=[^\s-])"""
    ),
    # csh, fish and Lua modules, settings of tools: setenv NAME VALUE, setenv("NAME", "VALUE"), configure set NAME VALUE
    re.compile(
        r"""\b(?:(?:set|put|push)env|setdefault|set[ \t]+-\w+|config(?:ure)?[ \t]+(?:--\w+[ \t]+)*(?:set)?|printf[ \t]+-v)"""
        r"""[ \t(]+["']?(?P<name>[\w./:@-]+)["']?[ \t,]+(?:["']?%s["']?[ \t]+)?(?P<quote>["']?)"""
    ),
    # An element of XML, with its name as its tag or in an attribute
    re.compile(r"""<(?:\w+:)?(?P<name>\w[\w.-]{0,99})(?:\s[^<>]*)?>\s*(?:<!\[CDATA\[)?(?P<quote>)(?=[^\s<])"""),
    re.compile(
        r"""<\w[^<>]*?\s(?:name|key|id|property)=["'](?P<name>[^"'<>]{1,100})["'][^<>]*>"""
        r"""(?:\s*<value>)?\s*(?P<quote>)(?=[^\s<])""",
        re.I,
    ),
    # Name and value apart: an item of a list in YAML, JSON, XML or on a command line
    re.compile(
        r"""(?<![a-z])(?:\w{0,40}?(?:name|key|variable|field|property|option|setting|param|parameter|id)|n|k)["']?"""
        r"""(?:[ \t]*[:=][ \t]*["']?|>\s*)(?P<name>[^\W\d][\w.-]{0,99})(?:["',;]|</\w+>|\s(?:#[^\n]{0,200})?)++"""
        r"""(?:["']?\w+["']?[ \t]*[:=][^\n,{}]{0,200}[\n,]\s*+){0,2}[ \t\n<{-]*+["']?"""
        r"""(?:\w{0,40}?(?:value|val|content|default|data|literal|text)|v)["']?"""
        r"""(?:[ \t]*[:=](?P<blank>[ \t]*)|>\s*)(?:[|>][-+]?\n[ \t]+)?(?P<quote>["']?)""",
        re.I,
    ),
    # Headers: all cookies, and all parameters of an Authorization
    re.compile(
        r"""(?<!\w)(?P<name>(?:set-|proxy-)?(?:cookie|authorization))["']?[ \t]*:[ \t]*(?P<quote>["']?)"""
        r"""(?P<value>(?:[\w-]+[ \t]+)?(?:[\w.-]+=(?:\\?"[^"\n]*"|[^\s;,"']*)[;, \t]*+)++)""",
        re.I,
    ),
    # A row of a table: | NAME | VALUE |
    re.compile(r"""\|[ \t]*[`*]*(?P<name>[A-Za-z][\w.-]{0,99})[`*]*[ \t]*\|[ \t]*(?P<quote>["'`]?)""" + _STRONG),
    # What a file or variable is filled with: read NAME <<EOF, cat > NAME <<EOF, echo VALUE > NAME
    re.compile(
        r"""(?<![\w.-])\.?(?P<name>[A-Za-z][\w.-]{0,99})["']?[ \t]*<<-?[ \t]*["']?\w+["']?\n[ \t]*(?P<quote>)"""
    ),
    re.compile(
        r"\b" + _ECHO + r"""(?P<quote>["']?)(?P<value>[^\s"'$|<>]+?)"""
        r"""(?:\\n)?["']?[ \t]*>{1,2}[ \t]*["']?(?:[^\s|;&<>"']*/)?\.?(?P<name>[A-Za-z][\w.-]{0,99})(?=["'\s;&|)]|\Z)"""
    ),
    # A section with the name of a secret, as of TOML: [[secrets]], then data = "VALUE"
    re.compile(
        r"""(?m)^[ \t]*\[{1,2}["']?(?P<name>\w[\w.-]{0,99})["']?\]{1,2}[ \t]*\n(?:[ \t]*[\w#-][^\n\[]{0,200}\n|[ \t]*\n){0,9}?"""
        r"""[ \t]*(?:value|val|content|data|literal|text)[ \t]*[:=][ \t]*(?P<quote>["']?)"""
    ),
    # The same, the value first
    re.compile(
        r"""(?<![a-z])(?P<before>(?:value|val|content)["']?[ \t]*[:=][ \t]*(?P<quote>["']?))"""
        r"""(?P<value>[^\s"',;}]+)["']?[ \t]*[,;\n]?[ \t\n-]*["']?(?:name|key)["']?[ \t]*[:=][ \t]*["']?"""
        r"""(?P<name>[^\W\d][\w.-]{0,99})""",
        re.I,
    ),
    re.compile(
        r"""\bvariable[ \t]+["'](?P<name>\w+)["'][ \t]*\{(?:[^{}]*?\n)?[ \t]*default[ \t]*=[ \t]*(?P<quote>["'])"""
    ),
    # A name of a secret, then a word with letters and digits: hf_token .... VALUE, with token VALUE
    re.compile(
        r"""(?<![\w-])(?P<bare>)(?P<name>[A-Za-z]\w*(?:[._-]\w+)+|(?:api|access)[ ]key|token|bearer"""
        r"""|pass(?:word|wd|phrase)?|masterauth|\w{1,99}p(?:w|ass(?:word)?))[ \t]+"""
        r"""(?![a-z]+=)(?:<<<[ \t]*|\.{3,}[ \t]+|--plaintext[ \t]+)?"""
        r"""(?P<quote>["']?)""" + _STRONG,
        re.I,
    ),
    # ["password", "VALUE"], config.set("token", "VALUE"), add_argument("--token", default="VALUE")
    re.compile(
        r"""["'](?:--)?(?P<name>[A-Za-z][\w.-]{0,99})["'][ ]*,\s*(?:[^()\n]{0,200}?\bdefault[ ]*=[ ]*)?"""
        r"""[bfr]?(?P<quote>["'])""" + _STRONG
    ),
    # pass: VALUE, storagePass=VALUE
    re.compile(
        r"""(?<!\w)(?P<certain>)(?P<name>(?:\w{0,99}(?:_|[a-z](?-i:(?=P))))?pass)["']?[ \t]*[:=][ \t]*"""
        r"""(?P<quote>["']?)""" + _STRONG,
        re.I,
    ),
    # The key of a user: {"username": "ada", "key": "VALUE"}, or the key first
    re.compile(
        r"""\b(?P<certain>)user(?:_?name)?["']?[ \t]*[:=][ \t]*["']?[\w.@-]{1,99}["']?[ \t]*[,;\n]\s*+["']?"""
        r"""(?P<name>key)["']?[ \t]*[:=][ \t]*(?P<quote>["']?)""" + _STRONG,
        re.I,
    ),
    re.compile(
        r"""(?<![\w.-])(?P<certain>)(?P<name>key)["']?[ \t]*[:=][ \t]*(?P<quote>["']?)"""
        + _STRONG
        + r"""(?=[^\s"',;]{8,200}["']?[ \t]*[,;\n]\s*+["']?user(?:_?name)?["']?[ \t]*[:=])""",
        re.I,
    ),
)
# A comma may be part of a password
_UNQUOTED = re.compile(r"""(?:[^\s,;&"'`}\])<]|<(?!/)|,(?=[^\s,=:"']+(?:[\s"']|$)))+""")
_HARMLESS = re.compile(  # a variable of the shell, a place to fill in, a word, a measured or short number
    r"""\$(?:\w+|\{[^}]*\}?)(?:/.*)?|(?:\$\(|[<{%*\[(,]|--).*|[A-Za-z][\w.-]*:|.*REDACTED.*|[-+?=.\d]{0,5}"""
    r"""|\d+(?:\.\d+[a-z/]{0,9}|[mun]s)|0x[\da-f]{1,8}|see|true|false|null|none|yes|no"""
    r"""|value|name|id|key|index|string|files|compat|include|omit|same-origin|\.{3}""",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_CALL = re.compile(r"[A-Za-z_][\w.]*[(\[].*")
_CODE = re.compile(r"[A-Za-z_]+(?:\.[A-Za-z_]+)+|[A-Za-z_-]{0,15}")

# Words in turn after the name of a tool: rclone config create R TYPE NAME VALUE
_TOOL = re.compile(
    r"\b(?:rclone|dvc[ \t]+remote|s3cmd|npm[ \t]+(?:config[ \t]+)?set|pulumi|consul|etcdctl|redis-cli|hf|composer"
    r"|doppler|chamber|vault|gh[ \t]+(?:secret|variable)|fly(?:ctl)?|heroku|pass|keyring|credstash|poetry|bundle|nmcli)"
    r"(?P<rest>[ \t][^\n|;&]*)"
)
_WORDS = re.compile(
    r"""(?<=[ \t])(?P<name>[A-Za-z][\w./-]{0,99})[ \t]+(?=(?P<quote>["']?)(?P<value>[^\s"'=|;&<>-][^\s"']*))"""
)

# Documents of Kubernetes, separated by lines of ---
_DOCUMENT = re.compile(r"(?:(?!\n---)[\s\S])+")
_KIND_SECRET = re.compile(r"""(?<!\w)["']?kind["']?:\s*["']?Secret\b|\bsecretGenerator:""")
_DATA = re.compile(
    r"""(?m)^(?P<indent>[ \t]*)(?:stringData|data|literals):[ \t]*\n"""
    r"""(?P<yaml>(?:(?P=indent)[ \t-][ \t]*\S[^\n]*(?:\n|\Z)|[ \t]*\n)+)"""
    r"""|["']?\b(?:stringData|data)["']?:\s*\{(?P<json>[^{}]*)\}"""
)
_ENTRY = re.compile(
    r"""(?m)^[ \t]*+(?:-[ \t]+)?+(?:["']?[\w.-]+["']?(?::[ \t]+|:$|=(?=[^\s=])))?+["']?([^\s"'#|>][^\n"']*)"""
)
_ENTRY_OF_JSON = re.compile(r"""["']?[\w.-]+["']?\s*:\s*["']?([^\s"',{}]+)""")
# A dictionary: cookies={"session": "VALUE"}
_DICTIONARY = re.compile(
    r"""(?i)\b\w{0,40}(?:cookies?|secrets?|credentials?)["']?[ \t]*[:=][ \t]*\{(?P<json>[^{}]*)\}"""
)
# Tables: SQL's INSERT, then CSV, Markdown, psql
_INSERT = re.compile(r"(?i)\binsert\s+into\s+[^\s(]+\s*\(([^()]*)\)\s*values\s*(?=\()")
_TUPLE = re.compile(r"\s*,?\s*\(((?:'(?:[^'\\]|''|\\.)*'|[^'()])*)\)")
_ITEM = re.compile(r"""\s*(?:'((?:[^'\\]|''|\\.)*)'|[^,']*)\s*(?:,|$)""")
_HEADING = re.compile(
    r"""(?m)^[ \t|]*+["'`*]*[^\W\d][\w .-]{0,40}["'`*]*(?P<separator>[,;|\t])"""
    r"""(?:[ ]*+["'`*]*[^\W\d][\w .-]{0,40}["'`*]*(?:(?P=separator)[ ]*+|$))+$"""
)
_ROW = re.compile(r"\n([^\n]+)")
_RULE = re.compile(r"[-+|: \t=]+")
_CELL = re.compile(r"""[ \t"'`*]*((?=\S*[A-Za-z])(?=\S*[\d!$%&*+?@^])[^\s"'`*]{6,})""")
_LIST = re.compile(r"""\[\s*(?:(?:"[^"\n]{0,999}"|'[^'\n]{0,999}')\s*(?:,\s*|(?=\]))){2,}\]""")  # of strings alone
_COMMAND = re.compile(r"(?:\\\n|[^\n|;&])++")
# A command that logs in to a server names it, or is called a client. Those of schedulers have users and projects alone.
_CLIENT = re.compile(
    r"://|[ \t](?:--host(?:name)?|-[hHr])[ \t=]+[\w.]|\b\w*(?:-shell|client|cli|sql|admin|_pub|_sub)\b"
)
_OF_SECRET = re.compile(r"""--from-literal[ \t=]+["']?[\w.-]+=["']?([^\s"'$]+)""")
_AFTER_USER = re.compile(
    r"[ \t](?:-[uUla]|--user(?:name)?)[ \t=]*[\w.@\\-]+[ \t](?:[^\n|;&]{0,100}?[ \t])?-[pPw][ \t=]*[\"']?"
    + _STRONG
    + r"([^\s\"'$]+)"
)


def _match_flag(tools: str, flag: str, value: str = r"[^\s\"'$-][^\s\"']*") -> str:
    """Match a short flag of some tools, and its value as the group."""
    return rf"\b(?:{tools})\b[^\n|;&]{{0,300}}?[ \t]{flag}[\"']?({value})"


_ASKING = (  # tools that read a password from their input
    r"kinit|kpasswd|k5start|su|passwd|chpasswd|gpg|openssl|cryptsetup|vncpasswd|smbpasswd|htpasswd|ssh-add|vault|expect"
    r"|smbclient|nmcli|mutt|ansible-vault|docker|podman|helm|sshpass|gh|glab|wandb|hf|huggingface-cli|npm|twine"
    r"|iinit|myproxy\S*"
)
_ASKS = (
    r"(?:[^\n]{0,300}(?:(?:[-_]|-pass(?:in)?[ \t]+)stdin|--with-token|passphrase-fd|\bsudo[ \t]+-S)"
    rf"|[ \t]*(?:{_ASKING})\b)"
)
# What stands in these places is a secret, whatever its form; the group is what to take out.
_PLACES = tuple(
    re.compile(expression)
    for expression in (
        # Positional words of tools
        r"\bmc[ \t]+(?:alias[ \t]+set|config[ \t]+host[ \t]+add)(?:[ \t]+\S+){3}[ \t]+[\"']?([^\s\"'$]+)",
        r"\b(?:htpasswd|vncpasswd)[ \t]+-\w*b\w*(?:[ \t]+\S+){2}[ \t]+[\"']?([^\s\"'$]+)",
        # The last word after what is done with a secret: rclone obscure X, bw unlock X, rabbitmqctl add_user U X
        r"\b(?:obscure|r?bw[ \t]+unlock|unseal|\w+ctl[ \t]+add_user|change_password|set_password|encrypt_string|hash-password)"
        r"(?:[ \t]+[^\s|;&]+){0,3}?[ \t]+[\"']?([^\s\"'$/|;&-][^\s\"'/|;&]*)[\"']?[ \t]*(?=$|[\n|;&])",
        r"(?m)^[\w.*-]+:(?:\d+|\*):[\w.*-]+:[\w.*-]+:" + _STRONG + r"(\S+)$",  # .pgpass
        r"(?i)\bidentified[ ]+(?:with[ ]+\S+[ ]+)?(?:by|as)[ ]+(?:password[ ]+)?[\"']([^\"'\n]+)[\"']",  # SQL
        r"\bhttp-basic\.\S+[ \t]+\S+[ \t]+[\"']?([^\s\"'$]+)",  # of poetry
        r"\biwconfig\b[^\n]*?[ \t](?:key|enc)[ \t]+(?:s:)?([^\s\"'$]+)",
        r"\bnet[ \t]+use\b[^\n]*?[ \t](?:/user:|\\\\)\S+[ \t]+([^\s\"'$/*]+)",
        r"\b(?:iinit|(?:wandb|ngc|kaggle|comet|neptune|vault|infisical|doctl|glab|flyctl|snyk|oc|cargo|anaconda|ngrok"
        r"|tailscale)[ \t]+(?:auth[ \t]+)?(?:login|auth|authtoken|add-authtoken|up))[ \t]+(?:--?[\w-]+[ \t]+)*"
        r"[\"']?((?=\S*\d)[^\s\"'$=/-][^\s\"'$=]{7,})",
        r"\b(?:wpa_passphrase|mosquitto_passwd[ \t]+-b[ \t]+\S+)[ \t]*\S*?[ \t/]([^\s\"'$@/]+)",
        r"\bsqlplus[ \t]+(?:-\w+[ \t]+)*\w+/([^\s\"'$@]+)",
        r"(?m)\bnet[ \t]+user[ \t]+[\w.\\-]+[ \t]+[\"']?([^\s\"'$/*]+)[\"']?[ \t]*(?=/|$)",
        r"(?i)\bConvertTo-SecureString\b(?:[ \t]+-\w+)*[ \t]+[\"']([^\"'\n]+)",
        r"\b[\w-]*(?:token|key|secret|password)s?[ \t]+set[ \t]+[\"']?"
        + _STRONG
        + r"([^\s\"'$=]+)",  # conda-token set X
        r"\b\w+[ \t]+login[ \t]+\S+@\S+[ \t]+[\"']?" + _STRONG + r"([^\s\"'$=]+)",  # bw login USER X
        r"\bnuget[ \t]+push[ \t]+\S+[ \t]+[\"']?" + _STRONG + r"([^\s\"'$=-][^\s\"'$]+)",
        r"-D[\w.]{0,99}\.login=([^\s\"'$]+)",
        # Short flags of tools
        _match_flag("swift", r"-K[ \t=]*"),
        _match_flag("openssl|prefect", r"-[kK][ \t]+"),
        _match_flag("unzip|zip|zipcloak|ipmitool|pdftk|qpdf|cqlsh|sqlcmd|bcp|bteq|tsql|osql|isql", r"-P[ \t=]*"),
        _match_flag("7z[ar]?|7zz|rar|unrar|x264", r"-h?p", r"(?!\d{1,3}(?:\s|$))[^\s\"'$]+"),
        _match_flag(
            "curl|wget|https?",
            r"-b[ \t=]*",
            r"(?!\S*\.(?:txt|jar|cookies?)\b|[^\s=]*/|\$)(?:(?<=[\"'])[^\"'\n]+|[^\s\"']+)",
        ),
        _match_flag("oathtool", "", r"(?!\d{4}-)\w[^\s\"']{7,}"),
        r"(?m)^\S+\t(?:TRUE|FALSE)\t\S+\t(?:TRUE|FALSE)\t\d+\t\S+\t(\S+)$",  # a file of cookies
        _match_flag("https?|xh", r"-a[ \t=]*[\w.@-]+:"),
        _match_flag("redis-cli", r"-a[ \t]+"),
        _match_flag("ldap\\w+", r"-w[ \t]*"),
        _match_flag(
            "mongo\\w*|twine|ncftp\\w*|clickhouse\\S*|xfreerdp|smbmap|crackmapexec|nxc|pgcli|mycli|cqlsh|beeline|login"
            "|sshpass|user(?:add|mod)|aria2c|lftp|(?:neo)?mutt|rdesktop|cpan-upload",
            r"-p[ \t=]*",
        ),
        _match_flag("ssh-keygen", r"-[NP][ \t]*"),
        _match_flag("doctl|anaconda|influx|glab|flyctl|vercel|netlify|dotnet|cf|rsconnect", r"-t[ \t]+"),
        _match_flag("snmp\\w+", r"-[cAX][ \t]*"),
        _match_flag("sendemail", r"-xp[ \t]*"),
        _match_flag("gh[ \\t]+secret", r"(?:-b|--body)[ \t=]+"),
        # Addresses: of conda's channels, hooks and bots
        r"https?://\S{1,200}?/t/([\w-]{3,})/",
        r"(?i)https?://[^\s\"'<>]{0,200}?hooks?(?:\.\w+){0,3}/(?:[^\s\"'<>]{0,200}/)?((?=[^\s/]*\d)[^\s/\"'?#<>.]+)(?![\w./])",
        r"(?i)https?://(?:outlook|[\w-]+\.webhook)\.office\S{0,100}?/([^\s\"']+)",
        r"https?://(?:\w+\.)*telegram\.org/(?:file/)?bot([^\s/\"']+)",
        r"https?://hc-ping\.com/([^\s/\"']+)",
        # A password with a slash in an address
        r"://[^\s/\"'@:]*:(?!\d+/|\$)([^\s\"'@]{0,100}/[^\s\"'@]{0,100})@[\w.-]+(?::\d+)?(?:[/\s\"']|$)",
        r"\bjdbc:[\w:]+?:\w+/([^\s@/]+)@",
        r"\b\w*freerdp\b[^\n]*?[ \t]/p:([^\s\"']+)",
        # Calls
        r"(?i)\b[\w.]*(?:login|auth\w*|credentials?|connect|client|session)"
        r"\([^()\n]{0,200}?\b(?:key|auth|pass|pw)[ ]*=[ ]*[bfr]?[\"']([^\"'\n]+)[\"']",
        r"\b[\w.]*(?:login|log_in|Auth|authenticate|auth|set_password|SecretStr|Credentials?|Fernet|set_token|[TH]OTP)"
        r"\((?:[^()\n]{0,200}?[,=][ ]*)?[bfr]?[\"']([^\"'\n]{4,})[\"'][ ]*\)",
        r"\bauth[ ]*=[ ]*\([ ]*[\"'][^\"'\n]*[\"'][ ]*,[ ]*[bfr]?[\"']([^\"'\n]+)[\"']",
        # The file of docker: its name is too short to tell
        r"[\"']auth[\"'][ ]*:[ ]*[\"']([A-Za-z0-9+/=]{8,})[\"']",
        # Input of tools that ask
        r"(?:<<<[ \t]*|<\([ \t]*" + _ECHO + r")[\"']?" + _STRONG + r"([^\s\"'$|)(=;]+)[\"')]*(?=\s|$)",
        rf"(?:\b|_)(?:{_ASKING}|sudo[ \t]+-S|login|(?:with-)?token|stdin)\b[^\n]{{0,300}}<<<[ \t]*[\"']?([^\s\"'$]+)",
        r"\b(?:kinit|kpasswd|passwd|chpasswd|cryptsetup|sudo[ \t]+-S|docker[ \t]+login|gh[ \t]+auth)\b"
        r"[^\n]{0,300}<<-?[ \t]*[\"']?\w+[\"']?\n[ \t]*([^\s$][^\n]*)\n",
        r"\b" + _ECHO + r"[\"']?([^\s\"'$|]+?)(?:\\n)?[\"']?[ \t]*\|" + _ASKS,
        # What a program reads as a file: --password-file=<(echo VALUE)
        r"(?i)(?:pass|key|token|secret|pwd)[\w-]{0,30}[ \t=]{1,3}<\([ \t]*" + _ECHO + r"[\"']?([^\s\"'$|)]+)",
        r"\b" + _ECHO + r"[\"']?[\w.@-]+:([^\s\"'$|]+)[\"']?[ \t]*\|[ \t]*(?:base64|chpasswd)\b",
        r"\bsend[ \t]+(?:--[ \t]+)?[\"']([^\s\"'$\\]{6,})\\r[\"']",
        # User and password of an address; of the web a user alone is a token, except those names
        r"://(?!\$\{?\w+\}?(?::\$\{?\w+\}?)?@)([^\s/\"'?#@:]*:(?!\$\{?\w+\}?@)[^\s/\"'?#]+)@",
        r"(?i)https?://(?!(?:git|user|anonymous|guest|oauth2|\$\{?\w+\}?)@)([^\s/\"'?#@:]+)@",
        # -u user:password, --user=user:password, -U user%password
        r"(?<![\w-])(?:-[uU]|--(?:proxy-|http-)?user(?:name)?)[ \t=]*[\"']?"
        r"(?![\w.-]+\.py:)[\w.@\\-]+[:%](?!(?:\w+:){0,2}//)((?![\d$%:]+(?:[\s\"']|$))[^\s\"']{3,})",
        _match_flag("clearml-init", "--key[ \t=]+"),
        _match_flag("lftp", r"-u[ \t]*[\"']?[\w.@-]+,"),
        _match_flag("mysql(?:dump|admin)?|mariadb", "-p"),
        r"-pass(?:in|out)?[ \t]+pass:([^\s\"'$]{3,})",  # openssl
        r"\blogin[ \t]+\S+\s+password[ \t]+(\S+)",  # .netrc
    )
)
SECRET_FORMS = re.compile(
    # GitHub, GitLab, Hugging Face, OpenAI, Slack; of any length, unlike gitleaks'
    r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-)[\w-]{16,}"
    r"|\b(?:npm_|pypi-|dckr_pat_|nvapi-|gsk_|glsa_|dop_v1_|sk_live_|rk_live_|ya29\.|AIza)(?=[\w-]*\d)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"  # JSON web token
    # Hashes of passwords, as of crypt and LDAP. The shell has $1 and $y too
    r"|\$(?:2[abxy]|5|6|apr1|argon2id?)\$[\w./=,+-]+\$[\w./=,$+-]{4,}|\$(?:1|7|g?y)\$[\w./=,+-]+\$[\w./=,$+-]{20,}"
    r"|\{S?(?:SHA|MD5|CRYPT)\d{0,3}\}[\w+/=$.]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_WORD = re.compile(r"[A-Za-z0-9+/=_-]{20,}")
_PUBLIC = re.compile(  # a checksum, a public key
    r"(?:sha|SHA|md|blake)\d\w?[-_:= ]{1,2}\Z|integrity=.?\Z|(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-)\S*[ ]\Z"
)
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
# Per character: English words and paths have 2 to 3.5, 24 random letters and digits 4.2 and more
_MIN_ENTROPY_BITS = 3.7

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
    finders = (_find_named, _find_in_kind_secret, _find_in_columns, _find_words, _find_in_commands)
    decoded = _decode(text)
    for find in (*finders, find_secret_forms, _find_random_words):
        spans = find(text) if decoded == text else chain(find(text), find(decoded))
        ends = [(0, 0), *_merge_places(spans), (len(text), len(text))]
        # Both are cut alike, so places stay the same in both
        text, decoded = (
            REDACTED.join(each[end:begin] for (_, end), (begin, _) in pairwise(ends)) for each in (text, decoded)
        )
    return text


def _decode(text: str) -> str:
    """Decode what other programs encoded, with blanks, so that every character keeps its place.

    Strings of JSON or Python in a string, a query of an address, the words of a command as a list.
    """
    text = re.sub(r'(?<![^\s:,[{(=\'"])\\"', ' "', text).replace('\\"', '" ')
    text = re.sub(r"(?<!\\)\\[0nrt]", "\n ", text)
    text = re.sub(r"%(2[026cC]|3[abdABD]|0[aA])", lambda match: f"  {chr(int(match[1], 16))}", text)
    return _LIST.sub(lambda match: re.sub(r"""["',\[\]]""", " ", match.group()), text)


def find_secret_forms(text: str) -> Iterator[Span]:
    """Yield the places of secrets that are recognised by form or place, under any name."""
    for pattern in _PLACES:
        yield from (match.span(1) for match in pattern.finditer(text) if not _HARMLESS.fullmatch(match[1]))
    yield from (match.span() for match in SECRET_FORMS.finditer(text))
    lower = text.lower()
    for rule in _read_gitleaks_rules():
        if any(word in lower for word in rule.keywords):
            yield from rule.find(text)


def _find_random_words(text: str) -> Iterator[Span]:
    """Yield the places of words that nobody wrote: letters of both cases and digits that alternate.

    Names in camel case have few digits, and names of files few that alternate. Checksums and public keys follow names.
    """
    for match in _WORD.finditer(text):
        word = match.group()
        if not _is_random(word) or _PUBLIC.search(text, max(0, match.start() - 50), match.start()):
            continue
        kinds = ["0" if char.isdigit() else "a" if char.islower() else "A" if char.isupper() else "-" for char in word]
        changes = sum(one != other for one, other in pairwise(kinds))
        longest = max("".join(kinds).split("-"), key=len)
        if changes >= 0.4 * len(word) and longest.count("0") >= 2 and {"a", "A"} < {*longest} and len(longest) >= 12:
            yield match.span()


def is_secret_name(name: str) -> bool:
    """Return True if a variable or setting of this name holds a secret, judged by the words of the name."""
    if name in _NOT_SECRET:
        return False
    words = _split_name(name)
    if words[-1] in _NOT_LAST:
        return False
    if words[-1] in ("DATA", "VALUE") and len(words) > 1:  # client-key-data
        words.pop()
    if _SECRET_PARTS.search(re.sub(r"[\W_]", "", name).upper()):
        return True
    if not _SECRET_WORDS.isdisjoint(words) or words[-1] in _SECRET_LAST or (name.isupper() and words[-1] == "PASS"):
        return True
    return words[-1].endswith(_SECRET_ENDS)


def _split_name(name: str) -> list[str]:
    return re.split(r"[_. -]", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper())


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
            last = _split_name(name)[-1]
            if "bare" in pattern.groupindex and not is_secret_name(last):
                continue  # token-classification MODEL
            certain = "certain" in pattern.groupindex or is_secret_name(name) or name in _FOLDERS
            flag = last == "PASS" and match.groupdict().get("flag")
            if certain or flag or (in_query and name.lower() in _IN_QUERY):
                span = match.span("value") if "value" in pattern.groupindex else _find_value(text, match)
                value = "" if span is None else text[slice(*span)]
                if span is not None and (in_query or not (_is_code(match, value) or _is_other(name, value))):
                    yield span


def _is_other(name: str, value: str) -> bool:
    """Return True if a value is no secret by its form: a path in PWD, ``run_date_2026`` in sort_key or token_field."""
    if name.upper() in _FOLDERS:
        return _PATH.match(value) is not None
    words = _split_name(name)
    joined = "".join(words)
    if (
        words[-1] in _ALWAYS_LAST
        or joined.endswith(_SECRET_ENDS)
        or _is_password(joined)
        or _SECRET_PARTS.search(joined)
    ):
        return False
    return all(_PART_OF_IDENTIFIER.fullmatch(part) for part in re.split(r"[/_.:=+@,-]+", value) if part)


def _find_in_kind_secret(text: str) -> Iterator[Span]:
    """Yield the places of all values of Kubernetes' Secrets, of kustomize's secretGenerator and of dictionaries."""
    for dictionary in _DICTIONARY.finditer(text):
        matches = _ENTRY_OF_JSON.finditer(text, *dictionary.span("json"))
        yield from (match.span(1) for match in matches if not _HARMLESS.fullmatch(match[1]))
    for document in _DOCUMENT.finditer(text):
        if _KIND_SECRET.search(document.group()):
            for data in _DATA.finditer(text, *document.span()):
                entry, form = (_ENTRY, "yaml") if data["json"] is None else (_ENTRY_OF_JSON, "json")
                matches = entry.finditer(text, *data.span(form))
                yield from (match.span(1) for match in matches if not _HARMLESS.fullmatch(match[1]))


def _find_in_columns(text: str) -> Iterator[Span]:
    """Yield the places of values whose column has the name of a secret: SQL's INSERT, CSV, Markdown, tables of psql."""
    for insert in _INSERT.finditer(text):
        columns = [
            column for column, name in enumerate(insert[1].split(",")) if is_secret_name(name.strip(' \t\n"`[]'))
        ]
        place = insert.end()
        while columns and (row := _TUPLE.match(text, place)):
            items = [item.span(1) for item in _ITEM.finditer(text, *row.span(1))]
            yield from (items[column] for column in columns if column < len(items) and items[column][0] >= 0)
            place = row.end()
    for heading in _HEADING.finditer(text):
        names = [re.sub(r"\W+", "_", cell).strip("_") for cell in heading.group().split(heading["separator"])]
        columns = [column for column, name in enumerate(names) if is_secret_name(name)]
        place = heading.end()
        while columns and (row := _ROW.match(text, place)):
            pieces = row[1].split(heading["separator"])
            if len(pieces) != len(names) and not _RULE.fullmatch(row[1]):
                break
            begins = list(accumulate((len(piece) + 1 for piece in pieces), initial=row.start(1)))
            for column in columns if len(pieces) == len(names) else ():
                cell = _CELL.match(text, begins[column], begins[column + 1] - 1)
                if cell and not (_HARMLESS.fullmatch(cell[1]) or _is_other(names[column], cell[1])):
                    yield cell.span(1)
            place = row.end()


def _find_words(text: str) -> Iterator[Span]:
    """Yield the places of values that follow their names as words, after the name of a tool."""
    for tool in _TOOL.finditer(text):
        for match in _WORDS.finditer(tool["rest"]):
            name, value = match["name"].rpartition("/")[2], match["value"]
            alone = name.isalpha() and not _is_password(name)  # may be a word of the command: hf auth login
            if is_secret_name(name) and not _HARMLESS.fullmatch(value) and (not alone or re.match(_STRONG, value)):
                begin, end = match.span("value")
                yield tool.start("rest") + begin, tool.start("rest") + end


def _find_in_commands(text: str) -> Iterator[Span]:
    """Yield the places of secrets on a command line: after a user, whatever the tool, and of kubectl create secret."""
    for command in _COMMAND.finditer(text):
        if _CLIENT.search(command.group()):
            yield from (match.span(1) for match in _AFTER_USER.finditer(text, *command.span()))
        if "secret" in command.group():
            yield from (
                match.span(1) for match in _OF_SECRET.finditer(text, *command.span()) if "REDACTED" not in match[1]
            )


def _find_value(text: str, match: re.Match[str]) -> Span | None:
    """Return the place of the value that follows a name, without its quotes. None if it is no secret."""
    quote = match["quote"]
    pattern = re.compile(rf"(?:[^{quote}\\\n]|\\.)*") if quote else _UNQUOTED
    found = pattern.match(text, match.end("after" if "after" in match.re.groupindex else 0))
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
    if name == "PASS" and blank:  # of a list of tests
        return True
    if blank is None or _is_password(name) or (name.isupper() and not blank):
        return False
    return _CODE.fullmatch(value) is not None


def _is_password(name: str) -> bool:
    return re.search(r"pass|pwd|secret|credential", name, re.IGNORECASE) is not None


def _merge_places(spans: Iterator[Span]) -> list[Span]:
    """Return the places in order, overlapping ones joined."""
    joined: list[Span] = []
    for begin, end in sorted(set(spans)):
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _is_random(word: str) -> bool:
    kinds = (str.islower, str.isupper, str.isdigit)
    if "/" in word.strip("/") or not all(any(map(kind, word)) for kind in kinds):
        return False
    return _compute_entropy_bits(word) >= _MIN_ENTROPY_BITS


def _compute_entropy_bits(word: str) -> float:
    """Return the entropy of a word's characters, in bits per character."""
    return -sum(count / len(word) * math.log2(count / len(word)) for count in Counter(word).values())
