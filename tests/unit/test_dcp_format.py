"""Models in DCP directories, through the whole merge: where they lie, what lies around them, what is wrong there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import dcp_bytes as db
import torch_bytes as tb
import unshard
from commands import run
from format_contract import check_format
from golden.tensor_files import read_tensors
from unshard.checkpoint import Checkpoint
from unshard.formats import FORMATS
from unshard.formats.contract import Source
from unshard.formats.dcp import Dcp
from unshard.locate import locate

WEIGHTS = {
    "embed.weight": np.arange(35, dtype=np.float32).reshape(7, 5),
    "layers.0.weight": np.arange(12, dtype=np.float16).reshape(4, 3),
    "layers.0.bias": np.arange(3, dtype=np.float32),
    "scale": np.array(2.5, np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "steps_seen": np.array([1 << 40, -1], np.int64),
}
ADAM = {"state": {name: {"exp_avg": array, "step": np.array(7, np.float32)} for name, array in WEIGHTS.items()}}


def state(**beside: object) -> dict[str, object]:
    return {"model": WEIGHTS, **beside}


def merge(source: Path, output: Path, **options: object) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of a merge without a config, and the texts of the report's notes."""
    report = unshard.merge(source, output, weights_only=True, **options)
    arrays = {}
    for name, stored in read_tensors(output).items():
        dtype = {"F32": np.float32, "F16": np.float16, "I64": np.int64}[stored.dtype]
        arrays[name] = np.frombuffer(stored.data, dtype).reshape(stored.shape)
    return arrays, [note.text for note in report.notes]


def assert_weights(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray] = WEIGHTS) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def read(directory: Path, **options: object) -> Checkpoint:
    return Dcp().read(Source(directory, **options))  # type: ignore[arg-type]


def refuse(source: Path, output: Path, **options: object) -> unshard.UnshardError:
    with pytest.raises(unshard.UnshardError) as caught:
        unshard.merge(source, output, weights_only=True, **options)
    assert not output.exists()
    return caught.value


