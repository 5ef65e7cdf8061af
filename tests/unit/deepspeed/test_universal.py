"""Universal checkpoints: by hand as DeepSpeed's converter writes them, and its own ones broken."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assembled import gather
from deepspeed_bytes import Files, Job, Saved, weights
from fsdp_bytes import Array
from unshard.checkpoint import Checkpoint
from unshard.errors import IncompleteError
from unshard.formats.deepspeed import DeepSpeedUniversal
from unshard.locate import locate
from unshard.opening import open_checkpoint
from unshard.options import MergeOptions

TAG = "global_step1_universal"


def convert(job: Job, directory: Path, masters: Mapping[str, Any] | None = None, files: Files | None = None) -> Path:
    """What the converter makes of a job of stages 1 and 2: folders, and the model states as they are.

    masters: what folders hold beside those of trained parameters, or instead of them.
    """
    kept = {name: saved for name, saved in (files or job.files()).items() if "optim_states" not in name}
    job.write(directory, kept)
    trained = {name: {"param": array, "cat_dim": 0} for group in job.groups for name, array in group.items()}
    for name, content in (trained | dict(masters or {})).items():
        for state in ("fp32", "exp_avg"):
            (directory / "zero" / name).mkdir(parents=True, exist_ok=True)
            Saved(content if state == "fp32" else {"param": np.full(1, 9.0, np.float32)}).write(
                directory / "zero" / name / f"{state}.pt"
            )
    return directory


def read(path: Path, **options: Any) -> tuple[Checkpoint, str]:
    """The checkpoint, and the text of all its problems."""
    checkpoint = open_checkpoint(path, MergeOptions(**options))
    return checkpoint, "\n".join(str(problem) for problem in checkpoint.problems)


def check(checkpoint: Checkpoint, expected: Mapping[str, Array]) -> None:
    """These names, types, shapes and bytes."""
    assert checkpoint.tensors.keys() == expected.keys()
    for name, array in expected.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.dtype.numpy, tensor.shape) == (array.dtype, array.shape), name
        assert gather(tensor, checkpoint.roots) == array.tobytes(), name


@pytest.fixture(params=["deepspeed_z2_universal", "deepspeed_z3_universal"])
def real(request: pytest.FixtureRequest, committed_golden: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that the converter wrote: the directory with `latest_universal`."""
    return Path(shutil.copytree(committed_golden / request.param / "ckpt", tmp_path / "ckpt"))


def plain_job(**facts: Any) -> Job:
    return Job(2, 2, [weights({"model.a": (4, 3), "model.b": (5,)})], **facts)


class TestWhichIsMeant:
    """The converter's directory holds files of DeepSpeed's own format, and may lie beside the tag it was made from."""

    def place(self, path: Path) -> tuple[str, Path]:
        format, place = locate(path)
        return format.name, place

    def test_the_directory_and_one_that_names_it(self, real: Path) -> None:
        assert self.place(real / TAG) == ("deepspeed_universal", real / TAG)
        assert self.place(real) == ("deepspeed_universal", real)
        assert read(real)[0].tensors.keys() == read(real / TAG)[0].tensors.keys()

    def test_files_of_it(self, real: Path) -> None:
        whole = read(real)[0].tensors
        for file in (next(real.rglob("*model_states.pt")), real / TAG / "zero" / "model.norm.weight" / "fp32.pt"):
            checkpoint, found = read(file)
            assert found == ""
            assert checkpoint.format == "deepspeed_universal"
            assert {name: gather(tensor, checkpoint.roots) for name, tensor in checkpoint.tensors.items()} == {
                name: gather(tensor, {"source": real}) for name, tensor in whole.items()
            }

    def test_other_files_in_it(self, real: Path) -> None:
        shutil.copy(real / TAG / "zero" / "optimizer_state.pt", real / TAG / "other.pt")
        assert DeepSpeedUniversal().detect(real / TAG / "other.pt") is None

    def test_a_config_above(self, real: Path) -> None:
        """Trainers save it in the directory of all tags."""
        (real / "config.json").write_text('{"model_type": "llama"}')
        assert read(real / TAG)[0].config == {"model_type": "llama"}

    def test_the_newest_state_goes_before_what_was_converted(self, real: Path) -> None:
        plain_job().write(real / "global_step2")
        (real / "latest").write_text("global_step2")
        assert self.place(real)[0] == "deepspeed"
        assert read(real)[0].tensors.keys() == {"model.a", "model.b"}

    def test_latest_may_name_it(self, real: Path) -> None:
        (real / "latest_universal").rename(real / "latest")
        checkpoint, found = read(real)
        assert found == ""
        assert checkpoint.format == "deepspeed_universal"
        assert f"`latest` names {TAG}" in [note.text for note in checkpoint.notes]

    def test_other_folders_called_zero(self, tmp_path: Path) -> None:
        (tmp_path / "zero" / "one").mkdir(parents=True)
        plain_job().write(tmp_path)
        assert DeepSpeedUniversal().detect(tmp_path) is None
        assert self.place(tmp_path)[0] == "deepspeed"


