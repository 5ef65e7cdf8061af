"""verl's directories of a role, from every level of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, IncompleteError, NotACheckpointError
from unshard.formats.contract import Source
from unshard.formats.huggingface.reader import HuggingFace
from unshard.formats.megatron.distributed import MegatronDist
from unshard.formats.megatron.verl import Verl
from unshard.locate import explain, locate

EMPTY_MODEL = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
"""A safetensors file without tensors."""


def dist(directory: Path) -> Path:
    """A distributed checkpoint, as far as names tell."""
    directory.mkdir(parents=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    for name in ("common.pt", ".metadata", "__0_0.distcp"):
        (directory / name).touch()
    return directory


def export(directory: Path, name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(EMPTY_MODEL)
    return directory


def config(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')


@pytest.fixture(params=[1, 2])
def role(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An actor of either layout, with all that lies beside the model."""
    actor = tmp_path / "run/global_step_5/actor"
    base = actor / "model" if request.param == 2 else actor
    dist(base / "dist_ckpt")
    config(base / "huggingface")
    if request.param == 2:
        dist(actor / "optimizer/dist_ckpt")
        dist(actor / "extra/dist_ckpt")
        (actor / "ckpt_contents.json").write_text(json.dumps({"contents": {"model": {"path": "model/dist_ckpt"}}}))
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("5")
    return actor


class TestLevels:
    def test_from_above(self, role: Path, tmp_path: Path) -> None:
        for level in (tmp_path, tmp_path / "run", role.parent, role):
            found, place = locate(level)
            assert (found.name, place) == ("verl_megatron", role)
        assert "latest_checkpointed_iteration.txt says step 5" in explain(tmp_path, role)

    def test_from_below(self, role: Path) -> None:
        """What means nothing by itself stands for the role."""
        base = role / "model" if (role / "model").is_dir() else role
        for part in ("dist_ckpt", "dist_ckpt/common.pt", "dist_ckpt/__0_0.distcp", "dist_ckpt/.metadata", "."):
            assert locate(base / part)[1] == role

    def test_the_optimizer_is_not_the_model(self, role: Path) -> None:
        """The optimizer's dist_ckpt must never be taken for the model's."""
        for part in ("optimizer", "extra"):
            if (role / part).is_dir():
                for place in (role / part, role / part / "dist_ckpt", role / part / "dist_ckpt/common.pt"):
                    with pytest.raises(NotACheckpointError, match=f"state of `{part}`, no weights") as caught:
                        locate(place)
                    assert f"unshard inspect {role}" in str(caught.value)

    def test_actor_and_critic(self, role: Path) -> None:
        dist(role.parent / "critic/dist_ckpt")
        with pytest.raises(NotACheckpointError, match="2 checkpoints") as caught:
            locate(role.parent)
        assert "critic: verl's layout 1" in str(caught.value)

    def test_a_distributed_checkpoint_of_its_own(self, tmp_path: Path) -> None:
        place = dist(tmp_path / "iter_0000010")
        for level in (tmp_path, place, place / "common.pt", place / "metadata.json", place / "__0_0.distcp"):
            found, where = locate(level)
            assert (found.name, where) == ("megatron_dist", place)

    def test_nemo(self, tmp_path: Path) -> None:
        place = dist(tmp_path / "step=9/weights")
        config(tmp_path / "step=9/context")
        assert locate(tmp_path)[1] == place

    def test_bridge_exports_beside_its_weights(self, tmp_path: Path) -> None:
        place = dist(tmp_path / "iter_0000010")
        config(export(place / "hf"))
        assert locate(tmp_path)[1] == place
        assert locate(place / "hf")[0].name == "huggingface"

    def test_states_without_a_model(self, tmp_path: Path) -> None:
        dist(tmp_path / "actor/optimizer/dist_ckpt")
        (tmp_path / "actor/ckpt_contents.json").write_text("{}")
        with pytest.raises(NotACheckpointError, match="without the model"):
            locate(tmp_path / "actor")

    def test_a_directory_named_model(self, tmp_path: Path) -> None:
        place = export(tmp_path / "model")
        assert locate(place)[1] == place

    def test_the_export_alone_is_found(self, tmp_path: Path) -> None:
        export(tmp_path / "run/actor/model/huggingface")
        found, place = locate(tmp_path / "run")
        assert (found.name, place.name) == ("verl_megatron", "actor")


class TestTrackers:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        for step in (10, 20):
            dist(tmp_path / f"iter_00000{step}")
        return tmp_path

    def test_two_iterations(self, run: Path) -> None:
        with pytest.raises(NotACheckpointError, match="2 checkpoints lie below"):
            locate(run)

    def test_an_iteration_that_is_not_there(self, run: Path) -> None:
        (run / "latest_checkpointed_iteration.txt").write_text("30")
        with pytest.raises(NotACheckpointError, match="step 30 is the latest, but neither iter_0000030") as caught:
            locate(run)
        assert f"unshard inspect {run / 'iter_0000020'}" in str(caught.value)

    @pytest.mark.torch
    def test_bridge(self, run: Path) -> None:
        torch = pytest.importorskip("torch")
        state = {"step": torch.tensor(10, dtype=torch.int64), "do_train": torch.tensor(False)}
        torch.save(state, run / "latest_train_state.pt")
        found, place = locate(run)
        assert (found.name, place.name) == ("megatron_dist", "iter_0000010")
        assert "latest_train_state.pt says step 10" in explain(run, place)

    @pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}."])
    def test_a_damaged_train_state_is_no_tracker(self, content: bytes, run: Path) -> None:
        (run / "latest_train_state.pt").write_bytes(content)
        with pytest.raises(NotACheckpointError, match="2 checkpoints"):
            locate(run)


