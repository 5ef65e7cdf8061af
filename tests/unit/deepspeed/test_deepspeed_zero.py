"""ZeRO's partitions as jobs save them, and as people find them: moved, mixed, cut short, without what tells of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torch_bytes as opcodes
from assembled import gather
from deepspeed_bytes import BF16, Files, Job, Weights, address, weights
from format_contract import check_format
from unshard.checkpoint import Checkpoint
from unshard.errors import FormatError, IncompleteError, UnshardError, UsageError
from unshard.formats.contract import Source
from unshard.formats.deepspeed import DeepSpeed
from unshard.options import Cast, MergeOptions
from unshard.options import Weights as Choice
from unshard.preparing import prepare
from unshard.tensors import Tensor

TRAINED = weights({"embed.weight": (11, 3), "layer.weight": (3, 7), "layer.bias": (3,)})
OTHERS = weights({"head.weight": (5, 3)}, start=200)
FROZEN = weights({"base.weight": (7, 3), "base.bias": (5,)}, dtype=BF16)
STAGES = [None, 1, 2, 3]


def job(stage: int | None = 2, ranks: int = 3, **changes: Any) -> Job:
    return Job(stage, ranks, **({"groups": [TRAINED, OTHERS]} | changes))


def read(place: Path, choice: Choice = "master", *also: Path) -> Checkpoint:
    return DeepSpeed().read(Source(place, also, weights=choice))


def values(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {
        name: tensor.dtype.name.encode() + gather(tensor, checkpoint.roots)
        for name, tensor in checkpoint.tensors.items()
    }


def stored(arrays: Weights) -> dict[str, bytes]:
    names = {"float32": b"F32", "bfloat16": b"BF16", "float16": b"F16", "int64": b"I64"}
    return {name: names[str(array.dtype)] + array.tobytes() for name, array in arrays.items()}


def told(checkpoint: Checkpoint) -> str:
    return "\n".join(f"{note.level}: {note.text}" for note in checkpoint.notes)


def wrong(place: Path, choice: Choice = "master") -> str:
    """All that is wrong with a checkpoint, whether it is raised or collected."""
    try:
        problems: tuple[UnshardError, ...] = read(place, choice).problems
    except UnshardError as error:
        problems = (error,)
    assert problems
    return "\n".join(str(problem) for problem in problems)


def changed(job: Job, change: Callable[[Files], object]) -> Files:
    files = job.files()
    change(files)
    return files


def optimizer(files: Files, rank: int) -> dict[str, Any]:
    name = next(name for name in files if f"pp_rank_{rank}_" in name and name.endswith("optim_states.pt"))
    state = files[name].content["optimizer_state_dict"]
    assert isinstance(state, dict)
    return state


@pytest.mark.parametrize("stage", STAGES)
def test_the_contract(stage: int | None, tmp_path: Path) -> None:
    check_format(DeepSpeed(), job(stage).write(tmp_path / "global_step7"), tmp_path)


@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_weights(stage: int | None, tmp_path: Path) -> None:
    it = job(stage, buffers={"counts": np.arange(4)})
    place = it.write(tmp_path / "global_step7")
    masters, low = read(place), read(place, "model")
    assert values(masters) == stored(it.masters())
    assert values(low) == stored(it.module())
    assert "note: fp32 masters of 4 parameters" in told(masters)
    assert "--weights model takes the bf16 weights" in told(masters)
    assert "note: the module's bf16 weights" in told(low)
    assert masters.world_size == 3
    assert masters.title == f"DeepSpeed ZeRO-{stage or 1}, 3 ranks, step 7"


def test_groups_of_one_partition_count_and_one_tensor(tmp_path: Path) -> None:
    """The first releases wrote a number and a bare tensor."""
    for stage in (1, 2, 3):
        it = job(stage, groups=[TRAINED], plain=True)
        checkpoint = read(it.write(tmp_path / str(stage)))
        assert checkpoint.problems == ()
        assert values(checkpoint) == stored(it.masters())


def test_names_of_the_first_releases(tmp_path: Path) -> None:
    it = job(low=np.dtype(np.float16))
    files = {name.replace("_optim_states", "optim_states"): saved for name, saved in it.files().items()}
    assert values(read(it.write(tmp_path / "tag", files))) == stored(it.masters())


@pytest.mark.parametrize("ranks", [1, 11])
def test_ranks_are_numbers_not_words(ranks: int, tmp_path: Path) -> None:
    for stage in STAGES:
        it = job(stage, ranks)
        assert values(read(it.write(tmp_path / str(stage)))) == stored(it.masters())


# What has no master --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_are_widened_and_counted(stage: int, tmp_path: Path) -> None:
    it = job(stage, frozen=FROZEN)
    place = it.write(tmp_path / "tag")
    checkpoint = read(place)
    assert values(checkpoint) == stored(it.masters())
    note = next(note for note in checkpoint.notes if "widened" in note.text)
    assert note.text.startswith("2 parameters without training have no masters")
    assert note.tensors == ("base.weight", "base.bias")
    assert values(read(place, "model")) == stored(it.module())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_was_widened_can_be_narrowed_again(stage: int, dtype: Cast, tmp_path: Path) -> None:
    """Frozen parameters go to fp32 beside masters, and where `--dtype` sends all: cast once, from what is stored."""
    it = job(stage, frozen=FROZEN)
    options = MergeOptions(weights_only=True, dtype=dtype)
    decision = prepare(it.write(tmp_path / "tag"), options).decision
    wanted = {"bf16": BF16, "fp16": np.dtype(np.float16)}[dtype]
    found = {value.name: value for file in decision.target.files for _, value in file.tensors}
    for name, array in it.masters().items():
        tensor = found[name]
        assert isinstance(tensor, Tensor)
        assert gather(tensor, decision.target.roots) == array.astype(wanted).tobytes(), name


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_weights_that_stage_3_rounds_are_not_rounded_twice(dtype: Cast, tmp_path: Path) -> None:
    options = MergeOptions(weights_only=True, weights="model", dtype=dtype)
    with pytest.raises(UsageError, match=r"would be rounded twice: `embed\.weight`"):
        prepare(job(3).write(tmp_path / "tag"), options)


def test_frozen_parameters_of_stage_1_lie_in_the_module_alone(tmp_path: Path) -> None:
    it = job(1, frozen=FROZEN)
    checkpoint = read(it.write(tmp_path / "tag"))
    assert values(checkpoint) == stored(it.masters())
    assert "2 parameters without training" in told(checkpoint)


@pytest.mark.parametrize("stage", [2, 3])
def test_excluded_parameters_are_named_with_their_shapes(stage: int, tmp_path: Path) -> None:
    def leave_out(files: Files) -> None:
        for name, saved in files.items():
            if name.endswith("model_states.pt"):
                for frozen in FROZEN:
                    del saved.content["module"][frozen]
                saved.content["frozen_param_fragments"] = None

    it = job(stage, frozen=FROZEN)
    checkpoint = read(it.write(tmp_path / "tag", changed(it, leave_out)))
    assert checkpoint.excluded == {"base.weight": (7, 3), "base.bias": (5,)}
    assert set(checkpoint.tensors) == {*TRAINED, *OTHERS}
    assert checkpoint.problems == ()


def test_second_names_of_excluded_parameters_are_not_lost(tmp_path: Path) -> None:
    """`exclude_frozen_parameters` forgets the second name of a tied embedding; releases of 2026 record no shapes."""
    it = job(3, frozen=FROZEN, shared={"lm_head.weight": "base.weight"})
    files = it.files()
    for name, saved in files.items():
        if name.endswith("model_states.pt"):
            for frozen in FROZEN:
                del saved.content["module"][frozen]
            saved.content |= {"frozen_param_fragments": None, "frozen_param_shapes": None}
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert checkpoint.problems == ()
    assert set(checkpoint.tensors) == {*TRAINED, *OTHERS}
    assert "1 parameter left out at saving had a second name" in told(checkpoint)
    assert "saved with `exclude_frozen_parameters`" in told(checkpoint)


@pytest.mark.parametrize("stage", STAGES)
def test_shared_parameters_are_there_under_both_names(stage: int | None, tmp_path: Path) -> None:
    it = job(stage, shared={"lm_head.weight": "embed.weight"})
    checkpoint = read(it.write(tmp_path / "tag"))
    assert values(checkpoint) == stored(it.masters())
    assert checkpoint.problems == ()


def test_a_second_name_of_which_nothing_tells_is_not_lost(tmp_path: Path) -> None:
    """Only data-parallel rank 0 says which parameters are shared; others have a placeholder of it."""
    it = job(3, shared={"lm_head.weight": "embed.weight"})
    files = it.files()
    del files["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    found = wrong(it.write(tmp_path / "tag", files))
    assert "placeholders of shape [0]" in found
    assert "lm_head.weight" in found


def test_masters_of_low_precision_stay_what_they_are(tmp_path: Path) -> None:
    """`bf16_master_weights_and_grads` keeps masters in bf16: what stands beside them is not widened."""
    low = [{name: array.astype(BF16) for name, array in group.items()} for group in (TRAINED, OTHERS)]
    for stage in (2, 3):
        it = job(stage, groups=low, frozen=FROZEN)
        checkpoint = read(it.write(tmp_path / str(stage)))
        assert values(checkpoint) == stored(it.module())
        assert "note: bf16 masters of 4 parameters" in told(checkpoint)


# What is missing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_missing_optimizer_states_are_named(stage: int | None, rank: int, tmp_path: Path) -> None:
    place = job(stage).write(tmp_path / "global_step7")
    (place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    found = wrong(place)
    assert f"partitioned over 3 data-parallel ranks; rank {rank} is missing" in found
    assert f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in found
    assert "--also DIR" in found


def test_missing_pieces_of_frozen_parameters_are_named(tmp_path: Path) -> None:
    place = job(3, frozen=FROZEN).write(tmp_path / "tag")
    (place / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    found = wrong(place)
    assert "zero_pp_rank_2_mp_rank_00_model_states.pt" in found
    assert "piece of each frozen parameter" in found


@pytest.mark.parametrize("stage", [1, 2])
def test_model_states_alone_are_a_model(stage: int, tmp_path: Path) -> None:
    it = job(stage)
    files = {name: saved for name, saved in it.files().items() if "model_states" in name}
    place = it.write(tmp_path / "tag", files)
    for choice in ("master", "model"):
        checkpoint = read(place, choice)  # type: ignore[arg-type]
        assert values(checkpoint) == stored(it.module())
        assert checkpoint.weights == "model"
    assert "warning: no optimizer states lie here: the module's bf16 weights were taken" in told(read(place))


def test_model_states_of_stage_3_alone_are_none(tmp_path: Path) -> None:
    it = job(3)
    files = {name: saved for name, saved in it.files().items() if "model_states" in name}
    assert "*_rank_*_mp_rank_00_optim_states.pt" in wrong(it.write(tmp_path / "tag", files))


def test_optimizer_states_alone_have_no_names(tmp_path: Path) -> None:
    it = job()
    files = {name: saved for name, saved in it.files().items() if "optim_states" in name}
    with pytest.raises(IncompleteError, match="names and shapes of parameters lie in files of model states"):
        read(it.write(tmp_path / "tag", files))


def test_node_local_disks(tmp_path: Path) -> None:
    it = job()
    files = it.files()
    other = {name: files.pop(name) for name in list(files) if "pp_rank_2_" in name}
    here = it.write(tmp_path / "node0" / "global_step7", files)
    there = it.write(tmp_path / "node1" / "global_step7", other)
    for also in (there, there.parent):
        checkpoint = read(here, "master", also)
        assert checkpoint.problems == ()
        assert values(checkpoint) == stored(it.masters())


def test_optimizer_states_of_one_model_parallel_rank_only(tmp_path: Path) -> None:
    it = job(1, 1)
    files = it.files()
    for saved in files.values():
        saved.content["mp_world_size"] = 2
    files["mp_rank_01_model_states.pt"] = files["mp_rank_00_model_states.pt"]
    found = wrong(it.write(tmp_path / "tag", files))
    assert "optimizer states of 1 of 2 model-parallel ranks is missing" in found
    assert "_mp_rank_01_optim_states.pt" in found


# What does not belong together ---------------------------------------------------------------------------------------


MIXED: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "partitions": lambda state: state.update(partition_count=[4, 4]),
    "ZeRO stage": lambda state: state.update(zero_stage=1),
    "step of the optimizer": lambda state: state["base_optimizer_state"]["state"][0].update(step=8.0),
}


@pytest.mark.parametrize("what", MIXED)
def test_files_of_different_saves(what: str, tmp_path: Path) -> None:
    it = job()
    files = changed(it, lambda files: MIXED[what](optimizer(files, 1)))
    found = wrong(it.write(tmp_path / "tag", files))
    assert f"files of optimizer states are of different saves; {what}" in found
    assert "rank 1: " in found


def test_files_of_different_versions(tmp_path: Path) -> None:
    it = job()
    files = it.files()
    files["bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"].content["ds_version"] = "0.16.0"
    assert "rank 2: 0.16.0" in wrong(it.write(tmp_path / "tag", files))


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_of_different_types(stage: int, tmp_path: Path) -> None:
    def cast(files: Files) -> None:
        state = optimizer(files, 1)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        state[key] = [flat.astype(np.float16) for flat in state[key]]

    it = job(stage)
    assert "types of masters" in wrong(it.write(tmp_path / "tag", changed(it, cast)))


def test_pieces_of_another_step(tmp_path: Path) -> None:
    it = job(3, frozen=FROZEN)
    files = it.files()
    files["zero_pp_rank_1_mp_rank_00_model_states.pt"].content["global_steps"] = 9
    assert "files of model states are of different saves" in wrong(it.write(tmp_path / "tag", files))


def test_an_optimizer_that_counts_other_steps_is_a_warning(tmp_path: Path) -> None:
    it = job()
    files = it.files()
    files["mp_rank_00_model_states.pt"].content["global_steps"] = 12
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert "warning: the model states are of step 12, and the optimizer counts 7 steps" in told(checkpoint)


def test_files_left_over_from_more_ranks_are_not_read(tmp_path: Path) -> None:
    before, it = job(ranks=5, groups=[weights({"embed.weight": (2, 2)})]), job()
    before.write(tmp_path / "tag")
    place = it.write(tmp_path / "tag")
    checkpoint = read(place)
    assert checkpoint.problems == ()
    assert values(checkpoint) == stored(it.masters())
    assert "warning: 2 files of optimizer states are left over from a save with more ranks (ranks 3-4" in told(
        checkpoint
    )


def test_first_files_left_over_from_fewer_ranks_are_refused(tmp_path: Path) -> None:
    """They count ranks among themselves: what the model states say shows that those beyond them are of this save."""
    before, it = job(ranks=2), job(ranks=4)
    it.write(tmp_path / "tag")
    stale = {name: saved for name, saved in before.files().items() if "optim_states" in name}
    found = wrong(before.write(tmp_path / "tag", stale))
    assert "the model states are of 4 data-parallel ranks" in found
    assert "rank_0_mp_rank_00_optim_states.pt is of 2, from another save" in found


def test_replicas_of_partitions_are_not_read(tmp_path: Path) -> None:
    """MiCS partitions over a group of ranks; each further group has the same once more."""
    it = job(3)
    files = it.files()
    for rank in range(3):
        for kind in ("model", "optim"):
            name = next(name for name in files if f"pp_rank_{rank}_" in name and kind in name)
            files[name.replace(f"pp_rank_{rank}_", f"pp_rank_{rank + 3}_")] = files[name]
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert values(checkpoint) == stored(it.masters())
    assert "note: ranks 3-5 have replicas" in told(checkpoint)


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("twice", [False, True])
def test_files_of_stage_3_that_were_swapped_or_copied(kind: str, twice: bool, tmp_path: Path) -> None:
    """Nothing in them tells the rank, but for the archive's folder."""
    it = job(3, frozen=FROZEN)
    files = it.files()
    for name, saved in files.items():
        saved.folder = name.removesuffix(".pt")
    assert values(read(it.write(tmp_path / "right", files))) == stored(it.masters())
    one, other = [name for name in files if kind in name][1:3]
    files[one], files[other] = files[other], files[other] if twice else files[one]
    found = wrong(it.write(tmp_path / "wrong", files))
    assert f"{one}: was saved as {other}, which is another place" in found