class TestWhole:
    def test_the_contract_of_formats(self, tmp_path: Path) -> None:
        place = db.save(tmp_path / "step-5", state(optim=ADAM), 3)
        assert [format.name for format in FORMATS if format.detect(place)] == ["dcp"]
        check_format(Dcp(), place, tmp_path)

    @pytest.mark.parametrize("root", [(), ("model",), ("app", "model"), ("state", "model"), ("state_dict",)], ids=str)
    @pytest.mark.parametrize("ranks", [1, 2, 9])
    def test_every_root_and_world(self, root: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
        tree: Mapping[str, object] = WEIGHTS
        for step in reversed(root):
            tree = {step: tree}
        source = db.save(tmp_path / "ckpt", {**tree, "optim": ADAM, "lr_scheduler": {"last": 3}}, ranks)
        found, notes = merge(source, tmp_path / "out")
        assert_weights(found)
        title = ".".join(root)
        assert any(f"the model lies {f'under `{title}`' if root else 'at the top'}" in note for note in notes)
        assert "optimizer states: 12 tensors, 220 B, left out" in notes

    def test_optimizer_states_are_not_opened(self, tmp_path: Path) -> None:
        source = db.save(tmp_path / "ckpt", state(), 2)
        whole = (source / ".metadata").read_bytes()
        for file in source.iterdir():
            file.unlink()
        writer = db.Writer(source)
        for name, array in WEIGHTS.items():
            writer.declare(f"model.{name}", array.shape, array.dtype.name)
            writer.write(f"model.{name}", [0] * array.ndim, array)
        writer.declare("optim.state.embed.weight.exp_avg", (1 << 30,))
        writer.write("optim.state.embed.weight.exp_avg", (0,), np.zeros(1, np.float32), "__7_0.distcp")
        names = [*[("model", name) for name in WEIGHTS], ("optim", "state", "embed.weight", "exp_avg")]
        writer.finish(paths=db.pairs([(tb.text(".".join(path)), tb.group(*map(tb.text, path))) for path in names]))
        (source / "__7_0.distcp").unlink()
        assert (source / ".metadata").read_bytes() != whole
        found, notes = merge(source, tmp_path / "out")
        assert_weights(found)
        assert "optimizer states: 1 tensor, 4.29 GB, left out" in notes

    def test_what_lies_beside_is_counted(self, tmp_path: Path) -> None:
        beside = {
            "rng": {"cuda": np.zeros(3, np.float32)},
            "ema": WEIGHTS,
            "step": 7,
            "dataloader": {"epoch": 1, "cursor": "x"},
        }
        source = db.save(tmp_path / "ckpt", state(**beside))
        found, notes = merge(source, tmp_path / "out")
        assert_weights(found)
        assert "other states: 1 tensor, 12 B (`rng.cuda`), left out" in notes
        assert "1 other model: 6 tensors, 196 B under `ema`, left out; --model-key takes it" in notes
        assert read(source).skipped == {"step": "1 entry, no tensors", "dataloader": "2 entries, no tensors"}

    def test_objects_of_modules_are_skipped(self, tmp_path: Path) -> None:
        extra = {f"layers.{number}._extra_state": 1 for number in range(3)}
        source = db.save(tmp_path / "ckpt", {"model": {**WEIGHTS, **extra}})
        assert read(source).skipped == {"*._extra_state": "3 entries, no tensors"}
        assert_weights(merge(source, tmp_path / "out")[0])

    def test_one_of_several_models_by_its_key(self, tmp_path: Path) -> None:
        actor = {name: np.asarray(array + 1) for name, array in WEIGHTS.items()}
        source = db.save(tmp_path / "ckpt", {"actor": {"net": actor}, "critic": {"net": WEIGHTS}})
        error = refuse(source, tmp_path / "out")
        assert "2 models are stored" in error.message
        assert f"unshard inspect {source} --model-key actor.net" in str(error.hint)
        assert_weights(merge(source, tmp_path / "out", model_key="actor.net")[0], actor)
        code, stdout, _ = run("inspect", source, "--model-key", "critic.net", "--json")
        assert code == 0
        assert set(json.loads(stdout.splitlines()[-1])["tensors"]) == set(WEIGHTS)

    def test_a_model_key_for_another_format(self, committed_golden: Path, tmp_path: Path) -> None:
        error = refuse(committed_golden / "fsdp2_w4/ckpt", tmp_path / "out", model_key="model")
        assert "`--model-key` chooses among the models of a torch DCP directory" in error.message

    def test_whose_names_they_are(self, tmp_path: Path) -> None:
        titan = {"layers.0.attention.wq.weight": WEIGHTS["embed.weight"]}
        assert read(db.save(tmp_path / "titan", {**titan, "optimizer": ADAM})).dialect == "torchtitan"
        assert read(db.save(tmp_path / "ckpt", state())).dialect == "huggingface"

    def test_names_alone_where_nothing_is_recorded(self, tmp_path: Path) -> None:
        source = db.save(tmp_path / "ckpt", {"app": {"model": WEIGHTS}, "optimizer": ADAM}, nested=False)
        found, notes = merge(source, tmp_path / "out")
        assert_weights(found)
        assert any("is not recorded" in note and "the prefix `app.model.` was taken off" in note for note in notes)

    def test_metadata_of_every_rank(self, tmp_path: Path) -> None:
        """Torch from 2.9 on, `use_collectives=False`: the paths of all ranks together tell where the model lies."""
        for rank, names in enumerate((["embed.weight", "scale"], ["layers.0.weight", "layers.0.bias"])):
            part = {"model": {name: WEIGHTS[name] for name in names}, f"optimizer_{rank}": ADAM}
            source = db.save(tmp_path / f"{rank}", part, 1)
            (tmp_path / "ckpt").mkdir(exist_ok=True)
            data = (source / ".metadata").read_bytes().replace(b"__0_0.distcp", f"__{rank}_0.distcp".encode())
            (tmp_path / f"ckpt/__{rank}.metadata").write_bytes(data)
            shutil.copy(source / "__0_0.distcp", tmp_path / f"ckpt/__{rank}_0.distcp")
        found, notes = merge(tmp_path / "ckpt", tmp_path / "out")
        assert_weights(
            found, {name: WEIGHTS[name] for name in ("embed.weight", "scale", "layers.0.weight", "layers.0.bias")}
        )
        assert any(note.startswith("optimizer states: 24 tensors") for note in notes)

    def test_replicas_that_were_not_left_out(self, tmp_path: Path) -> None:
        """HSDP, `dedup_replicated_tensors=False`: every copy is recorded, and one of them is taken."""
        array = WEIGHTS["embed.weight"]
        writer = db.Writer(tmp_path / "ckpt")
        writer.declare("w", array.shape)
        for rank in range(4):
            rows = slice(0, 4) if rank % 2 == 0 else slice(4, 7)
            writer.write("w", (rows.start, 0), array[rows].copy(), f"__{rank}_0.distcp")
        found, _ = merge(writer.finish(), tmp_path / "out", check_replicas=True)
        assert_weights(found, {"w": array})


class TestPlaces:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        """A run of Trainer with one checkpoint of accelerate."""
        place = tmp_path / "run/checkpoint-10"
        db.save(place / "pytorch_model_fsdp_0", state())
        db.save(place / "optimizer_0", {"optimizer": ADAM})
        (place / "trainer_state.json").write_text("{}")
        (place / "random_states_0.pkl").write_bytes(b"")
        return tmp_path / "run"

    @pytest.mark.parametrize(
        "level",
        [
            "",
            "checkpoint-10",
            "checkpoint-10/pytorch_model_fsdp_0",
            "checkpoint-10/pytorch_model_fsdp_0/.metadata",
            "checkpoint-10/pytorch_model_fsdp_0/__1_0.distcp",
        ],
    )
    def test_any_level(self, level: str, run: Path, tmp_path: Path) -> None:
        found, place = locate(run / level)
        assert (found.name, place) == ("dcp", run / "checkpoint-10/pytorch_model_fsdp_0")
        assert_weights(merge(run / level, tmp_path / "out")[0])

    def test_the_optimizer_is_not_taken_for_a_model(self, run: Path, tmp_path: Path) -> None:
        for place in (run / "checkpoint-10/optimizer_0", run / "checkpoint-10/optimizer_0/.metadata"):
            error = refuse(place, tmp_path / "out")
            assert "only the states of an optimizer" in error.message
            assert f"unshard inspect {run / 'checkpoint-10'}" in str(error.hint)
        shutil.rmtree(run / "checkpoint-10/pytorch_model_fsdp_0")
        assert "no checkpoint was found" in refuse(run, tmp_path / "out").message

    def test_several_checkpoints_are_named(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(run / "checkpoint-10", run / "checkpoint-2000")
        shutil.copytree(run / "checkpoint-10", run / "checkpoint-300")
        text = refuse(run, tmp_path / "out").message
        lines = [line for line in text.splitlines() if "pytorch_model_fsdp_0" in line]
        assert [line.split("/")[-2] for line in lines] == ["checkpoint-10", "checkpoint-300", "checkpoint-2000"]

    def test_two_models_of_accelerate_are_named(self, run: Path, tmp_path: Path) -> None:
        db.save(run / "checkpoint-10/pytorch_model_fsdp_1", state())
        text = refuse(run, tmp_path / "out").message
        assert "pytorch_model_fsdp_0: a torch DCP directory (2 files)" in text
        assert "pytorch_model_fsdp_1: a torch DCP directory (2 files)" in text

    @pytest.mark.parametrize(
        "layout",
        [
            "checkpoints/epoch=0-step=3.ckpt",
            "checkpoint/step-1000",
            "checkpoints/global_step_5/model/ckpt",
            "epoch_0_step_10/model",
            "step_10/policy/weights",
        ],
    )
    def test_layouts_of_other_frameworks(self, layout: str, tmp_path: Path) -> None:
        """Lightning, torchtitan, VeOmni, NeMo Automodel, NeMo-RL: with the other states that each puts beside."""
        place = db.save(tmp_path / "run" / layout, state())
        (place / "meta.pt").write_bytes(b"")
        for beside in ("optimizer", "optim", "loader", "extra_state", "rng", "dataloader"):
            db.save(place.parent / beside, {"optim": ADAM})
            (place.parent / beside / "rank_0.pt").write_bytes(b"")
        assert locate(tmp_path / "run")[1] == place
        assert_weights(merge(tmp_path / "run", tmp_path / "out")[0])

    def test_an_unfinished_save_is_found_and_told(self, tmp_path: Path) -> None:
        place = db.save(tmp_path / "run/step-7", state())
        (place / ".metadata").rename(place / ".metadata.tmp")
        for path in (tmp_path / "run", place / ".metadata.tmp", place / "__0_0.distcp"):
            assert "there is .metadata.tmp, but no .metadata" in refuse(path, tmp_path / "out").message

    def test_config_and_adapter_facts_above(self, tmp_path: Path) -> None:
        place = db.save(tmp_path / "run/checkpoint-3/pytorch_model_fsdp_0", state())
        (tmp_path / "run/config.json").write_text('{"model_type": "qwen2"}')
        (tmp_path / "run/checkpoint-3/adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
        found = read(place)
        assert found.config == {"model_type": "qwen2"}
        assert found.adapter == {"r": 8, "lora_alpha": 16}

    @pytest.mark.parametrize("assets", [".hf_metadata", "../../../../model_assets", "../../../model_assets"])
    def test_side_files_of_automodel_and_veomni(self, assets: str, tmp_path: Path) -> None:
        place = db.save(tmp_path / "a/b/c/d/e", state())
        (place / assets).mkdir(parents=True)
        (place / assets / "config.json").write_text('{"model_type": "qwen2"}')
        (place / assets / "tokenizer.json").write_text("{}")
        assert [asset.path for asset in read(place).assets] == ["config.json", "tokenizer.json"]

    def test_megatrons_directories_are_not_ours(self, tmp_path: Path) -> None:
        place = db.save(tmp_path, {"decoder.layers.self_attention.linear_qkv.weight": WEIGHTS["embed.weight"]})
        assert Dcp().detect(place) is None


class TestFurtherRoots:
    @pytest.fixture
    def nodes(self, tmp_path: Path) -> list[Path]:
        """The same directory on the disks of two nodes, each with the files of its own ranks."""
        place = "run/checkpoint-10/pytorch_model_fsdp_0"
        db.save(tmp_path / "node0" / place, state(), 4)
        (tmp_path / "node1" / place).mkdir(parents=True)
        for rank in (2, 3):
            (tmp_path / "node0" / place / f"__{rank}_0.distcp").rename(
                tmp_path / "node1" / place / f"__{rank}_0.distcp"
            )
        return [tmp_path / "node0" / place, tmp_path / "node1" / place]

    @pytest.mark.parametrize("up", [0, 1, 2, 3])
    def test_they_are_given_at_any_level(self, up: int, nodes: list[Path], tmp_path: Path) -> None:
        other = [nodes[1], *nodes[1].parents][up]
        assert_weights(merge(nodes[0].parent, tmp_path / "out", also=[other])[0])

    def test_the_metadata_may_lie_in_any_of_them(self, nodes: list[Path], tmp_path: Path) -> None:
        """accelerate#3010: other nodes have no `.metadata`."""
        assert_weights(merge(nodes[1], tmp_path / "out", also=[nodes[0]])[0])
        assert "there are .distcp files, but no .metadata" in refuse(nodes[1], tmp_path / "no").message

    def test_what_is_missing_without_them(self, nodes: list[Path], tmp_path: Path) -> None:
        error = refuse(nodes[0], tmp_path / "out")
        assert "2 files that the metadata name are missing" in error.message
        assert "--also DIR" in str(error.hint)

    def test_one_without_files(self, nodes: list[Path], tmp_path: Path) -> None:
        (tmp_path / "node2").mkdir()
        error = refuse(nodes[0], tmp_path / "out", also=[nodes[1], tmp_path / "node2"])
        assert f"{tmp_path / 'node2'}: no file of a torch DCP directory lies here" in error.message

    def test_files_that_are_there_twice(self, nodes: list[Path], tmp_path: Path) -> None:
        shutil.copy(nodes[0] / "__0_0.distcp", nodes[1])
        shutil.copy(nodes[0] / ".metadata", nodes[1])
        error = refuse(nodes[0], tmp_path / "out", also=[nodes[1]])
        assert ".metadata is there twice" in error.message
        assert "__0_0.distcp is there twice" in error.message


class TestFaults:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return db.save(tmp_path / "ckpt", state(optim=ADAM), 4)

    def test_a_missing_file(self, source: Path, tmp_path: Path) -> None:
        (source / "__2_0.distcp").unlink()
        error = refuse(source, tmp_path / "out")
        assert "__2_0.distcp (pieces of" in error.message
        assert error.exit_code == 5

    def test_a_truncated_file(self, source: Path, tmp_path: Path) -> None:
        data = (source / "__1_0.distcp").read_bytes()
        (source / "__1_0.distcp").write_bytes(data[:2000])
        assert "__1_0.distcp: ends at byte 2,000" in refuse(source, tmp_path / "out").message

    @pytest.mark.parametrize("change", ["shape", "dtype", "order"])
    def test_files_of_another_save(self, change: str, source: Path, tmp_path: Path) -> None:
        """What is stored is compared with what is recorded: type, shape and place of every piece."""
        other = {name: array.copy() for name, array in WEIGHTS.items()}
        if change == "shape":
            other["embed.weight"] = other["embed.weight"].reshape(5, 7)
        elif change == "dtype":
            other["embed.weight"] = other["embed.weight"].view(np.float16).reshape(7, 10)[:, :5].copy()
        else:
            other = {"layers.0.weight": other.pop("layers.0.weight"), **other}
        db.save(tmp_path / "other", {"model": other, "optim": ADAM}, 4)
        shutil.copy(tmp_path / "other/__0_0.distcp", source)
        assert refuse(source, tmp_path / "out").exit_code in (4, 5)

    def test_a_later_save_that_was_interrupted(self, source: Path, tmp_path: Path) -> None:
        """The files were overwritten, the metadata are those of the earlier save."""
        (source / ".metadata.tmp").write_bytes(b"")
        error = refuse(source, tmp_path / "out")
        assert "there is .metadata.tmp beside the metadata: a later save was interrupted" in error.message

    def test_saves_with_and_without_metadata_of_each_rank_in_one_directory(self, source: Path, tmp_path: Path) -> None:
        """Each writes files of the same names; the earlier one's metadata may still fit what the later one wrote."""
        shutil.copy(source / ".metadata", source / "__0.metadata")
        error = refuse(source, tmp_path / "out")
        assert "there are metadata of ranks beside .metadata: two saves were written here" in error.message

    def test_a_later_save_of_each_rank_that_was_interrupted(self, source: Path, tmp_path: Path) -> None:
        for path in sorted(source.glob("*.distcp")):
            shutil.copy(source / ".metadata", source / f"__{path.name[2]}.metadata")
        (source / ".metadata").unlink()
        (source / "__1.metadata.tmp").write_bytes(b"")
        error = refuse(source, tmp_path / "out")
        assert "there is __1.metadata.tmp beside the metadata: a later save was interrupted" in error.message

    def test_files_that_nothing_is_recorded_of(self, source: Path, tmp_path: Path) -> None:
        """A smaller world saved into the directory of a larger one. A rank without data may leave an empty file."""
        shutil.copy(source / "__3_0.distcp", source / "__4_0.distcp")
        (source / "__5_0.distcp").write_bytes(b"")
        found, notes = merge(source, tmp_path / "out")
        assert_weights(found)
        assert "files that the metadata do not name, left by another save: `__4_0.distcp`" in notes

    def test_missing_metadata(self, source: Path, tmp_path: Path) -> None:
        (source / ".metadata").unlink()
        error = refuse(source, tmp_path / "out")
        assert "there are .distcp files, but no .metadata" in error.message
        assert "fetch the hidden file" in str(error.hint)

    def test_metadata_alone(self, source: Path, tmp_path: Path) -> None:
        for file in source.glob("*.distcp"):
            file.unlink()
        assert "4 files that the metadata name are missing" in refuse(source, tmp_path / "out").message

    @pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x04" + b"(" * 400], ids=["empty", "text", "open"])
    def test_damaged_metadata(self, data: bytes, source: Path, tmp_path: Path) -> None:
        (source / ".metadata").write_bytes(data)
        assert refuse(source, tmp_path / "out").exit_code == 4

    def test_hostile_pickles_are_not_run(self, source: Path, tmp_path: Path) -> None:
        """In the metadata, and in an item that claims to be a tensor."""
        trap = tmp_path / "trap"
        evil = tb.finish(tb.call(tb.named("os", "system"), tb.text(f"touch {trap}")))
        data = (source / "__0_0.distcp").read_bytes()
        (source / "__0_0.distcp").write_bytes(tb.archive(tb.torch_members(evil, b"")).ljust(len(data), b"\0"))
        assert refuse(source, tmp_path / "out").exit_code in (4, 5)
        (source / ".metadata").write_bytes(evil)
        assert "not the metadata of torch.distributed.checkpoint" in refuse(source, tmp_path / "out").message
        assert not trap.exists()

    def test_no_config(self, source: Path, tmp_path: Path) -> None:
        code, _, stderr = run("merge", source, tmp_path / "out")
        assert code == 6
        assert "--config DIR" in stderr
        assert "--weights-only" in stderr
        assert not (tmp_path / "out").exists()
