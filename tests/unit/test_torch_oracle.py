"""The reader of torch files against torch.load: the same tree, the same bits."""

from __future__ import annotations

import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import golden_set
import torch_bytes as tb
from unshard.errors import FormatError
from unshard.formats.torch_file import (
    Opaque,
    Storage,
    StoredTensor,
    UnsupportedTensor,
    WrapperSubclass,
    read_torch_file,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LEGACY = {"_use_new_zipfile_serialization": False}


def bits_of(path: Path, tensor: StoredTensor) -> bytes:
    """The elements of a stored tensor, row-major, as they lie in the file."""
    kind = np.dtype(f"V{tensor.dtype.itemsize}")
    strides = [stride * kind.itemsize for stride in tensor.strides]
    offset = tensor.offset * kind.itemsize
    return np.ndarray(tensor.shape, kind, tb.payload_of(path, tensor) or b"", offset, strides).tobytes()


def bits(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def assert_same(path: Path, found: Any, truth: Any, place: str = "root") -> int:
    """Walk both trees; the number of tensors compared."""
    if isinstance(truth, torch.distributed.tensor.DTensor):
        assert isinstance(found, WrapperSubclass), place
        assert found.shape == tuple(truth.shape), place
        return assert_same(path, found.state["_local_tensor"], truth._local_tensor, place)
    if hasattr(truth, "raw_state"):
        assert isinstance(found, WrapperSubclass), place
        shards = truth.raw_state[0]
        assert len(found.state[0]) == len(shards), place
        pairs = zip(found.state[0], shards, strict=True)
        return sum(assert_same(path, mine.get("tensor"), theirs.tensor, place) for mine, theirs in pairs)
    if isinstance(truth, torch.Tensor):
        assert isinstance(found, StoredTensor), place
        assert found.shape == tuple(truth.shape), place
        assert found.dtype.torch_name == str(truth.dtype).removeprefix("torch."), place
        assert bits_of(path, found) == bits(truth), place
        return 1
    if isinstance(truth, dict):
        assert list(found) == list(truth), place
        return sum(assert_same(path, found[key], truth[key], f"{place}[{key!r}]") for key in truth)
    if isinstance(truth, (list, tuple)) and not isinstance(found, Opaque):
        assert len(found) == len(truth), place
        return sum(assert_same(path, *pair, f"{place}[…]") for pair in zip(found, truth, strict=True))
    if truth is None or (isinstance(truth, (bool, int, float, str, bytes)) and not isinstance(found, Opaque)):
        assert found == truth or truth != truth, place
    return 0


class Anything:
    """Stands in for classes that are not installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class LenientUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name, (Anything,), {})


LENIENT = types.SimpleNamespace(Unpickler=LenientUnpickler, load=pickle.load, __name__="lenient")


@pytest.fixture(autouse=True, scope="module")
def _sharded_tensors_without_processes() -> Iterator[None]:
    """ShardedTensor refuses to be loaded outside of its process group."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedTensor, "__setstate__", lambda self, state: setattr(self, "raw_state", state))
        yield


def compare(path: Path) -> int:
    truth = torch.load(path, map_location="cpu", weights_only=False, pickle_module=LENIENT)
    return assert_same(path, read_torch_file(path, tb.FILE).root, truth)


def torch_files(directory: Path) -> list[Path]:
    files = [path for path in sorted(directory.rglob("*")) if path.suffix in (".pt", ".bin", ".pth", ".pkl")]
    return [path for path in files if path.name != "common.pt"]  # Megatron-Core's holds no tensors


COMMITTED = [case.name for case in sorted(golden_set.COMMITTED.iterdir()) if torch_files(case / "ckpt")]


@pytest.mark.parametrize("case", COMMITTED)
def test_committed_checkpoints(case: str) -> None:
    assert sum(compare(path) for path in torch_files(golden_set.COMMITTED / case / "ckpt")) > 0


@pytest.mark.slow
def test_larger_golden_set(larger_golden: Path) -> None:
    files = [path for folder in ("cases", "old_torch") for path in torch_files(larger_golden / folder)]
    tensors = sum(compare(path) for path in files)
    assert len(files) > 500
    assert tensors > 5_000


BASE = torch.arange(12.0).reshape(3, 4)
SAMPLES: dict[str, Any] = {
    "transposed": BASE.T,
    "strided": BASE[1:, ::2],
    "expanded": BASE[0].expand(5, 4),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 5),
    "empty slice": BASE[3:],
    "parameter": torch.nn.Parameter(BASE),
    "buffer": torch.nn.Buffer(BASE),
    "state dict": torch.nn.BatchNorm1d(3).state_dict(),
    "shared": {"a": BASE, "b": BASE, "c": BASE[0]},
    "nested": {"epoch": 3, "lr": [1e-4, None, True], "names": ("a", b"b"), 7: {"deep": [BASE]}},
}


@pytest.mark.parametrize("options", [{}, LEGACY, {"pickle_protocol": 4}, {"pickle_protocol": 5, **LEGACY}], ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_samples(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    path = tmp_path / "model.pt"
    torch.save({"sample": SAMPLES[name]}, path, **options)
    assert compare(path) >= 1


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "dtype",
    [
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex64", "int64", "int32", "int16", "int8",
        "uint64", "uint32", "uint16", "uint8", "bool",
    ],
)  # fmt: skip
def test_every_dtype(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    kind = getattr(torch, dtype, None)
    if kind is None:
        pytest.skip(f"this torch has no {dtype}")
    path = tmp_path / "model.pt"
    values = (torch.arange(48, dtype=torch.uint8) % 2).view(kind)[1:]
    torch.save(values, path, **options)
    # torch cannot load the newer types from its own legacy streams: so the truth is what was saved.
    assert assert_same(path, read_torch_file(path, tb.FILE).root, values) == 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(3, dtype=torch.complex128), "ComplexDoubleStorage"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "lazy view"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: BASE.to_sparse(), "sparse"),
        (lambda: BASE.to_sparse_csr(), "sparse"),
        (lambda: torch.nested.nested_tensor([BASE, BASE], layout=torch.jagged), "NestedTensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_told_apart(tmp_path: Path, make: Any, reason: str) -> None:
    path = tmp_path / "model.pt"
    torch.save({"good": BASE, "bad": make()}, path)
    root = read_torch_file(path, tb.FILE).root
    assert isinstance(root["bad"], UnsupportedTensor)
    assert reason in root["bad"].reason
    assert_same(path, root["good"], BASE)


def test_items_of_one_file(tmp_path: Path) -> None:
    """As torch.distributed.checkpoint packs them: whole archives, one after the other, without alignment."""
    item = tmp_path / "item.pt"
    path = tmp_path / "__0_0.distcp"
    spans = []
    for number in range(3):
        torch.save(BASE + number, item)
        with path.open("ab") as packed:
            spans.append((packed.tell(), packed.write(item.read_bytes()[:])))
            packed.write(b"x" * 3)
    for number, (start, length) in enumerate(spans):
        found = read_torch_file(path, tb.FILE, start=start, length=length)
        assert_same(path, found.root, BASE + number)


@pytest.mark.slow
def test_storages_beyond_4_gib(tmp_path: Path) -> None:
    """Sizes and offsets of 64 bits, as torch writes them; the file is sparse."""
    skip_data = getattr(torch.serialization, "skip_data", None)
    if skip_data is None:
        pytest.skip("this torch cannot save without data")
    path = tmp_path / "model.pt"
    with skip_data():
        torch.save({"big": torch.empty((1 << 32) + 10, dtype=torch.uint8), "small": torch.empty(5), "last": BASE}, path)
    root = read_torch_file(path, tb.FILE).root
    archive = torch._C.PyTorchFileReader(str(path))
    for name, key in (("big", "0"), ("small", "1"), ("last", "2")):
        storage = root[name].storage
        assert isinstance(storage, Storage)
        assert storage.offset == archive.get_record_offset(f"data/{key}")
    assert root["big"].storage.nbytes == (1 << 32) + 10


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    with pytest.raises(FormatError, match="TorchScript"):
        read_torch_file(path, tb.FILE)
