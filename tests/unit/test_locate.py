"""From any level of a run to its checkpoint, and clear words where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unshard.errors import FormatError, NotACheckpointError
from unshard.formats.huggingface.reader import HuggingFace
from unshard.locate import explain, locate


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def ranks(directory: Path, world: int = 2) -> Path:
    """An actor's directory, as far as names tell."""
    touch(*[directory / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)])
    touch(directory / "huggingface/config.json", directory / "optim_world_size_2_rank_0.pt")
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of verl with two steps, the older of which is the later by name."""
    for step in (9, 10):
        ranks(tmp_path / f"run/global_step_{step}/actor")
        touch(tmp_path / f"run/global_step_{step}/data.pt")
    return tmp_path / "run"


def refusal(path: Path, *also: Path) -> str:
    with pytest.raises(NotACheckpointError) as caught:
        locate(path, also)
    return str(caught.value)


class TestLevels:
    @pytest.mark.parametrize(
        "level", ["global_step_9/actor", "global_step_9", "global_step_9/actor/model_world_size_2_rank_1.pt"]
    )
    def test_step_role_and_file(self, level: str, run: Path) -> None:
        found, place = locate(run / level)
        assert found.name == "fsdp"
        assert place == (run / level if level.endswith(".pt") else run / "global_step_9/actor")

    def test_a_run_of_one_step(self, tmp_path: Path) -> None:
        actor = ranks(tmp_path / "project/experiment/global_step_3/actor")
        assert locate(tmp_path)[1] == actor

    def test_a_lone_file(self, tmp_path: Path) -> None:
        touch(tmp_path / "weights_r1.pth")
        assert locate(tmp_path / "weights_r1.pth")[0].name == "full"

    def test_accelerate_and_trainer(self, tmp_path: Path) -> None:
        touch(tmp_path / "checkpoint-7/pytorch_model_fsdp.bin", tmp_path / "checkpoint-7/optimizer.bin")
        found, place = locate(tmp_path)
        assert (found.name, place.name) == ("full", "checkpoint-7")

    def test_a_merged_model(self, tmp_path: Path) -> None:
        touch(tmp_path / "out/model.safetensors", tmp_path / "out/config.json")
        assert locate(tmp_path)[0].name == "huggingface"

    def test_ranks_come_before_the_model_files_beside_them(self, tmp_path: Path) -> None:
        actor = ranks(tmp_path / "actor")
        touch(actor / "huggingface/model.safetensors", actor / "model.safetensors")
        assert locate(tmp_path)[0].name == "fsdp"


class TestTrackers:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("latest_checkpointed_iteration.txt", "9\n"),
            ("latest_ckpt_global_step.txt", "9"),
            ("checkpoint_tracker.json", json.dumps({"last_global_step": 9, "best_global_step": 10})),
        ],
    )
    def test_the_latest_step_is_taken_and_told(self, name: str, text: str, run: Path) -> None:
        (run / name).write_text(text)
        actor = run / "global_step_9/actor"
        assert locate(run)[1] == actor
        assert f"{name} says step 9" in explain(run, actor)
        assert locate(run.parent)[1] == actor
        assert f"{name} says step 9" in explain(run.parent, actor)

    def test_a_converted_model_is_a_release(self, run: Path) -> None:
        """Megatron-LM's converters write `release`, for a model that was trained elsewhere has no iteration."""
        (run / "latest_checkpointed_iteration.txt").write_text("release")
        touch(run / "release/mp_rank_00/model_optim_rng.pt", run / "iter_0000005/mp_rank_00/model_optim_rng.pt")
        assert locate(run)[1] == run / "release"
        assert "says step release" in explain(run, run / "release")

    def test_without_one_nothing_is_claimed(self, run: Path) -> None:
        assert "says" not in explain(run / "global_step_9", run / "global_step_9/actor")

    def test_a_step_that_is_gone(self, run: Path) -> None:
        (run / "latest_checkpointed_iteration.txt").write_text("11")
        text = refusal(run)
        assert "says that step 11 is the latest, but neither global_step_11" in text
        assert f"unshard inspect {run / 'global_step_10'}" in text

    @pytest.mark.parametrize(
        "text", ["", "released", "9" * 19, "9" * 5000, "-9", "9.0", "1_0", "\u00b2", "../9", "[1]", "\udcff"]
    )
    def test_a_tracker_that_names_no_step_is_no_tracker(self, text: str, run: Path) -> None:
        for name in ("latest_checkpointed_iteration.txt", "checkpoint_tracker.json"):
            (run / name).write_bytes(text.encode("utf-8", "surrogateescape"))
        assert "2 checkpoints lie below" in refusal(run)

    @pytest.mark.parametrize("step", ["-9", "9.0", "1e999", "NaN", "true", "[9]", "9" * 4000])
    def test_a_json_tracker_whose_step_is_no_number_of_a_step(self, step: str, run: Path) -> None:
        (run / "checkpoint_tracker.json").write_text(f'{{"last_global_step": {step}}}')
        assert "2 checkpoints lie below" in refusal(run)