class TestWhatHasNoMaster:
    """The converter makes folders of everything in the module: of rounded weights, and of one rank's."""

    def job(self) -> Job:
        frozen = {name: array.astype(Job.low) for name, array in weights({"model.frozen": (3, 2)}, 40).items()}
        buffers = {"model.count": np.array([3, 1 << 40], np.int64), "model.scale": np.ones(2, Job.low)}
        shared = {"head": "model.a"}
        return plain_job(frozen=frozen, buffers=buffers, shared=shared)

    def convert(self, directory: Path) -> Job:
        job = self.job()
        other = {name: {"param": job.module()[name].astype(np.float32)} for name in ("model.frozen", "model.count")}
        convert(job, directory, other | {"head": {"param": np.zeros((4, 3), np.float32)}})
        return job

    def test_beside_masters(self, tmp_path: Path) -> None:
        job = self.convert(tmp_path)
        checkpoint, found = read(tmp_path)
        assert found == ""
        check(checkpoint, job.masters())
        assert [note.tensors for note in checkpoint.notes if "widened" in note.text] == [("model.frozen",)]

    def test_the_module(self, tmp_path: Path) -> None:
        job = self.convert(tmp_path)
        checkpoint, found = read(tmp_path, weights="model")
        assert found == ""
        check(checkpoint, job.module())

    def test_of_stage_3_pieces_are_gathered(self, tmp_path: Path) -> None:
        job = Job(3, 2, self.job().groups, frozen=self.job().frozen, shared={"head": "model.a"})
        convert(job, tmp_path)
        check(read(tmp_path)[0], job.masters())
        check(read(tmp_path, weights="model")[0], job.module())
        (tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        assert "no zero_pp_rank_1_mp_rank_00_model_states.pt" in read(tmp_path)[1]

    def test_a_placeholder_of_which_nothing_has_the_values(self, tmp_path: Path) -> None:
        job = Job(3, 1, plain_job().groups)
        files = job.files()
        files["zero_pp_rank_0_mp_rank_00_model_states.pt"].content["module"]["model.lost"] = np.zeros(0, Job.low)
        convert(job, tmp_path, files=files)
        assert "placeholders of shape [0]" in (found := read(tmp_path)[1])
        assert "model.lost" in found


class TestVocabulary:
    """Megatron pads it; where whoever trained declares it, the converter cuts it."""

    NAMES: Mapping[str, tuple[int, ...]] = {
        "language_model.embedding.word_embeddings.weight": (8, 4),
        "language_model.encoder.layers.0.self_attention.dense.weight": (4, 4),
    }

    def read(self, directory: Path, rows: int, **content: Any) -> tuple[Checkpoint, str]:
        job = Job(1, 1, [weights(self.NAMES)])
        name, master = next(iter(job.groups[0].items()))
        files = job.files()
        files["mp_rank_00_model_states.pt"].content["args"] = {"padded_vocab_size": 8, "hidden_size": 4}
        convert(job, directory, {name: {"param": np.ascontiguousarray(master[:rows]), **content}}, files)
        return read(directory)

    def test_cut(self, tmp_path: Path) -> None:
        checkpoint, found = self.read(tmp_path, 6, vocab_tensor=True)
        assert found == ""
        assert checkpoint.dialect == "megatron"
        assert checkpoint.tensors["embedding.word_embeddings.weight"].shape == (6, 4)

    @pytest.mark.parametrize(("rows", "content"), [(6, {}), (6, {"vocab_tensor": False})])
    def test_rows_that_are_not_said_to_be_cut(self, tmp_path: Path, rows: int, content: dict[str, Any]) -> None:
        assert (
            "word_embeddings.weight: [6, 4], but [8, 4] in the model states" in self.read(tmp_path, rows, **content)[1]
        )

    def test_more_rows_than_there_are(self, tmp_path: Path) -> None:
        files = {
            "language_model.embedding.word_embeddings.weight": {
                "param": np.zeros((9, 4), np.float32),
                "vocab_tensor": True,
            }
        }
        convert(Job(1, 1, [weights(self.NAMES)]), tmp_path, files)
        assert "[9, 4], but [8, 4] in the model states" in read(tmp_path)[1]


class TestDamage:
    def test_everything_that_is_wrong_is_told(self, real: Path) -> None:
        zero = real / TAG / "zero"
        (zero / "model.norm.weight" / "fp32.pt").unlink()
        shutil.rmtree(zero / "model.layers.0.mlp.up_proj.weight")
        shutil.copy(zero / "lm_head.weight" / "fp32.pt", zero / "model.layers.0.mlp.down_proj.weight" / "fp32.pt")
        cut = zero / "model.embed_tokens.weight" / "fp32.pt"
        cut.write_bytes(cut.read_bytes()[:-50])
        shutil.copy(zero / "optimizer_state.pt", zero / "model.layers.0.mlp.gate_proj.weight" / "fp32.pt")
        shutil.copytree(zero / "lm_head.weight", zero / "somebody.else")
        checkpoint, found = read(real)
        assert len(checkpoint.problems) == 5
        assert all(problem.hint for problem in checkpoint.problems)
        assert re.search("2 of 1[25] files of masters are missing", found)
        assert "zero/model.norm.weight/fp32.pt" in found
        assert "zero/model.layers.0.mlp.up_proj.weight/fp32.pt" in found
        assert "model.layers.0.mlp.down_proj.weight: [" in found
        assert f"{TAG}/zero/model.embed_tokens.weight/fp32.pt: " in found
        assert "gate_proj.weight/fp32.pt: holds a dict of" in found
        assert "`somebody.else`" in found

    def test_missing_model_states(self, real: Path) -> None:
        for file in real.rglob("*model_states.pt"):
            file.unlink()
        with pytest.raises(IncompleteError, match="model states, of which none is here"):
            read(real)

    def test_folders_on_two_disks(self, real: Path, tmp_path: Path) -> None:
        whole = read(real)[0]
        values = {
            name: np.frombuffer(gather(tensor, whole.roots), np.float32) for name, tensor in whole.tensors.items()
        }
        other = tmp_path / "other" / TAG / "zero"
        other.mkdir(parents=True)
        for folder in list((real / TAG / "zero").glob("model.*")):
            shutil.move(folder, other / folder.name)
        checkpoint, found = read(real, also=(tmp_path / "other",))
        assert found == ""
        check(checkpoint, {name: value.reshape(whole.tensors[name].shape) for name, value in values.items()})

    @pytest.mark.parametrize("name", ["3.input_layernorm.weight", "tied_modules.embed.word_embeddings.weight"])
    def test_pipelines_are_refused(self, name: str, tmp_path: Path) -> None:
        convert(Job(1, 1, [weights({name: (4,)})]), tmp_path)
        assert f"layers of a pipeline module (`{name}`) is not read" in read(tmp_path)[1]

    def test_partitions_dealt_out_in_turn_are_refused(self, tmp_path: Path) -> None:
        """ds_to_universal 0.19.8 puts wrong values into the folders of such a run, without a word."""
        job = plain_job()
        files = job.files()
        zero = files["mp_rank_00_model_states.pt"].content["ds_config"]["zero_optimization"]
        zero["round_robin_gradients"] = True
        convert(job, tmp_path, files=files)
        assert "`round_robin_gradients`" in read(tmp_path)[1]
        checkpoint, found = read(tmp_path, weights="model")
        assert found == ""
        check(checkpoint, job.module())


class TestTensorParallelism:
    """The converter joins the ranks' shards by what the model states declare; what has no master is joined here."""

    def write(self, directory: Path, info: Mapping[str, Any] | None, joined: Array) -> None:
        whole = weights({"model.row": (4, 6), "model.column": (4, 3)})
        for rank in range(2):
            shards = {
                "model.row": np.ascontiguousarray(whole["model.row"][:, rank * 3 : rank * 3 + 3]),
                "model.column": whole["model.column"][rank * 2 : rank * 2 + 2],
            }
            states = Job(1, 1, [shards]).files()["mp_rank_00_model_states.pt"]
            states.content |= {"mp_world_size": 2} | ({"universal_checkpoint_info": info} if info else {})
            states.write(directory / f"mp_rank_{rank:02d}_model_states.pt")
        for name, array in {"model.row": joined, "model.column": whole["model.column"]}.items():
            (directory / "zero" / name).mkdir(parents=True)
            Saved({"param": array}).write(directory / "zero" / name / "fp32.pt")

    INFO: Mapping[str, Any] = {"parameter_with_row_parallelism_patterns": [r"model\.row"]}

    def test_declared(self, tmp_path: Path) -> None:
        whole = weights({"model.row": (4, 6), "model.column": (4, 3)})
        self.write(tmp_path, self.INFO, whole["model.row"])
        checkpoint, found = read(tmp_path)
        assert found == ""
        check(checkpoint, whole)

    def test_joined_in_another_way(self, tmp_path: Path) -> None:
        self.write(tmp_path, self.INFO, np.zeros((8, 3), np.float32))
        assert "model.row: [8, 3], but [4, 6] by the shards of the ranks" in read(tmp_path)[1]

    def test_a_guess_of_the_converter_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, None, np.zeros((8, 3), np.float32))
        assert "2 model-parallel ranks without universal_checkpoint_info" in read(tmp_path)[1]


def test_a_master_of_an_empty_parameter(tmp_path: Path) -> None:
    job = Job(1, 1, [{"model.a": np.zeros((0, 3), np.float32)} | weights({"model.b": (2,)})])
    convert(job, tmp_path)
    check(read(tmp_path)[0], job.masters())


def test_second_names_of_excluded_parameters_are_not_lost(tmp_path: Path) -> None:
    """`exclude_frozen_parameters` forgets the second name of a tied embedding, of which a placeholder stays."""
    frozen = weights({"base.weight": (5, 2)}, start=90, dtype=np.float16)
    job = Job(3, 2, [weights({"model.a": (4, 3)})], frozen=frozen, shared={"lm_head.weight": "base.weight"})
    files = job.files()
    for name, saved in files.items():
        if name.endswith("model_states.pt"):
            del saved.content["module"]["base.weight"]
            saved.content |= {"frozen_param_fragments": None, "frozen_param_shapes": None}
    checkpoint, wrong = read(convert(job, tmp_path / TAG, files=files))
    assert wrong == ""
    assert set(checkpoint.tensors) == {"model.a"}
    assert any("had a second name" in note.text for note in checkpoint.notes)
