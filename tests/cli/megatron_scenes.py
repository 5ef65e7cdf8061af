"""What Megatron's users see: name → command lines, and what makes before what lies there (see `test_snapshots`).

Whatever fails must leave nothing behind: `test_scene` looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from fsdp_bytes import write_json
from megatron_bytes import FILE, Decoder, write_legacy

Arrange: TypeAlias = Callable[[Path, Path], None]

DENSE = Decoder()
MIXTURE = Decoder(experts=4)
_MERGE = "unshard merge run OUT --config run/hf"
_VERL = "unshard merge --backend megatron --local_dir run --target_dir OUT --hf_model_path run/hf"
_LEFT_BY_A_CONVERTER = {"recorded": False}


def _golden(name: str, *gone: str, cut: Mapping[str, int] | None = None) -> Arrange:
    """A copy of a golden run: files and directories of its iteration that are gone, files that end early."""

    def arrange(place: Path, cases: Path) -> None:
        shutil.copytree(cases / name, place / "case")
        iteration = place / "case" / "ckpt" / "iter_0000010"
        for path in gone:
            victim = iteration / path
            (shutil.rmtree if victim.is_dir() else Path.unlink)(victim)
        for path, size in (cut or {}).items():
            (iteration / path).write_bytes((iteration / path).read_bytes()[:size])

    return arrange


def _run(model: Decoder, *, config: Mapping[str, Any] | None = None, **options: Any) -> Arrange:
    """A run of the model. `config`: what config.json says otherwise."""

    def arrange(place: Path, _cases: Path) -> None:
        write_legacy(place / "run", model, **options)
        write_json(place / "run" / "hf" / "config.json", model.config(**(config or {})))

    return arrange


def _mix_iterations(place: Path, _cases: Path) -> None:
    write_legacy(place / "run", DENSE, tp=2, pp=2)
    write_legacy(place / "later", DENSE, tp=2, pp=2, iteration=20)
    later = place / "later" / "iter_0000020" / "mp_rank_01_001"
    shutil.copytree(later, place / "run" / "iter_0000010" / "mp_rank_01_001", dirs_exist_ok=True)


def _break_a_save_off(place: Path, _cases: Path) -> None:
    ranks = write_legacy(place / "run", DENSE, tp=2, pp=2) / "iter_0000010"
    (ranks / "mp_rank_00_001" / FILE).write_bytes(b"")
    file = ranks / "mp_rank_01_000" / FILE
    file.write_bytes(file.read_bytes()[:-3000])
    shutil.rmtree(ranks / "mp_rank_01_001")


def _rename_an_iteration(place: Path, cases: Path) -> None:
    _golden("megatron_dist_tp2")(place, cases)
    (place / "case" / "ckpt" / "iter_0000010").rename(place / "case" / "ckpt" / "iter_0000020")
    (place / "case" / "ckpt" / "latest_checkpointed_iteration.txt").write_text("20")


def _rename_layers(place: Path, _cases: Path) -> None:
    names = {"linear_proj": "linear_prj", "linear_fc1.layer_norm_weight": "post_norm.weight"}

    def rename(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if old in name), name)

    write_legacy(place / "run", DENSE, rename=rename)


def _write_an_old_version(place: Path, _cases: Path) -> None:
    def rename(name: str) -> str:
        return name.replace("decoder.", "language_model.encoder.").replace("linear_qkv", "query_key_value")

    write_legacy(place / "run", Decoder(groups=4), tp=2, version=0.0, rename=rename, recorded=False)
    shutil.rmtree(place / "run" / "hf")


SCENES: Mapping[str, tuple[tuple[str, ...], Arrange]] = {
    "megatron_inspect_ranks": (
        ("unshard inspect CASES/megatron_legacy_tp2pp2ep2/ckpt", "unshard inspect CASES/megatron_legacy_pp2vpp2/ckpt"),
        lambda _place, _cases: None,
    ),
    "megatron_inspect_torch_dist": (
        ("unshard inspect -v CASES/megatron_dist_tp2ep2etp1/ckpt", "unshard inspect CASES/megatron_dist_tp2/ckpt"),
        lambda _place, _cases: None,
    ),
    "megatron_inspect_without_args": (
        ("unshard inspect run/iter_0000010",),
        _run(DENSE, tp=2, pp=2, **_LEFT_BY_A_CONVERTER),
    ),
    "megatron_plan": (
        (
            "unshard plan CASES/megatron_legacy_tp2_tied_pad/ckpt OUT --config CASES/megatron_legacy_tp2_tied_pad/hf",
            "unshard plan CASES/megatron_dist_ep2/ckpt -v",
        ),
        lambda _place, _cases: None,
    ),
    "megatron_merge": (
        ("unshard merge CASES/megatron_legacy_tp2_tied_pad/ckpt OUT --config CASES/megatron_legacy_tp2_tied_pad/hf",),
        lambda _place, _cases: None,
    ),
    "megatron_merge_as_verl": (
        (
            f"{_VERL} --num-attention-heads 4 --num-key-value-heads 2 --use_cpu_initialization",
            "unshard test --backend megatron --local_dir run --test_hf_dir OUT --hf_model_path run/hf",
        ),
        _run(DENSE, tp=2, pp=2),
    ),
    "megatron_error_as_verl": (
        (
            f"{_VERL} --num-attention-heads 32 --num-key-value-heads 8 --tie-word-embedding",
            f"{_VERL} --tie-word-embedding",
            f"{_VERL} --is-value-model",
            "unshard merge --backend fsdp --local_dir run --target_dir OUT --hf_model_path run/hf",
        ),
        _run(DENSE, tp=2, pp=2),
    ),
    "megatron_parallel": (
        (
            "unshard merge run OUT --config run/hf --parallel tp=2,pp=1,ep=2,etp=2",
            "unshard verify OUT --against run --config run/hf --parallel ep=2",
        ),
        _run(MIXTURE, tp=2, ep=2, **_LEFT_BY_A_CONVERTER),
    ),
    "megatron_error_parallel": (
        (
            f"{_MERGE} --parallel tp=2,dp=4,pp=x,tp=3",
            f"{_MERGE} --parallel tp=1,pp=2",
            f"{_MERGE} --parallel tp=4,etp=4",
            f"{_MERGE} --parallel vpp=2,etp=1",
            "unshard merge CASES/fsdp2_w4/ckpt OUT --parallel tp=2",
            "unshard merge CASES/megatron_legacy_tp2pp2/ckpt OUT --parallel tp=4,pp=2",
        ),
        _run(MIXTURE, tp=2, ep=2, **_LEFT_BY_A_CONVERTER),
    ),
    "megatron_error_missing_pipeline_rank": (
        (
            "unshard merge case/ckpt OUT --config case/hf",
            "unshard plan case/ckpt OUT --config case/hf",
            "unshard inspect case/ckpt",
            "unshard verify case/truth --against case/ckpt --config case/hf",
        ),
        _golden("megatron_legacy_tp2pp2", "mp_rank_00_001", "mp_rank_01_001"),
    ),
    "megatron_error_missing_tensor_rank": (
        ("unshard merge case/ckpt OUT --config case/hf",),
        _golden("megatron_legacy_tp2pp2", "mp_rank_01_000"),
    ),
    "megatron_error_missing_expert_rank": (
        ("unshard merge case/ckpt OUT --config case/hf",),
        _golden("megatron_legacy_tp2pp2ep2", "mp_rank_00_001_001", "mp_rank_01_001_001"),
    ),
    "megatron_error_two_iterations": ((_MERGE,), _mix_iterations),
    "megatron_error_renamed_iteration": (("unshard merge case/ckpt OUT --config case/hf",), _rename_an_iteration),
    "megatron_error_interrupted_save": ((_MERGE, "unshard inspect run"), _break_a_save_off),
    "megatron_error_args_against_shapes": (
        (_MERGE, "unshard inspect run"),
        _run(DENSE, tp=2, pp=2, args={"num_layers": 4, "hidden_size": 32, "tensor_model_parallel_size": 1}),
    ),
    "megatron_error_heads_of_the_config": (
        (_MERGE,),
        _run(DENSE, tp=2, config={"num_attention_heads": 8, "num_key_value_heads": 4}),
    ),
    "megatron_error_heads_of_the_config_without_args": (
        (_MERGE,),
        _run(DENSE, tp=2, config={"num_attention_heads": 8}, **_LEFT_BY_A_CONVERTER),
    ),
    "megatron_error_vocabulary_of_the_config": ((_MERGE,), _run(DENSE, tp=2, config={"vocab_size": 50})),
    "megatron_error_layers_of_the_config": (
        (_MERGE,),
        _run(DENSE, pp=2, config={"num_hidden_layers": 3}, **_LEFT_BY_A_CONVERTER),
    ),
    "megatron_error_experts_of_the_config": ((_MERGE,), _run(MIXTURE, ep=2, config={"num_experts": 8})),
    "megatron_error_unknown_names": ((_MERGE,), _rename_layers),
    "megatron_heads_of_an_old_version": (
        (
            "unshard merge run OUT --weights-only",
            "unshard merge run OUT --weights-only --num-attention-heads 5",
            "unshard merge run OUT --weights-only --num-attention-heads 4 -q",
        ),
        _write_an_old_version,
    ),
    "megatron_error_no_metadata": (
        ("unshard merge case/ckpt OUT --config case/hf", "unshard inspect case/ckpt"),
        _golden("megatron_dist_tp2", ".metadata"),
    ),
    "megatron_error_damaged_metadata": (
        ("unshard merge case/ckpt OUT --config case/hf", "unshard inspect case/ckpt"),
        _golden("megatron_dist_tp2", cut={".metadata": 900}),
    ),
    "megatron_error_missing_distcp": (
        (
            "unshard merge case/ckpt OUT --config case/hf",
            "unshard verify case/truth --against case/ckpt --config case/hf",
        ),
        _golden("megatron_dist_tp2", "__1_0.distcp", "__1_1.distcp"),
    ),
    "megatron_error_short_distcp": (
        ("unshard merge case/ckpt OUT --config case/hf",),
        _golden("megatron_dist_tp2", cut={"__0_0.distcp": 2000, "__1_0.distcp": 0}),
    ),
    "megatron_error_unfinished": (
        ("unshard merge case/ckpt OUT --config case/hf",),
        _golden("megatron_dist_tp2", "metadata.json", "common.pt"),
    ),
}
