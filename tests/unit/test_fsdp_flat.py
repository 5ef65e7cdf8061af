"""FSDP1's flat parameters taken apart: padding, fragments, and an order that no name tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest

from assembled import gather
from unshard.checkpoint import Checkpoint
from unshard.dtypes import BF16, F32, DType
from unshard.errors import ModelError
from unshard.formats.fsdp.flat import Fragments, is_flat_parameter, unflatten
from unshard.formats.fsdp.order import order_by_values
from unshard.formats.torch_file.records import Global, Opaque, Storage, StoredTensor, WrapperSubclass
from unshard.tensors import Box, Chunk, Extent, SourceFile, Tensor, contiguous_chunk

ROOT = "source"


def flat_parameter(
    directory: Path, values: np.ndarray, world: int, name: str = "_flat_param", dtype: DType = F32
) -> Tensor:
    """A flat parameter of `values`, one file per rank as FSDP cuts it: `ceil(size / world)` elements each."""
    size = -(-len(values) // world)
    chunks = []
    for rank in range(world):
        part = values[rank * size : (rank + 1) * size].astype(dtype.numpy)
        file = SourceFile(ROOT, f"{name}{rank}")
        (directory / file.path).write_bytes(b"head" + part.tobytes())
        if len(part):
            extent = Extent(file, 4, (dtype.itemsize,), dtype)
            chunks.append(Chunk(Box((rank * size,), (len(part),)), extent, rank))
    return Tensor(name, dtype, (len(values),), tuple(chunks))


def fragments_of(flat: Tensor, starts: Mapping[str, int], sizes: Mapping[str, int]) -> Fragments:
    """The fragments that `use_orig_params=True` leaves: empty on the ranks that hold nothing of a parameter."""
    found = Fragments()
    for name, start in starts.items():
        for chunk in flat.chunks:
            low, high = max(start, chunk.box.offsets[0]), min(start + sizes[name], chunk.box.stops[0])
            place = chunk.extent.offset + (low - chunk.box.offsets[0]) * flat.dtype.itemsize if low < high else 4
            assert chunk.rank is not None
            found.places.setdefault(name, {})[chunk.rank] = (place, max(0, high - low))
    return found


SHAPES = {"scale": (1,), "first.weight": (5, 3), "second.weight": (3, 3), "second.bias": (3,), "third.weight": (3, 3)}
SIZES = {name: prod(shape) for name, shape in SHAPES.items()}


def packed(starts: Mapping[str, int], total: int) -> np.ndarray:
    """Numbered parameters at their starts, with -1 between them."""
    values = np.full(total, -1.0)
    for number, (name, start) in enumerate(starts.items(), 1):
        values[start : start + SIZES[name]] = number * 100 + np.arange(SIZES[name])
    return values


def check(tensors: Mapping[str, Tensor], directory: Path, dtype: DType = F32) -> None:
    assert list(tensors) == list(SHAPES)
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        assert tensor.shape == SHAPES[name]
        expected = (number * 100 + np.arange(SIZES[name])).astype(dtype.numpy)
        assert gather(tensor, {ROOT: directory}) == expected.tobytes()


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_parameters_lie_behind_each_other(world: int, tmp_path: Path) -> None:
    starts = {"scale": 0, "first.weight": 1, "second.weight": 16, "second.bias": 25, "third.weight": 28}
    flat = flat_parameter(tmp_path, packed(starts, 37), world)
    tensors, problems = unflatten({"_flat_param": flat}, SHAPES, Fragments(), {}, world)
    assert problems == []
    check(tensors, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "alignment", "world"),
    [(F32, 4, 2), (F32, 4, 3), (F32, 8, 2), (BF16, 8, 4), (F32, 16, 2)],
    ids=["fp32", "fp32 on 3 ranks", "fp32 computed in 16 bits", "bf16", "fp32 computed in 8 bits"],
)
def test_original_parameters_are_aligned_to_16_bytes_of_the_compute_type(
    dtype: DType, alignment: int, world: int, tmp_path: Path
) -> None:
    starts: dict[str, int] = {}
    end = 0
    for name, size in SIZES.items():
        starts[name] = -(-end // alignment) * alignment
        end = starts[name] + size
    flat = flat_parameter(tmp_path, packed(starts, -(-end // world) * world), world, dtype=dtype)
    tensors, problems = unflatten({"_flat_param": flat}, SHAPES, fragments_of(flat, starts, SIZES), {}, world)
    assert problems == []
    check(tensors, tmp_path, dtype)


def test_fragments_that_lie_elsewhere_are_a_problem(tmp_path: Path) -> None:
    starts = {"scale": 0, "first.weight": 4, "second.weight": 20, "second.bias": 32, "third.weight": 36}
    flat = flat_parameter(tmp_path, packed(starts, 46), 2)
    swapped = starts | {"second.weight": 36, "third.weight": 20}
    tensors, problems = unflatten({"_flat_param": flat}, SHAPES, fragments_of(flat, swapped, SIZES), {}, 2)
    assert tensors == {}
    assert "no padding of FSDP makes them fit" in problems[0].message


def test_units_own_the_parameters_below_them(tmp_path: Path) -> None:
    shapes = {"embed.weight": (4,), "layers.0.a.weight": (2, 3), "layers.0.b": (2,), "layers.10.b": (3,), "norm": (2,)}
    flats = {
        "_flat_param": flat_parameter(tmp_path, np.arange(6.0), 2, "_flat_param"),
        "layers.0._fsdp_wrapped_module._flat_param": flat_parameter(tmp_path, np.arange(8.0), 2, "zero"),
        "layers.10._checkpoint_wrapped_module._flat_param": flat_parameter(tmp_path, np.arange(3.0), 2, "ten"),
    }
    tensors, problems = unflatten(flats, shapes, Fragments(), {}, 2)
    assert problems == []
    assert list(tensors) == list(shapes)
    assert gather(tensors["norm"], {ROOT: tmp_path}) == np.array([4, 5], np.float32).tobytes()
    assert gather(tensors["layers.0.b"], {ROOT: tmp_path}) == np.array([6, 7], np.float32).tobytes()


def test_parameters_that_fsdp_ignored_are_not_looked_for(tmp_path: Path) -> None:
    flat = flat_parameter(tmp_path, np.arange(4.0), 2)
    ignored = Tensor("frozen", F32, (3,), ())
    tensors, problems = unflatten(
        {"_flat_param": flat}, {"frozen": (3,), "w": (4,)}, Fragments(), {"frozen": ignored}, 2
    )
    assert (list(tensors), problems) == (["w"], [])


def test_a_tied_parameter_lies_there_once_and_comes_out_under_both_names(tmp_path: Path) -> None:
    shapes = {"embed.weight": (2, 4), "head.weight": (2, 4)}
    flat = flat_parameter(tmp_path, np.arange(8.0), 2)
    fragments = fragments_of(flat, {"embed.weight": 0, "head.weight": 0}, {"embed.weight": 8, "head.weight": 8})
    tensors, problems = unflatten({"_flat_param": flat}, shapes, fragments, {}, 2)
    assert (list(tensors), problems) == (["embed.weight", "head.weight"], [])
    assert tensors["head.weight"].chunks == tensors["embed.weight"].chunks


def test_fragments_under_unknown_names_are_a_problem(tmp_path: Path) -> None:
    """Packed experts beside shapes of single ones have as many elements, in another order."""
    flat = flat_parameter(tmp_path, np.arange(8.0), 2)
    fragments = fragments_of(flat, {"packed": 0}, {"packed": 8})
    tensors, problems = unflatten({"_flat_param": flat}, {"one": (4,), "two": (4,)}, fragments, {}, 2)
    assert tensors == {}
    assert "pieces of packed, which the known shapes do not have" in problems[0].message


def test_flat_parameters_of_unknown_modules_are_told_together(tmp_path: Path) -> None:
    """A trainer's own module around the model, or adapters in it: every unit would be a problem of its own."""
    names = ["model.layers.0._flat_param", "model.layers.1._flat_param", "_flat_param"]
    flats = {name: flat_parameter(tmp_path, np.arange(4.0), 2, name) for name in names}
    tensors, problems = unflatten(flats, {"layers.0.w": (4,), "layers.1.w": (4,)}, Fragments(), {}, 2)
    assert tensors == {}
    (problem,) = problems
    assert "lies in model.layers.0._flat_param, model.layers.1._flat_param" in problem.message
    assert "SHARDED_STATE_DICT" in str(problem.hint)


