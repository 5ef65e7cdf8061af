"""Faults from the field in what is run, opened and loaded on the way: pickles, frameworks, networks, optimizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from field_cases import copy_case, merge, refuse, same, truth

import torch_bytes as opcodes
import unshard
from fsdp_bytes import RankFile, numbers, rank_path, record, world, write_archive, write_ranks
from unshard.errors import FormatError

GARBAGE = b"\x80\x04cos\nsystem\n(X\x04\x00\x00\x00falsetR."


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("fsdp2_w4", ["optim_world_size_4_rank_{}.pt", "extra_state_world_size_4_rank_{}.pt", "data.pt"]),
        ("layout_accelerate_sharded", ["optimizer.bin", "optimizer_rank{}.bin", "random_states_{}.pkl"]),
        ("layout_rank_files", ["optim_rank_{}.pt", "rng_state_rank{}.pth", "trainer_state.pt"]),
    ],
)  # fmt: skip
def test_states_of_the_trainer_are_never_opened(case: str, names: list[str], tmp_path: Path) -> None:
    """verl#712, llm-foundry#463, DeepSpeed#1062: "Weights only load failed" of a data loader; RAM full of moments."""
    source = copy_case(case, tmp_path / "actor")
    directory = next(path.parent for path in source.rglob("*rank*0.*"))
    for name in names:
        for rank in range(4):
            (directory / name.format(rank)).write_bytes(GARBAGE)
    assert merge(source, tmp_path / "out")[1] == truth(case)


def test_optimizer_inside_the_models_file_is_left_where_it_is(tmp_path: Path) -> None:
    """llm-foundry#1220, DeepSpeed#6526: the whole training state was loaded to find the weights in it."""
    inner = RankFile(world(1), 0)
    weight = numbers(4, 3)
    tensor = opcodes.tensor(inner.keep(weight), weight.shape, (3, 1))
    moments = opcodes.tensor(inner.keep((1 << 20, 64)), (1 << 20, 64), (64, 1))
    inner.add_opcodes("model", opcodes.mapping({"weight": tensor}))
    inner.add_opcodes("optimizer", opcodes.mapping({"state": opcodes.mapping({"exp_avg": moments})}))
    inner.write(tmp_path / "model.pt")
    report, found = merge(tmp_path, tmp_path / "out", weights_only=True)
    assert same(found, {"weight": weight})
    assert "optimizer" in report.skipped


FOREIGN = {
    "args": record(opcodes.named("argparse", "Namespace"), {"lr": opcodes.text("1e-6")}),
    "type": opcodes.call(opcodes.named("megatron.core.enums", "ModelType"), opcodes.integer(1)),
    "recipe": record(opcodes.named("transformer_engine.common.recipe", "DelayedScaling"), {}),
    "extra": opcodes.call(opcodes.named("_io", "BytesIO"), b"C\x03abc"),
    "scalar": opcodes.call(
        opcodes.named("numpy.core.multiarray", "scalar"),
        opcodes.call(opcodes.named("numpy", "dtype"), opcodes.text("i8"), b"\x89", b"\x88"),
        b"C\x08" + bytes(8),
    ),
    "home-made": record(opcodes.named("my_trainer.state", "Everything"), {"step": opcodes.integer(7)}),
}
"""Entries that made converters die in `torch.load`, since their classes are not installed or not on its list."""


@pytest.mark.parametrize("name", FOREIGN)
def test_classes_of_frameworks_in_a_state_dict_are_no_obstacle(name: str, tmp_path: Path) -> None:
    """transformers#14939, ms-swift#6553, ROCm/Megatron-LM#64: unpickling needed the training code."""
    for rank in range(2):
        file = RankFile(world(2), rank)
        file.add_opcodes(name, FOREIGN[name])
        file.add_shard("weight", numbers(4, 3))
        file.write(rank_path(tmp_path, world(2), rank))
    report, found = merge(tmp_path, tmp_path / "out", weights_only=True)
    assert same(found, {"weight": numbers(4, 3)})
    assert name in report.skipped


def _attacks(mark: Path) -> dict[str, bytes]:
    """Pickled calls that would make a file, or at least import what a file names."""
    shell, code = opcodes.text(f"touch {mark}"), opcodes.text(f"open({str(mark)!r}, 'w')")
    attribute = opcodes.call(
        opcodes.named("builtins", "getattr"),
        opcodes.call(opcodes.named("importlib", "import_module"), opcodes.text("os")),
        opcodes.text("system"),
    )
    return {
        "os.system": opcodes.call(opcodes.named("os", "system"), shell),
        "eval": opcodes.call(opcodes.named("builtins", "eval"), code),
        "getattr": opcodes.call(attribute, shell),
        "old name": opcodes.call(opcodes.named("__builtin__", "exec"), code),
        "INST": b"(" + shell + b"iposix\nsystem\n",
        "numpy": opcodes.call(opcodes.named("numpy.testing._private.utils", "runstring"), code, b"}"),
        "torch": opcodes.call(opcodes.named("torch.serialization", "load"), opcodes.text("/etc/passwd")),
    }


