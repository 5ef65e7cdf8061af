"""pytorch_model.bin: a zip archive that every reader of zip finds sound."""

from __future__ import annotations

import io
import pickletools
import shutil
import subprocess
import zipfile
import zlib
from math import prod
from pathlib import Path

import numpy as np
import pytest

from unshard.dtypes import BF16, DTYPES, F32, U8, DType
from unshard.formats.huggingface.bin_file import ArchiveLayout, lay_out_archive
from unshard.formats.torch_file import StoredTensor, read_torch_file
from unshard.tensors import SourceFile

GIGA = 1 << 30
SHAPES = ((3, 5), (), (0, 4), (1,), (70_000, 1))
EVERY_KIND = [(f"{dtype} é\n雪 {shape}", dtype, shape) for dtype in DTYPES for shape in SHAPES]


def fill(layout: ArchiveLayout, payload: dict[str, bytes]) -> bytes:
    """The whole file."""
    content = bytearray(layout.size)
    for offset, data in layout.literals:
        content[offset : offset + len(data)] = data
    for name, offset in layout.offsets.items():
        content[offset : offset + len(payload[name])] = payload[name]
    for seal in layout.seals:
        content[seal.at : seal.at + 4] = zlib.crc32(content[seal.start : seal.stop]).to_bytes(4, "little")
    return bytes(content)


def random_payload(entries: list[tuple[str, DType, tuple[int, ...]]]) -> dict[str, bytes]:
    random = np.random.default_rng(1)
    return {
        name: random.integers(0, 2 if dtype.name == "BOOL" else 256, prod(shape) * dtype.itemsize, np.uint8).tobytes()
        for name, dtype, shape in entries
    }


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    payload = random_payload(EVERY_KIND)
    path = tmp_path_factory.mktemp("bin") / "pytorch_model.bin"
    path.write_bytes(fill(lay_out_archive("pytorch_model", EVERY_KIND), payload))
    return path, payload


def test_it_is_sound_to_zipfile(archive: tuple[Path, dict[str, bytes]]) -> None:
    with zipfile.ZipFile(archive[0]) as file:
        assert file.testzip() is None
        members = file.infolist()
        assert [member.filename for member in members][:3] == [
            "pytorch_model/data.pkl",
            "pytorch_model/byteorder",
            "pytorch_model/data/0",
        ]
        assert {member.compress_type for member in members} == {zipfile.ZIP_STORED}
        assert file.read("pytorch_model/version") == b"3\n"
        assert len(file.read("pytorch_model/.data/serialization_id")) == 40


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_it_is_sound_to_unzip(archive: tuple[Path, dict[str, bytes]]) -> None:
    subprocess.run(["unzip", "-tqq", str(archive[0])], check=True, capture_output=True)


def test_a_wrong_byte_is_seen(archive: tuple[Path, dict[str, bytes]]) -> None:
    content = bytearray(archive[0].read_bytes())
    place = lay_out_archive("pytorch_model", EVERY_KIND).offsets[EVERY_KIND[0][0]]
    content[place] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as file:
        assert file.testzip() == "pytorch_model/data/0"


def test_our_own_reader_finds_every_tensor(archive: tuple[Path, dict[str, bytes]]) -> None:
    path, payload = archive
    content = path.read_bytes()
    state = read_torch_file(path, SourceFile("here", path.name)).root
    assert list(state) == list(payload)
    for name, dtype, shape in EVERY_KIND:
        tensor = state[name]
        assert isinstance(tensor, StoredTensor)
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        assert content[tensor.storage.offset :][: tensor.storage.nbytes] == payload[name]


def test_payloads_are_aligned_and_every_byte_is_laid_out_once() -> None:
    layout = lay_out_archive("pytorch_model", EVERY_KIND)
    assert all(offset % 64 == 0 for offset in layout.offsets.values())
    spans = [(offset, len(data)) for offset, data in layout.literals]
    spans += [(layout.offsets[name], prod(shape) * dtype.itemsize) for name, dtype, shape in EVERY_KIND]
    end = 0
    for start, size in sorted(spans):
        assert start == end or size == 0
        end += size
    assert end == layout.size


def test_integers_of_every_size_survive_the_pickle() -> None:
    sizes = [0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 40) + 7]
    layout = lay_out_archive("m", [(str(size), U8, (size,)) for size in sizes])
    pickle = next(data for _, data in layout.literals if b"\x80\x02" in data)
    start = pickle.index(b"\x80\x02")
    numbers = [arg for _, arg, _ in pickletools.genops(pickle[start:]) if isinstance(arg, int)]
    assert set(sizes) <= set(numbers)


def write_sparse(path: Path, layout: ArchiveLayout, name: str, payload: bytes) -> None:
    """The file with one payload; the others are holes."""
    with path.open("wb") as file:
        file.truncate(layout.size)
        pieces = [*layout.literals, (layout.offsets[name], payload)]
        seals = [seal for seal in layout.seals if seal.start == layout.offsets[name]]
        pieces += [(seal.at, zlib.crc32(payload).to_bytes(4, "little")) for seal in seals]
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "entries",
    [
        [("large", BF16, (3 * GIGA,)), ("behind", F32, (3,))],
        [*[(str(number), U8, (1,)) for number in range(66_000)], ("behind", F32, (3,))],
    ],
    ids=["more than four gigabytes", "more than 65535 members"],
)
def test_what_needs_zip64(tmp_path: Path, entries: list[tuple[str, DType, tuple[int, ...]]]) -> None:
    layout = lay_out_archive("pytorch_model", entries)
    path = tmp_path / "pytorch_model.bin"
    write_sparse(path, layout, "behind", b"123456789abc")
    last = f"pytorch_model/data/{len(entries) - 1}"
    with zipfile.ZipFile(path) as archive:
        assert archive.read(last) == b"123456789abc"
        assert len(archive.namelist()) == len(entries) + 4
        assert archive.getinfo("pytorch_model/data/0").file_size == prod(entries[0][2]) * entries[0][1].itemsize
    state = read_torch_file(path, SourceFile("here", path.name)).root
    assert [state[name].storage.offset for name, _, _ in entries] == list(layout.offsets.values())