def test_two_runs_of_other_precision_in_one_directory(tmp_path: Path) -> None:
    job(low=np.dtype(np.float16)).write(tmp_path / "tag")
    found = wrong(job().write(tmp_path / "tag"))
    assert "files of two runs lie here" in found
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt and zero_pp_rank_1_mp_rank_00_optim_states.pt" in found


def test_two_runs_of_other_stages_in_one_directory(tmp_path: Path) -> None:
    job(3).write(tmp_path / "tag")
    assert "mp_rank_00_model_states.pt and zero_pp_rank_0_mp_rank_00" in wrong(job(2).write(tmp_path / "tag"))


def test_model_states_of_stage_3_without_the_first_are_of_another_run_too(tmp_path: Path) -> None:
    job(3).write(tmp_path / "tag")
    place = job(2).write(tmp_path / "tag")
    (place / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert "mp_rank_00_model_states.pt and zero_pp_rank_1_mp_rank_00" in wrong(place)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_over_fewer_ranks_are_of_experts_alone(stage: int, tmp_path: Path) -> None:
    """Of two parameters of one name, each of a rank, neither may take the other's place."""
    it = job(stage, 2, groups=[weights({"a": (2,)}), weights({"b": (4,)})])
    files = it.files()
    for rank in range(2):
        optimizer(files, rank).update(partition_count=[1, 2], param_slice_mappings=[])
        optimizer(files, rank)["single_partition_of_fp32_groups"][0] = np.array([rank, rank], np.float32)
    assert "no experts are partitioned over fewer ranks than others: `a`" in wrong(it.write(tmp_path / "tag", files))


@pytest.mark.parametrize("stage", STAGES)
def test_partitions_of_another_model(stage: int | None, tmp_path: Path) -> None:
    it, other = job(stage), job(stage, groups=[TRAINED, weights({"head.weight": (50, 3)})])
    files = {name: saved for name, saved in it.files().items() if "model_states" in name}
    files |= {name: saved for name, saved in other.files().items() if "optim_states" in name}
    assert "must be of one save" in wrong(it.write(tmp_path / "tag", files))


@pytest.mark.parametrize("stage", [1, 2])
def test_another_number_of_groups(stage: int, tmp_path: Path) -> None:
    it, other = job(stage), job(stage, groups=[TRAINED])
    files = {name: saved for name, saved in it.files().items() if "model_states" in name}
    files |= {name: saved for name, saved in other.files().items() if "optim_states" in name}
    assert "2 groups of parameters, the optimizer states 1" in wrong(it.write(tmp_path / "tag", files))


def test_fragments_that_lie_in_another_order(tmp_path: Path) -> None:
    """`param_slice_mappings` proves the order of `param_shapes`."""
    it = job(2, 1, groups=[weights({"a": (3,), "b": (3,)})])
    swap = {"a": address(3, 3), "b": address(0, 3)}
    files = changed(it, lambda files: optimizer(files, 0).update(param_slice_mappings=[swap]))
    found = wrong(it.write(tmp_path / "tag", files))
    assert "the order of `param_shapes` is not that of the fragments" in found
    assert "`a`, `b`" in found


def test_parameters_dealt_out_in_turn_have_no_true_fragments(tmp_path: Path) -> None:
    """With `round_robin_gradients`, DeepSpeed lays parameters out by `param_shapes` and records fragments otherwise."""
    it = job(2, 1, groups=[weights({"a": (3,), "b": (3,)})])
    files = it.files()
    optimizer(files, 0)["param_slice_mappings"] = [{"a": address(3, 3), "b": address(0, 3)}]
    model = files["mp_rank_00_model_states.pt"].content
    model["ds_config"] = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert checkpoint.problems == ()
    assert values(checkpoint) == stored(it.masters())


def test_a_configuration_by_its_path_does_not_tell_whether_parameters_are_dealt_out_in_turn(tmp_path: Path) -> None:
    """`deepspeed.initialize(config="ds.json")` saves that text; fragments then prove nothing."""
    it = job(2, 1, groups=[weights({"a": (3,), "b": (3,)})])
    files = it.files()
    optimizer(files, 0)["param_slice_mappings"] = [{"a": address(3, 3), "b": address(0, 3)}]
    files["mp_rank_00_model_states.pt"].content["ds_config"] = "ds.json"
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert checkpoint.problems == ()
    assert values(checkpoint) == stored(it.masters())


# What is not read ----------------------------------------------------------------------------------------------------


def test_partitions_of_experts_by_autoep_are_refused(tmp_path: Path) -> None:
    it = job(3)
    files = changed(it, lambda files: optimizer(files, 0).update(ds_zero_partition_groups=[{"sub_group": 0}]))
    assert "ds_zero_partition_groups" in wrong(it.write(tmp_path / "tag", files))


def test_an_optimizer_without_flat_masters_is_refused(tmp_path: Path) -> None:
    def rename(files: Files) -> None:
        state = optimizer(files, 0)
        state["local_sub_partitions_of_fp32_groups"] = state.pop("single_partition_of_fp32_groups")

    it = job(1)
    place = it.write(tmp_path / "tag", changed(it, rename))
    found = wrong(place)
    assert "no flat masters in `single_partition_of_fp32_groups`" in found
    assert "`local_sub_partitions_of_fp32_groups`" in found
    assert "--weights model" in found
    assert values(read(place, "model")) == stored(it.module())


def test_optimizer_states_that_nothing_names(tmp_path: Path) -> None:
    it = job(1)
    files = it.files()
    files["mp_rank_00_model_states.pt"].content["param_shapes"] = None
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert values(checkpoint) == stored(it.module())
    assert "warning: the optimizer's masters lie here, but no `param_shapes`" in told(checkpoint)


@pytest.mark.parametrize("key", ["fp32_groups", "fp32_groups_flat"])
def test_masters_of_a_job_without_zero_are_told_and_not_guessed(tmp_path: Path, key: str) -> None:
    it = job(1)
    files = {"mp_rank_00_model_states.pt": it.files()["mp_rank_00_model_states.pt"]}
    content = files["mp_rank_00_model_states.pt"].content
    content |= {"param_shapes": None, "optimizer": {key: []}, "ds_config": {"zero_optimization": {"stage": 0}}}
    place = it.write(tmp_path / "tag", files)
    assert values(read(place)) == stored(it.module())
    assert "warning: the optimizer's masters lie here" in told(read(place))
    chosen = read(place, "model")
    assert chosen.weights == "model"
    assert values(chosen) == stored(it.module())
    assert "the optimizer's masters lie here" not in told(chosen)


def test_files_of_other_checkpoint_engines(tmp_path: Path) -> None:
    place = job().write(tmp_path / "tag")
    (place / "mp_rank_00_model_states.pt").write_bytes(b"\x10\0\0\0\0\0\0\0{'module': ...}")
    with pytest.raises(FormatError, match=r"mp_rank_00_model_states\.pt"):
        read(place)


HOSTILE: dict[str, tuple[str, Any]] = {
    "a module of text": ("module", "weights"),
    "a module that is called": ("module", opcodes.call(opcodes.named("os", "system"), opcodes.text("true"))),
    "shapes of text": ("param_shapes", "(2, 3)"),
    "shapes that are numbers": ("param_shapes", [3]),
    "shapes of no sizes": ("param_shapes", [{"embed.weight": ["a"]}]),
    "negative shapes": ("param_shapes", [{"embed.weight": [-1, 3]}]),
    "huge shapes": ("param_shapes", [{"embed.weight": [1 << 61, 1 << 61], "x": [3]}, {"y": [3]}]),
    "empty shapes of huge axes": ("param_shapes", [{"x": [1 << 40, 1 << 40, 0]}]),
    "shapes of 65 axes": ("param_shapes", [{"embed.weight": [1] * 65}]),
    "a parameter in two groups": ("param_shapes", [{"embed.weight": [1]}, {"embed.weight": [1]}]),
    "fragments of text": ("frozen_param_fragments", {"x": "y"}),
    "frozen shapes of text": ("frozen_param_shapes", {"x": "y"}),
    "shared parameters of numbers": ("shared_params", {"x": 3}),
    "shared parameters without names": ("shared_params", 3),
    "buffers of numbers": ("buffer_names", [3]),
    "many model-parallel ranks": ("mp_world_size", 1 << 40),
    "experts without end": ("num_experts", [1 << 60]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_model_states_that_lie(name: str, tmp_path: Path) -> None:
    key, value = HOSTILE[name]
    for stage in (2, 3):
        it = job(stage)
        files = it.files()
        for saved in files.values():
            if "module" in saved.content:
                saved.content[key] = value
        assert wrong(it.write(tmp_path / str(stage), files))


HOSTILE_OPTIMIZER: dict[str, tuple[str, Any]] = {
    "a stage of text": ("zero_stage", "two"),
    "a stage beyond": ("zero_stage", 4),
    "counts of text": ("partition_count", ["a"]),
    "no counts": ("partition_count", [0, 0]),
    "counts without end": ("partition_count", [1 << 40, 1 << 40]),
    "more ranks than files": ("partition_count", [1 << 18, 1 << 18]),
    "masters of text": ("single_partition_of_fp32_groups", ["a", "b"]),
    "masters of integers": ("single_partition_of_fp32_groups", [np.zeros(14, np.int32), np.zeros(6, np.int32)]),
    "masters of two axes": ("single_partition_of_fp32_groups", [np.zeros((2, 2), np.float32)] * 2),
    "negative gaps": ("param_alignment_paddings", [[-1, 0, 0], [0]]),
    "gaps of other parameters": ("param_alignment_paddings", [[0], [0]]),
    "gaps without end": ("param_alignment_paddings", [[1 << 70, 0, 0], [0]]),
}


def test_gaps_that_ranks_record_differently(tmp_path: Path) -> None:
    it = job(2, alignment=8)
    files = changed(it, lambda files: optimizer(files, 1).update(param_alignment_paddings=[[0, 0, 0], [0]]))
    assert "gaps between parameters" in wrong(it.write(tmp_path / "tag", files))


@pytest.mark.parametrize("stage", STAGES)
def test_steps_beyond_all_floating_point_numbers(stage: int | None, tmp_path: Path) -> None:
    it = job(stage)
    files = it.files()
    for rank in range(3):
        state = optimizer(files, rank)
        base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        base["state"][0]["step"] = opcodes.integer(10**400)
    checkpoint = read(it.write(tmp_path / "tag", files))
    assert checkpoint.problems == ()
    assert values(checkpoint) == stored(it.masters())


@pytest.mark.parametrize("name", HOSTILE_OPTIMIZER)
def test_optimizer_states_that_lie(name: str, tmp_path: Path) -> None:
    key, value = HOSTILE_OPTIMIZER[name]
    it = job(2)
    files = it.files()
    for rank in range(3):
        optimizer(files, rank)[key] = value
    assert wrong(it.write(tmp_path / "tag", files))
