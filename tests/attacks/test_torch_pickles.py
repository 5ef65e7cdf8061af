"""Pickles that would run code in `torch.load`, or bring down who reads them: nothing runs, and each gets its error.

The control test shows that the payloads are live: a real unpickler does run them.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import marshal
import os
import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_bytes as tb
from audit import watched
from unshard.errors import FormatError
from unshard.formats.torch_file import Global, Opaque, UnsupportedTensor, read_torch_file
from unshard.formats.torch_file.limits import DEFAULT_LIMITS

SENTINEL = "UNSHARD_ATTACK_SENTINEL"


def set_sentinel(*_args: Any, **_kwargs: Any) -> str:
    """What the payloads want to have called."""
    os.environ[SENTINEL] = "1"
    return ""


class Reduced:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self.call


class WithSetState:
    def __setstate__(self, state: Any) -> None:
        set_sentinel()


class WithNew:
    def __new__(cls, *args: Any, **kwargs: Any) -> WithNew:
        set_sentinel()
        return super().__new__(cls)


class WithSetItem(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        set_sentinel()

    def __setattr__(self, name: str, value: Any) -> None:
        set_sentinel()


class WithAppend(list[Any]):
    def append(self, item: Any) -> None:
        set_sentinel()

    def extend(self, items: Any) -> None:
        set_sentinel()


class WithHash:
    def __hash__(self) -> int:
        set_sentinel()
        return 1


SOURCE = f"import os; os.environ['{SENTINEL}'] = '1'"
HERE = __name__


def dumped(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


MARSHALLED = marshal.dumps(compile(SOURCE, "", "exec"))
CODE = b"B" + struct.pack("<I", len(MARSHALLED)) + MARSHALLED
TARGET = tb.named(HERE, "set_sentinel")

LIVE: dict[str, bytes] = {
    "reduce": dumped(Reduced(set_sentinel, 1)),
    "reduce protocol 0": dumped(Reduced(set_sentinel, 1), 0),
    "exec": dumped(Reduced(exec, SOURCE)),
    "eval": dumped(Reduced(eval, f"exec({SOURCE!r})")),
    "import and exec": dumped(Reduced(exec, Reduced(compile, SOURCE, "x", "exec"))),
    "setting the environment": tb.finish(
        tb.call(tb.named("operator", "setitem"), tb.named("os", "environ"), tb.text(SENTINEL), tb.text("1"))
    ),
    "partial": dumped(functools.partial(set_sentinel))[:-1] + b")R.",
    "getattr chain": tb.finish(
        tb.call(tb.call(tb.named("builtins", "getattr"), tb.call(tb.named("importlib", "import_module"), tb.text(HERE)),
        tb.text("set_sentinel")))
    ),
    "dotted global": b"\x80\x04" + tb.text(HERE) + tb.text("set_sentinel.__call__") + b"\x93)R.",
    "builtins of another module": tb.finish(
        tb.call(
            tb.call(tb.named("operator", "getitem"), tb.named(HERE, "__builtins__"), tb.text("exec")), tb.text(SOURCE)
        )
    ),
    "marshalled code": tb.finish(
        tb.call(tb.call(tb.named("types", "FunctionType"), tb.call(tb.named("marshal", "loads"), CODE), b"}"))
    ),
    "inst": b"(" + f"i{HERE}\nset_sentinel\n.".encode(),
    "obj": b"(" + TARGET + b"o.",
    "newobj": tb.finish(tb.named(HERE, "WithNew") + b")\x81"),
    "newobj_ex": tb.finish(tb.named(HERE, "WithNew") + b")}\x92", 4),
    "build": tb.finish(tb.named(HERE, "WithSetState") + b")\x81" + tb.mapping({"a": b"N"}) + b"b"),
    "setitem": tb.finish(tb.named(HERE, "WithSetItem") + b")\x81" + tb.text("a") + b"Ns"),
    "setitems": tb.finish(tb.named(HERE, "WithSetItem") + b")\x81(" + tb.text("a") + b"Nu"),
    "append": tb.finish(tb.named(HERE, "WithAppend") + b")\x81Na"),
    "appends": tb.finish(tb.named(HERE, "WithAppend") + b")\x81(Ne"),
    "slots": tb.finish(tb.named(HERE, "WithSetItem") + b")\x81" + tb.group(b"N", tb.mapping({"a": b"N"})) + b"b"),
    "hash of a key": tb.finish(b"}" + tb.named(HERE, "WithHash") + b")\x81Ns"),
    "hash in a set": tb.finish(b"\x8f(" + tb.named(HERE, "WithHash") + b")\x81\x90", 4),
    "call by reduce": tb.finish(tb.call(tb.named("functools", "reduce"), TARGET, tb.counts([1, 2]))),
    "call by map": tb.finish(
        tb.call(tb.named("builtins", "list"), tb.call(tb.named("builtins", "map"), TARGET, tb.counts([1])))
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SENTINEL, raising=False)


def read_watched(directory: Path, pickled: bytes) -> Any:
    """Read an archive around the pickle, and fail if anything else than reading happens."""
    path = directory / "model.pt"
    path.write_bytes(tb.archive(tb.torch_members(pickled)))
    with watched(path):
        return read_torch_file(path, tb.FILE).root


@pytest.fixture(autouse=True, scope="module")
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever Python imports late is imported before anything is watched: codecs, and what shows an error."""
    directory = tmp_path_factory.mktemp("warm")
    tb.read(directory, tb.archive(tb.torch_members()))
    with pytest.raises(FormatError):
        tb.read_pickle(directory, b"S'a'\nV\xff\n\xff")