def test_shapes_that_do_not_fit_are_told_with_both_counts(tmp_path: Path) -> None:
    flat = flat_parameter(tmp_path, np.arange(9.0), 2, "layers.0._flat_param")
    _, problems = unflatten({flat.name: flat}, {"layers.0.w": (2, 4), "norm": (3,)}, Fragments(), {}, 2)
    homeless, misfit = problems
    assert "no flat parameter holds norm" in homeless.message
    assert "has 9 elements" in misfit.message
    assert "have 8" in misfit.message
    assert misfit.hint is not None
    assert "--shapes-from DIR" in misfit.hint


def test_only_views_of_the_flat_parameter_are_fragments() -> None:
    storage = Storage(SourceFile(ROOT, "rank0"), "0", F32, 8, 64, 32)
    other = Storage(SourceFile(ROOT, "rank0"), "1", F32, 8, 128, 32)
    shard = Opaque(Global("m", "Shard"), state={"tensor": StoredTensor(storage, F32, (8,), (1,), 0)})
    sharded = WrapperSubclass(Global("m", "ShardedTensor"), F32, (16,), ([shard], None, None, None, False))
    state = {
        "_flat_param": sharded,
        "w": StoredTensor(storage, F32, (3,), (1,), 2),
        "elsewhere": StoredTensor(other, F32, (0,), (1,), 0),
        "buffer": StoredTensor(other, F32, (8,), (1,), 0),
        "matrix": StoredTensor(storage, F32, (2, 2), (2, 1), 0),
    }
    fragments = Fragments()
    assert list(fragments.take(state, 3)) == ["_flat_param", "buffer", "matrix"]
    assert fragments.places == {"w": {3: (72, 3)}, "elsewhere": {3: (128, 0)}}


