"""Hostile pickles of foreign data sets: forms of naming, calling and changing, and numbers that ask for memory, in every place.

None opens a file or a socket, starts a process, imports, or changes a class or a function.
"""

import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from mlhpc.suite.data.pickles import PlainUnpickler, explain_damage
from mlhpc.workloads.open_catalyst import convert

NAMES = (
    "os system", "posix system", "nt system", "subprocess Popen", "pty spawn", "builtins eval", "__builtin__ eval", "builtins exec",
    "builtins __import__", "builtins getattr", "builtins open", "importlib import_module", "socket create_connection",
    "urllib.request urlopen", "ftplib FTP", "http.client HTTPConnection", "smtplib SMTP", "webbrowser open", "ctypes CDLL",
    "runpy run_path", "shutil rmtree", "pathlib Path.mkdir", "functools partial", "operator attrgetter", "operator methodcaller",
    "types FunctionType", "marshal loads", "pickle loads", "_pickle loads", "copyreg _reconstructor", "code interact",
    "timeit timeit", "cProfile run", "pdb run", "logging.config listen", "tempfile mktemp", "numpy load", "numpy memmap",
    "numpy.core.records fromfile",
    "torch load", "torch.hub load", "torch.storage UntypedStorage.from_file", "torch._utils _rebuild_parameter", "torch jit.load",
    "torch.distributed.checkpoint._fsspec_filesystem FsspecReader", "torch.distributed TCPStore",
    "collections OrderedDict.fromkeys",
    "collections namedtuple", "mlhpc.workloads.open_catalyst.convert load_restricted", "torch_geometrics.data Data",
)  # fmt: skip
# What the reader knows, and what it stands for
KNOWN = [f"{module} {name}" for module, name in convert.ALLOWED] + ["torch_geometric.data.data Data"]


def text(word: str) -> bytes:
    return pickle.dumps(word, 2)[2:-1]