@pytest.mark.parametrize("name", LIVE)
def test_control_the_payload_is_live(name: str) -> None:
    pickle.loads(LIVE[name])
    assert os.environ.get(SENTINEL)


def test_control_the_watch_sees_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"pickle\.find_class"), watched(tmp_path):
        pickle.loads(LIVE["reduce"])
    with pytest.raises(AssertionError, match="open"), watched(tmp_path):
        (tmp_path / "written").write_text("")


@pytest.mark.parametrize("name", LIVE)
def test_nothing_runs(tmp_path: Path, name: str) -> None:
    with contextlib.suppress(FormatError):
        read_watched(tmp_path, LIVE[name])
    assert SENTINEL not in os.environ


def test_nothing_runs_in_a_legacy_stream(tmp_path: Path) -> None:
    body = LIVE["reduce protocol 0"][:-1]
    root = tb.read(tmp_path, tb.legacy(body, {})).root
    assert isinstance(root, Opaque)
    assert SENTINEL not in os.environ


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("posix", "system"), ("subprocess", "Popen"), ("builtins", "eval"),
        ("builtins", "__import__"), ("torch", "load"), ("torch.hub", "load"),
        ("torch.jit.unsupported_tensor_ops", "execWrapper"),
        ("torch.fx.graph_module", "reduce_graph_module"), ("torch.storage", "_load_from_bytes"), ("numpy", "load"),
        ("numpy.testing._private.utils", "runstring"), ("pip", "main"), ("pydoc", "pipepager"), ("antigravity", "x"),
        ("builtins", "type"), ("types", "CodeType"), ("ctypes", "CDLL"), ("webbrowser", "open"),
        ("copyreg", "add_extension"),
    ],
)  # fmt: skip
def test_known_gadgets_are_records(tmp_path: Path, module: str, name: str) -> None:
    root = read_watched(tmp_path, tb.finish(tb.call(tb.named(module, name), tb.text("id"))))
    assert isinstance(root, Opaque)
    assert (root.cls, root.args) == (Global(module, name), ("id",))


def test_modules_are_not_imported(tmp_path: Path) -> None:
    sys.modules.pop("this", None)
    read_watched(tmp_path, tb.finish(tb.named("this", "s")))
    assert "this" not in sys.modules


@pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"])
def test_extension_registry(tmp_path: Path, code: bytes) -> None:
    copyreg.add_extension(HERE, "set_sentinel", 1)
    try:
        assert pickle.loads(tb.finish(code)) is set_sentinel
        with pytest.raises(FormatError, match="extension registry"):
            read_watched(tmp_path, tb.finish(code + b")R"))
    finally:
        copyreg.remove_extension(HERE, "set_sentinel", 1)


@pytest.mark.parametrize("function", ["_rebuild_from_type_v2", "_rebuild_from_type"])
def test_tensor_subclass_made_by_a_gadget(tmp_path: Path, function: str) -> None:
    args = (tb.named("os", "system"), tb.named("torch", "Tensor"), tb.group(tb.text("id")), b"}")
    root = read_watched(tmp_path, tb.finish(tb.call(tb.named("torch._tensor", function), *args)))
    assert isinstance(root, UnsupportedTensor)
    assert "os.system" in root.reason


