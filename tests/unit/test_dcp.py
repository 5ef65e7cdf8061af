"""The reader of DCP directories: what it finds, what it opens, and what it says of directories that are not whole."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import dcp_bytes as db
import torch_bytes as tb
from unshard import dtypes
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError
from unshard.formats.dcp import payloads as payloads_module
from unshard.formats.dcp.container import Container, read_container
from unshard.formats.dcp.directory import Folder
from unshard.formats.dcp.objects import read_item
from unshard.formats.torch_file import Opaque
from unshard.plan.coverage import prove_coverage
from unshard.tensors import SourceFile

ARRAYS = {
    "model.a.weight": np.arange(24, dtype=np.float32).reshape(6, 4),
    "model.b.weight": np.arange(100, 124, dtype=np.float32).reshape(6, 4),
    "model.c.bias": np.arange(7, dtype=np.float16),
}


def read(directory: Path, **options: object) -> Container:
    return read_container(directory, db.ROOT, **options)  # type: ignore[arg-type]


def only_problem(container: Container) -> UnshardError:
    (problem,) = container.problems
    return problem


def assert_arrays(container: Container, directory: Path, arrays: dict[str, np.ndarray] = ARRAYS) -> None:
    assert container.problems == ()
    assert sorted(container.tensors) == sorted(arrays)
    for name, array in arrays.items():
        tensor = container.tensors[name]
        assert prove_coverage(tensor) == []
        assert (tensor.name, tensor.shape) == (name, array.shape)
        np.testing.assert_array_equal(db.read_array(tensor, directory), array)


def test_pieces_of_two_ranks_make_tensors(tmp_path: Path) -> None:
    container = read(db.sharded(tmp_path, ARRAYS).finish())
    assert_arrays(container, tmp_path)
    assert container.tensors["model.c.bias"].dtype is dtypes.F16
    assert [chunk.rank for chunk in container.tensors["model.a.weight"].chunks] == [0, 1]


def test_scalars_empty_tensors_and_empty_pieces(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    arrays = {"step": np.array(3.5, np.float32), "none": np.zeros((0, 4), np.float32), "one": np.ones(1, np.float32)}
    for name, array in arrays.items():
        writer.declare(name, array.shape)
        writer.write(name, (0,) * array.ndim, array)
    writer.write("one", (1,), np.zeros(0, np.float32))
    container = read(writer.finish())
    assert_arrays(container, tmp_path, arrays)
    assert [len(container.tensors[name].chunks) for name in arrays] == [1, 0, 1]


@pytest.mark.parametrize(
    ("file", "rank"),
    [("__3_1.distcp", 3), ("part/__12_0.distcp", 12), ("whatever", None), ("__x_0.distcp", None)],
)
def test_files_are_those_that_the_metadata_name(tmp_path: Path, file: str, rank: int | None) -> None:
    writer = db.Writer(tmp_path / "iter" / "dist")
    writer.declare("w", (2,))
    writer.write("w", (0,), np.ones(2, np.float32), file)
    container = read(writer.finish(), relative="iter/dist")
    (chunk,) = container.tensors["w"].chunks
    assert chunk.rank == rank
    assert chunk.extent.file == SourceFile(db.ROOT, f"iter/dist/{file}")
    np.testing.assert_array_equal(db.read_array(container.tensors["w"], tmp_path), [1, 1])


def test_an_item_is_read_as_it_was_strided(tmp_path: Path) -> None:
    base = np.arange(40, dtype=np.float32)
    views = {"transposed": base.reshape(8, 5).T, "part": base[7:19].reshape(3, 4)}
    writer = db.Writer(tmp_path)
    for name, view in views.items():
        writer.declare(name, view.shape)
        writer.write(name, (0, 0), view)
    assert_arrays(read(writer.finish()), tmp_path, views)


def test_equal_heads_are_read_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of one length, but of two layouts: each layout is unpickled once, and no item is taken for the other."""
    opened = []
    whole = payloads_module.read_torch_file

    def count(*arguments: object, **options: object) -> object:
        opened.append(options["start"])
        return whole(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(payloads_module, "read_torch_file", count)
    arrays = {}
    for number in range(10):
        base = np.arange(number, number + 16, dtype=np.float32)
        arrays[f"rows{number}"] = base.reshape(4, 4)
        arrays[f"columns{number}"] = base.reshape(4, 4).T
    writer = db.Writer(tmp_path)
    for name, array in arrays.items():
        writer.declare(name, array.shape)
        writer.write(name, (0, 0), array)
    assert_arrays(read(writer.finish()), tmp_path, arrays)
    assert len(opened) == 2


def test_what_is_not_wanted_is_not_opened(tmp_path: Path) -> None:
    writer = db.sharded(tmp_path, ARRAYS)
    writer.declare("optimizer.state.exp_avg", (4,))
    writer.write("optimizer.state.exp_avg", (0,), np.zeros(4, np.float32), "__9_0.distcp")
    writer.finish()
    (tmp_path / "__9_0.distcp").unlink()
    container = read(tmp_path, wanted=lambda name: name.startswith("model."))
    assert_arrays(container, tmp_path)
    assert list(container.skipped) == ["optimizer.state.exp_avg"]


def test_objects_are_read_when_asked_for(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    writer.write_object("lr", tb.mapping({"value": tb.integer(7), "what": db.instance("Thing", b"}", "evil")}))
    container = read(writer.finish())
    found = read_item(container.items["lr"])
    assert isinstance(found, dict)
    assert found["value"] == 7
    assert isinstance(found["what"], Opaque)


def test_nested_paths_and_foreign_attributes(tmp_path: Path) -> None:
    writer = db.sharded(tmp_path, ARRAYS)
    paths = db.pairs([(tb.text("model.a.weight"), tb.group(tb.text("model"), tb.integer(3), tb.text("a.weight")))])
    writer.finish(paths=paths, cls="MCoreMetadata", mcore_data=tb.mapping({"x": tb.integer(1)}), all_local_plans=b"]")
    container = read(tmp_path)
    assert_arrays(container, tmp_path)
    assert container.paths == {"model.a.weight": ("model", 3, "a.weight")}
    assert container.extra == {"mcore_data": {"x": 1}}


@pytest.mark.parametrize(
    "path", [("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath")]
)
def test_the_paths_of_other_systems_are_records(tmp_path: Path, path: tuple[str, str]) -> None:
    where = tb.call(tb.named(*path), tb.text("/"), tb.text("ckpt"))
    meta = db.instance("StorageMeta", tb.mapping({"checkpoint_id": where, "modules": b"]"}))
    container = read(db.sharded(tmp_path, ARRAYS).finish(storage_meta=meta, version=tb.text("1.0.0")))
    assert_arrays(container, tmp_path)
    assert container.extra == {}


def test_tensor_properties_of_old_releases(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    writer.declare("w", (2,))
    writer.write("w", (0,), np.ones(2, np.float32))
    module = "torch.distributed._shard.sharded_tensor.metadata"
    entry = db.tensor_entry((2,), writer.chunks["w"], module=module)
    (tmp_path / ".metadata").write_bytes(db.metadata({"w": entry}, writer.places))
    assert_arrays(read(tmp_path), tmp_path, {"w": np.ones(2, np.float32)})


def test_replicas_that_were_recorded_twice_are_one(tmp_path: Path) -> None:
    """Before torch 2.3 each rank's plan listed replicated tensors; the metadata name one place for all of them."""
    writer = db.Writer(tmp_path)
    writer.declare("w", (2,))
    writer.write("w", (0,), np.zeros(2, np.float32), "__0_0.distcp", placed=False)
    writer.write("w", (0,), np.ones(2, np.float32), "__1_0.distcp")
    assert_arrays(read(writer.finish()), tmp_path, {"w": np.ones(2, np.float32)})


# Directories in parts ------------------------------------------------------------------------------------------------


def test_metadata_of_single_ranks_are_merged(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32).reshape(4, 2)
    for rank in range(2):
        writer = db.Writer(tmp_path)
        writer.declare("w", array.shape)
        writer.declare("bias", (2,))
        writer.write("w", (2 * rank, 0), array[2 * rank : 2 * rank + 2].copy(), f"__{rank}_0.distcp")
        writer.write("bias", (0,), np.ones(2, np.float32), f"__{rank}_0.distcp")
        writer.write_object("step", tb.integer(rank), f"__{rank}_0.distcp")
        writer.finish(f"__{rank}.metadata")
    container = read(tmp_path)
    assert_arrays(container, tmp_path, {"w": array, "bias": np.ones(2, np.float32)})
    assert [chunk.rank for chunk in container.tensors["bias"].chunks] == [0, 1]
    assert read_item(container.items["step"]) == 0


def test_ranks_without_their_metadata_are_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        writer = db.Writer(tmp_path)
        writer.declare("w", (4,))
        writer.write("w", (rank,), np.ones(1, np.float32), f"__{rank}_0.distcp")
        writer.finish(f"__{rank}.metadata")
    (tmp_path / "__3_0.distcp").touch()
    assert "ranks 1, 3 are missing" in str(only_problem(read(tmp_path)))


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        writer = db.Writer(tmp_path)
        writer.declare("w", (4 + rank,))
        writer.write("w", (rank,), np.ones(1, np.float32), f"__{rank}_0.distcp")
        writer.finish(f"__{rank}.metadata")
    assert re.match(r"__1.metadata: other shapes or types .*`w`", str(only_problem(read(tmp_path))))


def test_files_on_the_disks_of_other_nodes(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    db.sharded(here, ARRAYS).finish()
    there.mkdir()
    (here / "__1_0.distcp").rename(there / "__1_0.distcp")
    container = read(here, also=[Folder(there, "also1", "deep")])
    assert container.problems == ()
    assert [chunk.extent.file for chunk in container.tensors["model.a.weight"].chunks] == [
        SourceFile(db.ROOT, "__0_0.distcp"),
        SourceFile("also1", "deep/__1_0.distcp"),
    ]


# What is wrong -------------------------------------------------------------------------------------------------------


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    db.sharded(tmp_path, ARRAYS, ranks=4).finish()
    for rank in (1, 3):
        (tmp_path / f"__{rank}_0.distcp").unlink()
    container = read(tmp_path)
    problem = only_problem(container)
    assert isinstance(problem, IncompleteError)
    assert "2 files that the metadata name are missing: holes in 3 tensors" in problem.message
    assert "__1_0.distcp (pieces of 3 tensors)" in problem.message
    assert "__3_0.distcp (pieces of 1 tensor)" in problem.message
    assert len(container.tensors["model.a.weight"].chunks) == 2


def test_truncated_files_are_named(tmp_path: Path) -> None:
    db.sharded(tmp_path, ARRAYS).finish()
    file = tmp_path / "__1_0.distcp"
    size = file.stat().st_size - 1
    with file.open("ab") as stream:
        stream.truncate(size)
    problem = only_problem(read(tmp_path))
    assert f"__1_0.distcp: ends at byte {size:,}, before the pieces of 1 tensor (`model.c.bias`)" in problem.message
    assert "truncated" in str(problem.hint)


def test_pieces_without_a_place_are_named(tmp_path: Path) -> None:
    writer = db.sharded(tmp_path, ARRAYS)
    del writer.places[2:4]
    container = read(writer.finish())
    assert "the metadata do not say where pieces were written:\n  model.b.weight: 2 pieces" in str(
        only_problem(container)
    )
    assert container.tensors["model.b.weight"].chunks == ()


def test_objects_without_a_place_are_named(tmp_path: Path) -> None:
    writer = db.sharded(tmp_path, ARRAYS)
    writer.objects.append("lost")
    assert "where entries were written: `lost`" in str(only_problem(read(writer.finish())))


def test_a_type_other_than_recorded_is_named(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    for name in ("v", "w"):
        writer.declare(name, (2,), "bfloat16")
        writer.write(name, (0,), np.ones(2, np.float32))
    assert "the metadata record BF16 where F32 is stored: 2 tensors (`v`, `w`), in __0_0.distcp" in str(
        only_problem(read(writer.finish()))
    )


def test_types_that_we_do_not_hold_are_named(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    writer.declare("w", (2,), "complex128")
    container = read(writer.finish())
    assert "torch.complex128, which safetensors cannot hold: 1 tensor (`w`)" in str(only_problem(container))
    assert container.tensors == {}


@pytest.mark.parametrize("stored", [(2,), (2, 2, 1), ()])
def test_a_piece_with_other_axes_than_recorded_is_named(tmp_path: Path, stored: tuple[int, ...]) -> None:
    """Files of two saves that were mixed: looking for the mesh that explains the sizes broke on other axes."""
    writer = db.Writer(tmp_path)
    writer.declare("w", (4, 2))
    writer.write("w", (0, 0), np.ones(stored, np.float32), sizes=(2, 2))
    writer.write("w", (2, 0), np.ones((2, 2), np.float32), "__3_0.distcp")
    assert f"of shape [2, 2]; stored {list(stored)} in __0_0.distcp" in str(only_problem(read(writer.finish())))


def test_a_shape_other_than_recorded_is_named(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    writer.declare("w", (4, 2))
    writer.write("w", (0, 0), np.ones((2, 2), np.float32))
    writer.write("w", (2, 0), np.ones((1, 2), np.float32), sizes=(2, 2))
    container = read(writer.finish())
    assert "w: recorded [2:4, 0:2], of shape [2, 2]; stored [1, 2] in __0_0.distcp" in str(only_problem(container))
    assert len(container.tensors["w"].chunks) == 1


def test_transformed_items_are_refused_by_name(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    writer.declare("w", (2,))
    writer.write("w", (0,), np.ones(2, np.float32), transforms=["stream.rot13/1"])
    problem = only_problem(read(writer.finish()))
    assert problem.message == "written through 'stream.rot13/1', which is not undone here: 1 tensor (`w`)"


def test_damaged_items_are_told_up_to_a_number(tmp_path: Path) -> None:
    writer = db.Writer(tmp_path)
    for number in range(30):
        writer.declare(f"w{number}", (2,))
        writer.write(f"w{number}", (0,), np.full(2, number, np.float32))
    writer.finish()
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
    problems = read(tmp_path).problems
    assert len(problems) == 21
    assert (
        "`w0`: __0_0.distcp: the item at byte 0: the tensor is an object of class torch._utils._rebuild_tensor_v9"
        in str(problems[0])
    )
    assert "10 more pieces cannot be read" in str(problems[-1])


@pytest.mark.parametrize("name", [".metadata.tmp", "__0.metadata.tmp"])
def test_an_interrupted_save_is_called_so(tmp_path: Path, name: str) -> None:
    db.sharded(tmp_path, ARRAYS).finish(name)
    with pytest.raises(IncompleteError, match=f"there is {name}, but no .metadata") as caught:
        read(tmp_path)
    assert "interrupted" in str(caught.value.hint)


def test_data_without_metadata_were_interrupted_or_not_copied(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    with pytest.raises(IncompleteError, match=r"there are \.distcp files, but no \.metadata") as caught:
        read(tmp_path)
    assert "hidden file" in str(caught.value.hint)


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError, match="no directory of torch"):
        read(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        read(tmp_path / "nowhere")
