"""Headers for any set of tensors, against the safetensors library, and sharding against huggingface_hub's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unshard.dtypes import DTYPES, DType
from unshard.errors import FormatError
from unshard.formats.huggingface.shards import SAFETENSORS, assign_files
from unshard.formats.safetensors_file import lay_out_header, read_header
from unshard.tensors import SourceFile

NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8)
SOURCE = SourceFile("here", "x.safetensors")


def write(directory: str, tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> Path:
    path = Path(directory) / "x.safetensors"
    layout = lay_out_header([(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
    path.write_bytes(layout.data + bytes(layout.size - len(layout.data)))
    return path


@settings(max_examples=150, deadline=None)
@given(TENSORS)
def test_what_is_laid_out_is_read_back_and_aligned(tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> None:
    with TemporaryDirectory() as directory:
        found = read_header(write(directory, tensors), SOURCE)
    assert found.metadata == {"format": "pt"}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == tensors
    for tensor in found.tensors.values():
        for chunk in tensor.chunks:
            assert chunk.extent.offset % tensor.dtype.itemsize == 0
            assert chunk.box.sizes == tensor.shape


@settings(max_examples=150, deadline=None)
@given(TENSORS)
def test_the_library_accepts_every_header_and_reads_the_same(tensors: dict[str, tuple[DType, tuple[int, ...]]]) -> None:
    safetensors = pytest.importorskip("safetensors")
    with TemporaryDirectory() as directory, safetensors.safe_open(write(directory, tensors), "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == tensors.keys()
        for name, (dtype, shape) in tensors.items():
            view = file.get_slice(name)
            assert view.get_dtype() == dtype.name
            assert tuple(view.get_shape()) == (*shape[:-1], shape[-1] * dtype.packed)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.sampled_from(["U8", "F32", "F4"]), SHAPES), max_size=3),
    st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 255)), max_size=3),
    st.integers(-3, 3),
)
def test_a_damaged_file_that_we_accept_the_library_accepts_too(
    entries: dict[str, tuple[str, tuple[int, ...]]], damage: list[tuple[int, int]], length: int
) -> None:
    safetensors = pytest.importorskip("safetensors")
    by_name = {dtype.name: dtype for dtype in DTYPES}
    with TemporaryDirectory() as directory:
        path = write(directory, {name: (by_name[dtype], shape) for name, (dtype, shape) in entries.items()})
        content = bytearray(path.read_bytes())
        for place, value in damage:
            content[place % len(content)] = value
        path.write_bytes(content[: len(content) + length] if length < 0 else content + bytes(length))
        try:
            found = read_header(path, SOURCE)
        except FormatError:
            return
        with safetensors.safe_open(path, "np") as file:
            assert set(file.keys()) == found.tensors.keys()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_files_are_those_of_huggingface_hub(sizes: list[int], limit: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    expected = hub.split_state_dict_into_shards_factory(
        named, get_storage_size=lambda size: size, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    assert assign_files(named, limit, SAFETENSORS) == expected.filename_to_tensors


def test_a_header_is_byte_for_byte_the_librarys() -> None:
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    arrays = {
        'b"\\é 雪': numpy.zeros((2, 3), "float32"),
        "a": numpy.zeros((), "int64"),
        "c": numpy.zeros((0, 2), "bool"),
        "A": numpy.zeros(3, "float32"),
    }
    content = library.save(arrays, {"format": "pt"})
    by_numpy_name = {dtype.numpy_name.rstrip("_"): dtype for dtype in DTYPES}
    layout = lay_out_header([(name, by_numpy_name[array.dtype.name], array.shape) for name, array in arrays.items()])
    assert layout.data == content[: len(layout.data)]
    assert layout.size == len(content)