def test_nested_rebuilds_do_not_recurse(tmp_path: Path) -> None:
    function = tb.named("torch._tensor", "_rebuild_from_type_v2")
    inner = b"N"
    for _ in range(3000):
        inner = tb.group(b"h\x01", b"h\x02", inner, b"}")
    body = function + b"q\x010" + tb.named("torch", "Tensor") + b"q\x020h\x01" + inner + b"R"
    root = read_watched(tmp_path, tb.finish(body))
    assert isinstance(root, UnsupportedTensor)


REBUILD = tb.named("torch._utils", "_rebuild_tensor_v2")
FLOAT64 = tb.call(tb.named("numpy", "dtype"), tb.text("f8")) + tb.group(b"K\x03", tb.text("<")) + b"b"


def reference(kind: bytes, numel: bytes) -> bytes:
    """A persistent id with any class and size."""
    return tb.group(tb.text("storage"), kind, tb.text("0"), tb.text("cpu"), numel) + b"Q"


WRONG_TARGETS = {
    "build a class": (tb.named("m", "C") + b"}b", "sets the state of an object of kind Global"),
    "build a number": (b"K\x01}b", "sets the state of an object of kind int"),
    "build a list": (b"]}b", "sets the state of an object of kind list"),
    "build a dtype": (tb.named("torch", "float32") + b"}b", "kind DType"),
    "build a storage": (tb.storage() + b"}b", "kind Storage"),
    "build a dict by a list": (b"}]b", "sets the state of an object of kind dict"),
    "set an item of a tuple": (b")NNs", "sets items of an object of kind tuple"),
    "set an item of text": (tb.text("a") + b"NNs", "sets items of an object of kind str"),
    "set an item of a class": (tb.named("m", "C") + b"NNs", "sets items of an object of kind Global"),
    "set items of a list": (b"](K\x00Nu", "sets items of an object of kind list"),
    "append to a dict": (b"}Na", "appends to an object of kind dict"),
    "append to a tuple": (b")(Ne", "appends to an object of kind tuple"),
    "append to a tensor": (tb.tensor(tb.storage()) + b"Na", "appends to an object of kind StoredTensor"),
    "call a number": (b"K\x01)R", "calls something that is no class or function: int"),
    "call a record": (tb.named("m", "f") + b")R)R", "calls something that is no class or function: Opaque"),
    "call a dtype": (tb.named("torch", "float32") + b")R", "no class or function: DType"),
    "arguments that are no tuple": (tb.named("m", "f") + b"]R", "arguments that are no tuple"),
    "keyword arguments that are no dict": (tb.named("m", "f") + b")]\x92", "keyword arguments are no dict"),
    "a key without a value": (b"}(Nu", "a key without a value"),
    "a list as a key": (b"}]Ns", "a dict key that we do not accept, of kind list"),
    "a dict in a key": (b"}}\x85Ns", "a dict key that we do not accept, of kind dict"),
    "a class named by a number": (b"K\x01K\x02\x93", "names a class by other than text"),
    "an unknown memo": (b"h\x07", "damaged at its byte 2"),
    "an empty stack": (b"0", "damaged at its byte 2"),
    "a mark too many": (b"t", "damaged at its byte 2"),
    "popping below a mark": (b"N(0N0(00t", "damaged|shorter than its last mark"),
    "an unknown opcode": (b"\xff", "unknown opcode 0xff"),
    "a protocol of the future": (b"\x80\x06N", "protocol 6"),
    "a buffer out of band": (b"\x97", "buffers that were not saved"),
    "storage by other than a tuple": (tb.text("storage") + b"Q", "no storage"),
    "storage by text": (b"Pstorage\n", "no storage"),
    "storage of the wrong length": (tb.group(tb.text("storage")) + b"Q", "no storage"),
    "storage of another kind": (tb.group(tb.text("file"), *[b"N"] * 4) + b"Q", "no storage"),
    "storage of no class": (reference(b"N", b"K\x06"), "never writes"),
    "storage of a foreign class": (tb.storage(module="os", kind="FloatStorage"), "we do not know: os.FloatStorage"),
    "storage of an unknown class": (tb.storage(kind="system"), "we do not know: torch.system"),
    "storage of negative size": (tb.storage(numel=-1), "never writes"),
    "storage of a boolean size": (reference(tb.named("torch", "FloatStorage"), b"\x88"), "never writes"),
    "storage by a path": (tb.storage(key="../data.pkl"), "missing from the archive"),
    "storage by an absolute path": (tb.storage(key="/etc/passwd"), "missing from the archive"),
    "tensor on no storage": (tb.tensor(b"N"), "arguments that torch never writes"),
    "tensor on a record": (tb.tensor(tb.call(tb.named("m", "f"))), "arguments that torch never writes"),
    "tensor with text for a size": (
        tb.call(REBUILD, tb.storage(), b"K\x00", tb.text("ab"), tb.counts([1]), b"N", b"N"),
        "arguments that torch never writes",
    ),
    "tensor with too few arguments": (tb.call(REBUILD), "never writes"),
    "size that is no tuple": (tb.call(tb.named("torch", "Size"), b"K\x05"), "never writes"),
    "too few bytes in a scalar": (
        tb.call(tb.named("numpy.core.multiarray", "scalar"), FLOAT64, b"C\x01a"),
        "never writes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_each_misuse_gets_its_error(tmp_path: Path, name: str) -> None:
    body, reason = WRONG_TARGETS[name]
    with pytest.raises(FormatError, match=reason):
        read_watched(tmp_path, tb.finish(body))


HUGE = struct.pack("<Q", 1 << 63)
LENGTHS = {
    "long4": (b"\x8b\xff\xff\xff\x7f", "integer of 2147483647 bytes"),
    "negative long4": (b"\x8b\xff\xff\xff\xff", "integer of -1 bytes"),
    "long of many digits": (b"L" + b"9" * 5000 + b"L\n", "integer of 5000 digits"),
    "int of many digits": (b"I" + b"9" * 5000 + b"\n", "integer of 5000 digits"),
    "float of many digits": (b"F" + b"9" * 5000 + b"\n", "number of 5000 digits"),
    "put of many digits": (b"Np" + b"9" * 5000 + b"\n", "integer of 5000 digits"),
    "frame": (b"\x95" + HUGE + b"N", "ends early, inside a frame"),
    "binbytes8": (b"\x8e" + HUGE + b"x", "ends early: 9223372036854775808 bytes are announced"),
    "bytearray8": (b"\x96" + HUGE + b"x", "ends early"),
    "binunicode8": (b"\x8d" + HUGE + b"x", "ends early"),
    "binbytes": (b"B\xff\xff\xff\xffx", "ends early"),
    "binunicode": (b"X\xff\xff\xff\xffx", "ends early"),
    "line without end": (b"I1", "ends early, in a line"),
    "long class name": (tb.named("m" * 2000, "C"), "names a class by 2001 characters"),
    "long nested class name": (
        tb.named("builtins", "getattr") + b"q\x010" + tb.named("m", "C") + b"q\x020"
        + (b"h\x01h\x02" + tb.text("a" * 200) + b"\x86Rq\x020") * 9,
        r"names a class by \d+ characters",
    ),
    "long key": (b"}" + tb.text("k" * 5000) + b"Ns", "a dict key that we do not accept, of kind str"),
    "large integer key": (b"}" + tb.integer(1 << 80) + b"Ns", "a dict key that we do not accept, of kind int"),
    "many parts in a key": (b"}" + tb.counts(range(100)) + b"Ns", "too many parts"),
    "billion laughs in a key": (b"})" + b"2\x86" * 64 + b"Ns", "too many parts"),
    "deep tuple in a key": (b"})" + b"\x85" * 200_000 + b"Ns", "too many parts"),
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHS)
def test_each_lie_about_a_length_gets_its_error(tmp_path: Path, name: str) -> None:
    body, reason = LENGTHS[name]
    with pytest.raises(FormatError, match=reason):
        read_watched(tmp_path, tb.finish(body, 4))


def test_far_memo_index_takes_no_memory(tmp_path: Path) -> None:
    assert read_watched(tmp_path, tb.finish(b"K\x07r\xff\xff\xff\xff0j\xff\xff\xff\xff")) == 7


def test_colliding_keys_are_counted(tmp_path: Path) -> None:
    """Hashes of tuples of numbers can be forged to collide; each insertion then compares with all before it."""
    body = b"}(" + b"".join(tb.counts([number, 0]) + b"N" for number in range(DEFAULT_LIMITS.tuple_keys + 1)) + b"u"
    with pytest.raises(FormatError, match="more tuples as dict keys"):
        read_watched(tmp_path, tb.finish(body))