def name_of(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def stack_name(name: str) -> bytes:
    return b"".join(map(text, name.split())) + b"\x93"


CALLS: dict[str, Callable[[str], bytes]] = {
    "named": name_of,
    "named on the stack": stack_name,
    "called": lambda name: name_of(name) + text("x") + b"\x85R",
    "called on the stack": lambda name: stack_name(name) + text("x") + b"\x85R",
    "inst": lambda name: b"(" + text("x") + b"i" + name.replace(" ", "\n").encode() + b"\n",
    "obj": lambda name: b"(" + name_of(name) + text("x") + b"o",
    "new object": lambda name: name_of(name) + text("x") + b"\x85\x81",
    "new object with words": lambda name: name_of(name) + b")}\x92",
    "built": lambda name: name_of(name) + b")R}b",
}
CHANGES = {
    "fields of a class": pickle.dumps({"x": 1, "__array_interface__": {}}, 2)[2:-1],
    "slots of a class": pickle.dumps((None, {"x": 1, "__defaults__": (1,)}), 2)[2:-1],
    "both": pickle.dumps(({"x": 1}, {"__doc__": "x"}), 2)[2:-1],
}
PLACES: dict[str, Callable[[bytes], bytes]] = {
    "alone": lambda inner: inner,
    "list": lambda inner: b"]" + inner + b"a",
    "key": lambda inner: b"}" + inner + b"Ns",
    "tuple": lambda inner: b"(" + inner + b"t",
    "memo": lambda inner: inner + b"q\x050h\x05",
    "frame": lambda inner: b"\x95" + struct.pack("<Q", len(inner)) + inner,
    "field": lambda inner: name_of("torch_geometric.data Data") + b")\x81}" + text("pos") + inner + b"sb",
    "default": lambda inner: name_of("collections defaultdict") + inner + b"\x85R",
}
ARRAY = name_of("numpy.core.multiarray _reconstruct") + name_of("numpy ndarray") + b"K\x00\x85" + text("b") + b"\x87R"
DOUBLE = name_of("numpy dtype") + text("f8") + b"\x89\x88\x87R"
RECORD = name_of("torch_geometric.data Data") + b")\x81"


def state(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


STORAGE = name_of("torch.storage _load_from_bytes")
LARGE = {  # each asks for much with few bytes
    "index of the memo": b"Nr" + struct.pack("<I", 1 << 31),
    "index as text": b"Np" + b"4" * 12 + b"\n",
    "text": b"\x8d" + struct.pack("<Q", 1 << 40),
    "bytes": b"\x8e" + struct.pack("<Q", 1 << 40),
    "bytes, 4 GB": b"B" + struct.pack("<I", (1 << 32) - 1),
    "array of bytes": b"\x96" + struct.pack("<Q", 1 << 36),
    "buffer": b"\x97",
    "frame": b"\x95" + struct.pack("<Q", 1 << 60),
    "long": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "digits": b"I" + b"9" * 100_000 + b"\n",
    "array's size": ARRAY + state(b"K\x01", state(number(1 << 40)), DOUBLE, b"\x89", b"C\x08" + bytes(8)) + b"b",
    "array of objects": ARRAY
    + state(b"K\x01", b"K\x01\x85", name_of("numpy dtype") + text("O8") + b"\x85R", b"\x89", b"C\x08" + bytes(8))
    + b"b",
    "array that is called": name_of("numpy ndarray") + number(1 << 40) + b"\x85\x85R",
    "type with fields": name_of("numpy dtype") + text("V8") + b"\x89\x88\x87R",
    "type by text": name_of("numpy dtype") + text("f8,O") + b"\x89\x88\x87R",
    "long texts": name_of("numpy dtype") + text("U999999999") + b"\x85R",
    "tensor without a storage": name_of("torch._utils _rebuild_tensor_v2")
    + state(RECORD, b"K\x00", b"K\x01\x85", b"K\x01\x85")
    + b"R",
    "storage that is no storage": STORAGE + b"C\x04PK\x03\x04" + b"\x85R",
}  # fmt: skip
OTHERS = {
    "object of somebody else": text("x") + b"Q",
    "its number as text": b"Pos.system\n",
    **{f"registry {n}": code for n, code in enumerate((b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"))},
    "read only": b"N\x98",
    "class of a record": RECORD + state(b"N", b"}" + text("__class__") + name_of("torch_geometric.data B") + b"s") + b"bb",
    "state of an array that is a record": ARRAY + RECORD + b"b",
    "underflow": b"b",
    "no end": b"]" * 10,
}  # fmt: skip
WATCHED = (
    "socket.",
    "subprocess.",
    "os.",
    "open",
    "exec",
    "ctypes.",
    "urllib.",
    "ftplib.",
    "shutil.",
    "import",
    "pty.",
    "code.",
)
seen: list[str] = []
watching = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event.startswith(WATCHED):
        seen.append(f"{event} {arguments}"[:200])


def forms() -> dict[str, bytes]:
    found = {f"{name}, {call}": CALLS[call](name) for name in NAMES for call in CALLS}
    found |= {f"{place}: {NAMES[i]}": PLACES[place](name_of(NAMES[i]) + b")R") for place in PLACES for i in range(8)}
    found |= {f"{what} of {name}": name_of(name) + CHANGES[what] + b"b" for name in KNOWN for what in CHANGES}
    return found | OTHERS | LARGE


def remember() -> dict[str, dict[str, Any]]:
    """What a pickle could change: attributes of what the reader knows."""
    known = {"Record": convert.Record, **{" ".join(name): each for name, each in convert.ALLOWED.items()}}
    return {name: dict(vars(each)) | {"defaults": getattr(each, "__defaults__", None)} for name, each in known.items()}


@pytest.fixture(scope="module", autouse=True)
def _hook() -> None:
    sys.addaudithook(watch)


@pytest.mark.parametrize("reader", ["OpenCatalyst", "OpenFold"])
def test_no_hostile_form_does_anything(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = convert.load_restricted if reader == "OpenCatalyst" else lambda content: PlainUnpickler(content).load()
    with suppress(Exception):  # what torch imports at its first call
        load(b"\x80\x02" + STORAGE + b"C\x01x\x85R.")
    before, read = remember(), []
    tracemalloc.start()
    seen.clear()
    monkeypatch.setattr(sys.modules[__name__], "watching", True)
    for name, body in forms().items():
        content = b"\x80\x04" + body + (b"." if name != "no end" else b"")
        said = name
        try:
            load(content)
            read.append(name)
        except Exception as error:
            said = explain_damage(error)
        assert "\n" not in said
    monkeypatch.setattr(sys.modules[__name__], "watching", False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == []
    assert remember() == before
    assert peak < 50e6
    assert len(forms()) > 500
    harmless = {"index of the memo", "index as text", "array that is called"}  # a size that nobody follows
    assert {name for name in read if not name.startswith(tuple(KNOWN))} <= harmless