class TestReading:
    """Which place is read, and what is said of the others."""

    def read(self, role: Path, monkeypatch: pytest.MonkeyPatch, *, tensors: tuple[str, ...] = ("a",)) -> Checkpoint:
        """The catalog, where `dist_ckpt` holds `tensors` and an export holds one of its own."""

        def read_dist(self: MegatronDist, source: Source) -> Checkpoint:
            problems = () if tensors else (IncompleteError("no tensor of a model is stored here"),)
            names = dict.fromkeys(tensors)
            return Checkpoint(self.name, "", source.roots, names, dialect="megatron", problems=problems)  # type: ignore[arg-type]

        monkeypatch.setattr(MegatronDist, "read", read_dist)
        return Verl().read(Source(role))

    def test_megatrons_weights_before_the_export(self, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        export((role / "model" if (role / "model").is_dir() else role) / "huggingface")
        found = self.read(role, monkeypatch)
        assert found.format == "megatron_dist"
        assert "holds the model too, as exported at that step; it was not read" in found.notes[-1].text

    def test_adapters_beside_an_exported_base(self, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        export((role / "model" if (role / "model").is_dir() else role) / "huggingface")
        found = self.read(role, monkeypatch, tensors=("decoder.layers.0.x.adapter.linear_in.weight",))
        assert "holds the base model too" in found.notes[-1].text

    def test_the_model_only_in_the_export(self, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`dist_ckpt` of the first layout may hold the optimizer alone."""
        place = export((role / "model" if (role / "model").is_dir() else role) / "huggingface")
        found = self.read(role, monkeypatch, tensors=())
        assert (found.format, found.dialect, found.problems) == ("huggingface", "huggingface", ())
        assert f"the model lies only in `{place.relative_to(role)}`" in " ".join(note.text for note in found.notes)

    def test_no_model_at_all(self, role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "no tensor of a model" in self.read(role, monkeypatch, tensors=()).problems[0].message

    def test_only_an_exported_adapter(self, tmp_path: Path) -> None:
        place = export(tmp_path / "model/huggingface/adapter", "adapter_model.safetensors")
        (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
        found = Verl().read(Source(tmp_path))
        assert found.adapter == {"peft_type": "LORA", "r": 2}

    def test_an_adapter_beside_the_export_is_not_silently_lost(self, tmp_path: Path) -> None:
        export(tmp_path / "model/huggingface")
        export(tmp_path / "model/huggingface/adapter", "adapter_model.safetensors")
        warnings = [note for note in Verl().read(Source(tmp_path)).notes if note.level == "warning"]
        assert any("holds LoRA adapters, which were not read" in note.text for note in warnings)


class TestManifest:
    """`ckpt_contents.json` is written last."""

    def test_a_missing_one_is_said(self, tmp_path: Path) -> None:
        export(tmp_path / "model/huggingface")
        notes = Verl().read(Source(tmp_path)).notes
        assert any("ckpt_contents.json is missing" in note.text and note.level == "warning" for note in notes)

    @pytest.mark.parametrize("text", ["", "[]", "{"])
    def test_a_malformed_one(self, text: str, tmp_path: Path) -> None:
        export(tmp_path / "model/huggingface")
        (tmp_path / "ckpt_contents.json").write_text(text)
        problems = Verl().read(Source(tmp_path)).problems
        assert [type(problem) for problem in problems] == [FormatError]

    def test_a_model_that_is_not_where_it_says(self, tmp_path: Path) -> None:
        export(tmp_path / "model/huggingface")
        (tmp_path / "ckpt_contents.json").write_text('{"contents": {"model": {"path": "model/dist_ckpt"}}}')
        problems = Verl().read(Source(tmp_path)).problems
        assert "the model was saved to `model/dist_ckpt`, which is not there" in problems[0].message

    @pytest.mark.parametrize("contents", ["1", "{}", '{"model": 1}', '{"model": {"path": 1}}'])
    def test_one_that_says_nothing(self, contents: str, tmp_path: Path) -> None:
        export(tmp_path / "model/huggingface")
        (tmp_path / "ckpt_contents.json").write_text(f'{{"contents": {contents}}}')
        found = Verl().read(Source(tmp_path))
        assert not found.problems

    def test_the_formats_own_words(self, role: Path) -> None:
        words = Verl().detect(role)
        assert words is not None
        assert words.startswith("verl's layout ")
        assert HuggingFace().detect(role) is None