@pytest.mark.parametrize("attack", _attacks(Path("mark")))
@pytest.mark.parametrize("place", ["entry", "tensor", "file"])
def test_pickle_never_runs(place: str, attack: str, tmp_path: Path) -> None:
    """Megatron-Bridge#3138, DeepSpeed#6751, transformers#43140: checkpoints that ran code with `weights_only=False`."""
    mark = tmp_path / "mark"
    value = _attacks(mark)[attack]
    path = rank_path(tmp_path, world(1), 0)
    if place == "file":
        write_archive(path, {"data.pkl": opcodes.finish(value), "version": b"3\n"})
    else:
        file = RankFile(world(1), 0)
        weight = opcodes.tensor(file.keep(numbers(6)))
        file.add_opcodes("weight", opcodes.call(value, weight) if place == "tensor" else weight)
        file.add_opcodes("entry", value)
        file.write(path)
    if place == "entry" and attack != "getattr":
        assert same(merge(tmp_path, tmp_path / "out", weights_only=True)[1], {"weight": numbers(2, 3)})
    else:
        refuse(tmp_path, tmp_path / "out", weights_only=True)
    assert not mark.exists()


ALONE = """
import sys

class Absent:
    names = {"torch", "transformers", "peft", "accelerate", "triton", "cuda", "megatron", "deepspeed", "mpi4py"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise RuntimeError(f"{name} was imported: 0 active drivers ([])")

def watch(event, arguments):
    if event.startswith(("socket.", "urllib.", "ftplib.", "http.", "mmap.")):
        raise RuntimeError(f"{event} {arguments}")

sys.meta_path.insert(0, Absent())
sys.addaudithook(watch)
from unshard.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A command in an interpreter without frameworks, where a network connection or a Python mmap is an error."""


def _run_alone(*arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("RuntimeError") == 0


@pytest.mark.parametrize("case", ["fsdp2_qwen2_5_vl", "lora", "fsdp1_sharded_tensor"])
def test_merge_needs_no_framework_no_gpu_no_network_and_maps_nothing(case: str, tmp_path: Path) -> None:
    """verl#1484, verl#5108, Megatron-Bridge#3295, Megatron-Bridge#2105, fairseq2#1199.

    "Cannot copy out of meta tensor", classes gone from transformers, "0 active drivers" on a machine without a GPU, a
    download of weights of which only the config was needed, and mapped files that crawl on network filesystems.
    """
    source = copy_case(case, tmp_path / "actor")
    _run_alone("merge", str(source), str(tmp_path / "out"), "--trust-remote-code", "--use_cpu_initialization")
    _run_alone("verify", str(tmp_path / "out"), "--against", str(source))
    _run_alone("inspect", str(source))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _text(path: Path) -> None:
    path.write_text("<html>404 not found</html>")


@pytest.mark.parametrize("damage", [_cut, _pointer, _empty, _text])
def test_damaged_rank_file_is_named_and_never_left_out(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """verl#4081, NeMo-RL#3624: saves that were interrupted, downloads that are no files, and merges that went on."""
    source = copy_case("fsdp2_w4", tmp_path / "actor")
    for rank in (1, 2):
        damage(source / f"model_world_size_4_rank_{rank}.pt")
    error = refuse(source, tmp_path / "out")
    assert isinstance(error, FormatError)
    assert all(f"model_world_size_4_rank_{rank}.pt" in error.message for rank in (1, 2))


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 40, (1 << 63) - 1])
def test_storage_that_claims_more_than_its_file_holds_is_refused(claimed: int, tmp_path: Path) -> None:
    """mergekit#107: memory ran away even under lazy unpickling, until the machine rebooted."""
    file = RankFile(world(1), 0)
    file.keep(numbers(4))
    file.add_opcodes("weight", opcodes.tensor(opcodes.storage("0", claimed), (claimed,), (1,)))
    file.write(rank_path(tmp_path, world(1), 0))
    error = refuse(tmp_path, tmp_path / "out", weights_only=True)
    assert isinstance(error, FormatError)
    assert rank_path(tmp_path, world(1), 0).name in error.message


def test_merged_twice_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """verl#7226: whoever writes, and however often, the result is one and the same."""
    source = write_ranks(tmp_path / "actor", world(3), {"a": numbers(70, 30), "b": numbers(9, dtype=np.float16)})
    outputs = [tmp_path / "out0", tmp_path / "out1"]
    for output in outputs:
        unshard.merge(source, output, weights_only=True)
    first, second = [(output / "model.safetensors").read_bytes() for output in outputs]
    assert first == second
    shutil.rmtree(outputs[0])
    unshard.merge(source, outputs[1], weights_only=True, overwrite=True)
    assert (outputs[1] / "model.safetensors").read_bytes() == first