class TestSeveral:
    def test_they_are_listed_in_order_with_a_command(self, run: Path) -> None:
        text = refusal(run)
        lines = [line.strip() for line in text.splitlines() if line.startswith("  ")]
        assert [line.split(":")[0] for line in lines] == [str(run / f"global_step_{step}/actor") for step in (9, 10)]
        assert "2 FSDP rank files" in lines[0]
        assert f"hint: name the one that is meant: unshard inspect {run / 'global_step_10/actor'}" in text

    @pytest.mark.parametrize("name", ["²", "1²", "①", "step_٣"])
    def test_directories_with_digits_of_all_kinds(self, name: str, run: Path) -> None:
        ranks(run / name / "actor")
        assert name in refusal(run)

    def test_actor_and_critic(self, run: Path) -> None:
        ranks(run / "global_step_9/critic")
        text = refusal(run / "global_step_9")
        assert "actor" in text
        assert "critic" in text

    def test_hundreds_are_not_all_printed(self, tmp_path: Path) -> None:
        for step in range(30):
            ranks(tmp_path / f"global_step_{step}/actor")
        text = refusal(tmp_path)
        assert "30 checkpoints lie below" in text
        assert "… and 10 more" in text


class TestNothing:
    @pytest.mark.parametrize(
        ("files", "words"),
        [
            (["model/flax_model.msgpack"], "a Flax model"),
            (["dist_ckpt/common.pt", "dist_ckpt/metadata.json"], "Megatron-Core"),
            (["adapter_config.json"], "PEFT adapter"),
            (["something.pt"], "one of them can be named by itself"),
        ],
    )
    def test_what_lies_there_instead(self, files: list[str], words: str, tmp_path: Path) -> None:
        """SofT-GRPO#2, LlamaFactory#3573: layouts look alike; say what it is."""
        touch(*[tmp_path / "place" / file for file in files])
        text = refusal(tmp_path / "place")
        assert words in text
        assert "no checkpoint that can be read" in text

    def test_an_unreadable_kind_above_does_not_hide_a_checkpoint_below(self, tmp_path: Path) -> None:
        touch(tmp_path / "run/trainer.pt", tmp_path / "run/adapter_config.json")
        actor = ranks(tmp_path / "run/global_step_1/actor")
        assert locate(tmp_path / "run")[1] == actor

    def test_the_tokenizer_directory_points_up(self, run: Path) -> None:
        place = run / "global_step_9/actor/huggingface"
        assert f"a checkpoint lies above: unshard inspect {place.parent}" in refusal(place)

    def test_an_empty_directory(self, tmp_path: Path) -> None:
        assert "in it lies nothing" in refusal(tmp_path)

    def test_other_files(self, tmp_path: Path) -> None:
        touch(*[tmp_path / f"{number}.log" for number in range(12)])
        assert "0.log, 1.log, 2.log" in refusal(tmp_path)
        assert "and 4 more" in refusal(tmp_path)
        assert "a text file" in refusal(tmp_path / "3.log")

    def test_a_path_that_does_not_exist(self, tmp_path: Path) -> None:
        assert f"hint: ls {tmp_path}" in refusal(tmp_path / "no" / "where")

    def test_a_further_root_that_does_not_exist(self, run: Path, tmp_path: Path) -> None:
        assert f"{tmp_path / 'gone'}` does not exist" in refusal(run / "global_step_9", tmp_path / "gone")


class TestBounds:
    def test_links_in_circles(self, tmp_path: Path) -> None:
        deep = tmp_path / "a/b"
        deep.mkdir(parents=True)
        (deep / "up").symlink_to(tmp_path)
        (deep / "self").symlink_to("self")
        assert "no checkpoint was found" in refusal(tmp_path)
        actor = ranks(tmp_path / "c/actor")
        assert locate(tmp_path)[1] == actor

    def test_a_link_to_a_checkpoint_is_the_same_checkpoint(self, tmp_path: Path) -> None:
        actor = ranks(tmp_path / "global_step_1/actor")
        (tmp_path / "latest").symlink_to("global_step_1")
        assert locate(tmp_path)[1].samefile(actor)

    def test_too_many_directories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("unshard.locate._MAX_DIRECTORIES", 5)
        for number in range(10):
            (tmp_path / f"d{number}").mkdir()
        assert "in its first 5 directories" in refusal(tmp_path)

    def test_a_directory_that_cannot_be_seen_hides_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        actor, real = ranks(tmp_path / "global_step_1" / "actor"), HuggingFace.detect

        def detect(self: HuggingFace, path: Path) -> str | None:
            if path.name == "closed":
                raise FormatError(f"{path}: cannot be read: Permission denied")
            return real(self, path)

        (tmp_path / "closed").mkdir()
        monkeypatch.setattr(HuggingFace, "detect", detect)
        assert locate(tmp_path)[1] == actor
        with pytest.raises(FormatError, match="cannot be read"):
            locate(tmp_path / "closed")

    def test_a_directory_that_may_not_be_entered(self, tmp_path: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may enter everything")
        (tmp_path / "closed").mkdir(mode=0)
        assert "no checkpoint was found" in refusal(tmp_path)
