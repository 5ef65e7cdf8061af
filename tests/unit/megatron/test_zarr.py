"""The zarr backend, from directories that a few lines of numpy write."""

from __future__ import annotations

import json
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from assembled import gather
from format_contract import check_format
from unshard.checkpoint import Checkpoint
from unshard.formats.contract import Source
from unshard.formats.megatron.distributed import MegatronDist

NAMES = {np.dtype(ml_dtypes.bfloat16): "bfloat16"}


def write_array(directory: Path, array: np.ndarray, chunks: tuple[int, ...], **changes: Any) -> None:
    """One array as zarr v2 writes it: chunks at the edges are full-size, and hold anything beyond the edge."""
    directory.mkdir(parents=True)
    facts = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": NAMES.get(array.dtype, array.dtype.str),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(array.shape),
        "zarr_format": 2,
    }
    (directory / ".zarray").write_text(json.dumps(facts | changes))
    for index in product(*[range(-(-size // chunk)) for size, chunk in zip(array.shape, chunks, strict=True)]):
        piece = np.full(chunks, 7, array.dtype)
        part = array[tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))]
        piece[tuple(slice(0, size) for size in part.shape)] = part
        (directory / (".".join(map(str, index)) or "0")).write_bytes(piece.tobytes())


def write_checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """A checkpoint of two layers on two tensor-parallel ranks; the vocabulary's last chunk reaches over the edge."""
    random = np.random.default_rng(0)
    values = {
        "embedding.word_embeddings.weight": random.normal(size=(7, 6)).astype(ml_dtypes.bfloat16),
        "decoder.layers.self_attention.linear_proj.weight": random.normal(size=(2, 4, 6)).astype(np.float32),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": random.normal(size=(2, 4, 5, 6)).astype(np.float16),
        "decoder.final_layernorm.weight": random.normal(size=6).astype(ml_dtypes.bfloat16),
    }
    for (key, value), chunks in zip(values.items(), [(4, 6), (1, 4, 3), (1, 2, 5, 3), (6,)], strict=True):
        write_array(directory / key, value, chunks)
    write_array(directory / "optimizer.state.exp_avg.output_layer.weight", np.zeros(4, np.float32), (4,))
    (directory / "embedding.word_embeddings.weight.sync").mkdir()
    for layer in range(2):
        state = directory / "decoder.layers.self_attention.linear_qkv._extra_state" / f"shard_{layer}_2.pt"
        state.parent.mkdir(exist_ok=True)
        state.write_bytes(pickle.dumps(None))
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    return values


def read(directory: Path) -> Checkpoint:
    return MegatronDist().read(Source(directory))


def test_every_value(tmp_path: Path) -> None:
    values = write_checkpoint(tmp_path)
    checkpoint = read(tmp_path)
    assert checkpoint.problems == ()
    expected = {}
    for key, value in values.items():
        block, stacked, rest = key.partition("layers.")
        rest = rest.replace("experts.experts", "experts")
        expected |= {f"{block}layers.{i}.{rest}": row for i, row in enumerate(value)} if stacked else {key: value}
    assert checkpoint.tensors.keys() == expected.keys()
    for name, value in expected.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.shape, tensor.dtype.numpy) == (value.shape, value.dtype), name
        assert gather(tensor, checkpoint.roots) == value.tobytes(), name


def test_the_catalog_says_what_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    checkpoint = read(tmp_path)
    assert (checkpoint.title, checkpoint.dialect) == ("Megatron-Core zarr", "megatron")
    assert checkpoint.skipped.keys() == {"optimizer", "*._extra_state"}
    assert "2 entries" in checkpoint.skipped["*._extra_state"]


def test_contract(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "scratch").mkdir()
    check_format(MegatronDist(), tmp_path / "checkpoint", tmp_path / "scratch")


def test_a_missing_chunk_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    place = tmp_path / "decoder.layers.self_attention.linear_proj.weight"
    (place / "1.0.1").unlink()
    problems = read(tmp_path).problems
    assert [f"{place}: 1 of 4 chunks are missing: 1.0.1" in str(problem) for problem in problems] == [True]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, "compressor is {'id': 'blosc', 'cname': 'lz4'}"),
        ({"filters": [{"id": "delta"}]}, "filters is"),
        ({"order": "F"}, "order is 'F'"),
        ({"zarr_format": 3}, "zarr_format is 3"),
        ({"dtype": ">f4"}, "elements of type '>f4'"),
        ({"dtype": [["a", "<f4"]]}, "elements of type [['a', '<f4']]"),
        ({"shape": [4, 6]}, "a shape of [4, 6] in chunks of [1, 4, 3]"),
        ({"chunks": [0, 4, 3]}, "in chunks of [0, 4, 3]"),
        ({"shape": [True, 4, 6]}, "a shape of [True, 4, 6]"),
        ({"shape": [1 << 40, 4, 6]}, "chunks; at most"),
        ({"dtype": "<f8"}, "has 48 bytes, but a chunk of [1, 4, 3] F64 has 96"),
    ],
)
def test_what_megatron_never_writes_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "decoder.layers.self_attention.linear_proj.weight" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    problems = read(tmp_path).problems
    assert [words in str(problem) for problem in problems] == [True], problems
    assert str(file.parent) in str(problems[0])


def test_a_scalar_and_an_empty_array(tmp_path: Path) -> None:
    write_array(tmp_path / "a.scale", np.array(3, "<i8"), ())
    write_array(tmp_path / "a.nothing", np.zeros((0, 4), "<f4"), (1, 4))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    checkpoint = read(tmp_path)
    assert checkpoint.problems == ()
    assert gather(checkpoint.tensors["a.scale"], checkpoint.roots) == np.array(3, "<i8").tobytes()
    assert checkpoint.tensors["a.nothing"].chunks == ()


def test_an_unfinished_save(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "metadata.json").unlink()
    assert MegatronDist().detect(tmp_path) is None  # nothing tells it from the zarr arrays of anybody else
    (tmp_path / "common.pt").write_bytes(b"")
    assert MegatronDist().detect(tmp_path) == "an unfinished Megatron-Core distributed checkpoint (zarr)"
    assert "metadata.json is missing" in str(read(tmp_path).problems[0])


def test_a_backend_that_nobody_knows(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "tensorstore"}')
    with pytest.raises(Exception, match="`sharded_backend` is 'tensorstore'"):
        read(tmp_path)
