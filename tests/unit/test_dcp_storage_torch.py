"""The ways of storing that torch's own writer can be told to use, against what torch loads or was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_bytes as db
import unshard
from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.objects import read_item
from unshard.plan.coverage import prove_coverage
from unshard.run.gathering import read_tensor

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.filesystem import SerializationFormat  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip

VIEWS = {
    "rows": torch.arange(40.0).reshape(8, 5)[2:6],
    "columns": torch.arange(40.0).reshape(8, 5)[:, 1:3],
    "transposed": torch.arange(40.0).reshape(8, 5).T,
    "stepped": torch.arange(40.0).reshape(8, 5)[::3, ::2],
    "expanded": torch.arange(5.0)[:, None].expand(5, 4),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "one": torch.arange(7.0)[3],
}
"""Tensors that are parts of larger storages, or do not lie row by row."""


def state_dict(views: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model: dict[str, Any] = {str(dtype): (torch.arange(12) % 2).reshape(3, 4).to(dtype) for dtype in DTYPES}
    model["large"] = torch.cat([torch.randn(300, 200), torch.zeros(300, 200)])
    return {
        "model": model | views,
        "empty": torch.zeros(0, 3),
        "step": 7,
        "lr": [1e-4, {"group": torch.ones(2)}],
        "text": "é" * 100_000,
    }


def values_of(container: Container, directory: Path) -> dict[str, Any]:
    """Every entry; of tensors the bits."""
    assert container.problems == ()
    found: dict[str, Any] = {name: read_item(item) for name, item in container.items.items()}
    for name, tensor in container.tensors.items():
        assert prove_coverage(tensor) == []
        found[name] = (
            tensor.dtype.torch_name, tensor.shape, read_tensor(tensor, {db.ROOT: directory}).tobytes(),
        )  # fmt: skip
    return found


def as_bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data


def load(directory: Path) -> dict[str, Any]:
    """Every entry as torch loads it."""
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(directory), planner=planner, no_dist=True)
    return {name: as_bits(value) for name, value in flatten_state_dict(state)[0].items()}


def save(directory: Path, **options: Any) -> dict[str, Any]:
    """What was saved. The library of safetensors takes contiguous tensors only."""
    packed = "serialization_format" in options
    state = state_dict({name: view.contiguous() if packed else view for name, view in VIEWS.items()})
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, **options), no_dist=True)
    return {name: as_bits(value) for name, value in flatten_state_dict(state)[0].items()}


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_what_was_compressed_is_read_as_torch_loads_it(tmp_path: Path, options: dict[str, Any]) -> None:
    pytest.importorskip("zstandard")
    saved = save(tmp_path, _extensions=[ZStandard()], **options)
    container = read_container(tmp_path, db.ROOT)
    assert values_of(container, tmp_path) == saved == load(tmp_path)
    chunks = [chunk for tensor in container.tensors.values() for chunk in tensor.chunks]
    assert {chunk.extent.encoding for chunk in chunks} == {"zstd"}


def test_checksums_may_have_been_left_out(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    torch.serialization.set_crc32_options(False)
    try:
        saved = save(tmp_path, _extensions=[ZStandard()])
    finally:
        torch.serialization.set_crc32_options(True)
    assert values_of(read_container(tmp_path, db.ROOT), tmp_path) == saved


def test_storages_may_be_aligned_to_pages(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    config = torch.utils.serialization.config
    before, config.save.storage_alignment = config.save.storage_alignment, 4096
    try:
        saved = save(tmp_path, _extensions=[ZStandard()])
    finally:
        config.save.storage_alignment = before
    assert values_of(read_container(tmp_path, db.ROOT), tmp_path) == saved == load(tmp_path)


def test_two_extensions_are_a_chain_that_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    save(tmp_path, _extensions=[ZStandard(), ZStandard()])
    (problem,) = read_container(tmp_path, db.ROOT).problems
    assert "written through 'stream.zstd/1', 'stream.zstd/1', which is not undone here" in problem.message


def test_compressed_safetensors_are_refused(tmp_path: Path) -> None:
    """Torch writes them uncompressed, at a place that it does not record, and cannot load them."""
    pytest.importorskip("zstandard")
    save(tmp_path, _extensions=[ZStandard()], serialization_format=SerializationFormat.SAFETENSORS)
    (problem,) = read_container(tmp_path, db.ROOT).problems
    assert "which torch cannot load either" in problem.message


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_safetensors_of_several_files_and_threads(tmp_path: Path, options: dict[str, Any]) -> None:
    """Torch 2.13 cannot load what it saves in this way: the truth is what was saved."""
    saved = save(tmp_path, serialization_format=SerializationFormat.SAFETENSORS, **options)
    assert values_of(read_container(tmp_path, db.ROOT), tmp_path) == saved


@pytest.mark.parametrize("options", [{"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_views_of_larger_storages_and_several_threads(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = save(tmp_path, **options)
    assert values_of(read_container(tmp_path, db.ROOT), tmp_path) == saved == load(tmp_path)


def test_a_parameter_without_elements_is_merged_and_verified(tmp_path: Path) -> None:
    """Verification took a tensor of shape [0], which the checkpoint has too, for what ZeRO-3 leaves of a parameter."""
    dcp.save(
        {"empty.weight": torch.zeros(0), "full.weight": torch.ones(2)}, checkpoint_id=tmp_path / "ckpt", no_dist=True
    )
    report = unshard.merge(tmp_path / "ckpt", tmp_path / "out", weights_only=True)
    assert report.tensors == 2