def test_without_flat_parameters_nothing_is_a_fragment() -> None:
    storage = Storage(SourceFile(ROOT, "rank0"), "0", F32, 8, 64, 32)
    state = {"empty": StoredTensor(storage, F32, (0,), (1,), 0)}
    assert Fragments().take(state, 0) == state


def test_names_of_flat_parameters() -> None:
    assert is_flat_parameter("_flat_param")
    assert is_flat_parameter("model.layers.0._flat_param")
    assert not is_flat_parameter("model.my_flat_param")


class TestOrderByValues:
    """A safetensors reference lists parameters by name; a wrong order of sizes that add up would be a silent fault."""

    def reference(self, directory: Path, values: Mapping[str, np.ndarray]) -> Checkpoint:
        tensors = {}
        for name in sorted(values):
            array = values[name].astype(np.float32)
            (directory / name).write_bytes(array.tobytes())
            chunk = contiguous_chunk(SourceFile("reference", name), 0, array.shape, F32)
            tensors[name] = Tensor(name, F32, array.shape, (chunk,))
        return Checkpoint("huggingface", "", {"reference": directory}, tensors)

    def order(
        self, directory: Path, base: Mapping[str, np.ndarray], trained: Sequence[np.ndarray], dtype: DType = F32
    ) -> list[str] | None:
        flat = flat_parameter(directory, np.concatenate([array.ravel() for array in trained]), 3, dtype=dtype)
        return order_by_values(flat, sorted(base), {ROOT: directory}, self.reference(directory, base))

    def model(self) -> dict[str, np.ndarray]:
        """In the order of definition, which is not that of the names."""
        random = np.random.default_rng(0)
        shapes = {
            "q": (40, 64),
            "k": (20, 64),
            "v": (20, 64),
            "o": (64, 40),
            "b": (20,),
            "up": (90, 64),
            "down": (64, 90),
        }
        weights = {name: random.standard_normal(shape) * 0.02 for name, shape in shapes.items()}
        return weights | {"ln_b": 1 + random.standard_normal(64) * 0.1, "ln_a": 1 + random.standard_normal(64) * 0.1}

    @pytest.mark.parametrize("dtype", [F32, BF16])
    def test_trained_values_are_recognised(self, dtype: DType, tmp_path: Path) -> None:
        base = self.model()
        random = np.random.default_rng(1)
        trained = [array * (1 + random.standard_normal(array.shape) * 0.05) for array in base.values()]
        assert self.order(tmp_path, base, trained, dtype) == list(base)

    def test_unrelated_values_are_not(self, tmp_path: Path) -> None:
        random = np.random.default_rng(2)
        other = [random.standard_normal(array.shape) * 0.02 for array in self.model().values()]
        assert self.order(tmp_path, self.model(), other) is None

    def test_twins_that_hold_different_things_are_refused(self, tmp_path: Path) -> None:
        base = {"a": np.ones(16), "b": np.ones(16)}
        trained = [np.full(16, 1.01), np.full(16, 1.02)]
        with pytest.raises(ModelError, match=r"cannot tell a from b|cannot tell b from a"):
            self.order(tmp_path, base, trained)

    def test_twins_that_hold_the_same_may_stand_in_any_order(self, tmp_path: Path) -> None:
        base = {"a": np.ones(16), "b": np.ones(16), "w": np.arange(1.0, 33.0)}
        assert self.order(tmp_path, base, [base["w"], base["a"], base["b"]]) in (["w", "a", "b"], ["w", "b", "a"])

    def test_a_wrong_turn_is_taken_back(self, tmp_path: Path) -> None:
        """`short` is how `long` begins, so both fit at first; only the whole tells."""
        long = np.concatenate([np.ones(16), np.full(16, 1.2)])
        base = {"long": long, "short": np.ones(16)}
        assert self.order(tmp_path, base, [long, base["short"]]) == ["long", "short"]
        assert self.order(tmp_path, base, [base["short"], long]) == ["short", "long"]

    def test_sizes_that_do_not_add_up(self, tmp_path: Path) -> None:
        assert self.order(tmp_path, {"a": np.ones(16)}, [np.ones(17)]) is None
