"""What the frameworks' own converters make of the golden checkpoints: where they are right, unshard's output is theirs.

That unshard's output is the truth, for these cases and all others, is shown by `test_golden.py`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from golden_set import COMMITTED
from unshard.cli import main

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

pytestmark = pytest.mark.torch

State = Mapping[str, Any]


def dcp_to_torch_save(case: Path, scratch: Path) -> State:
    """Torch's converter of DCP; the model's part of the tree that it writes."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(_dcp_directory(case), scratch / "tree.pt")
    tree = torch.load(scratch / "tree.pt", weights_only=True)
    while root := next((name for name in ("app", "state", "model") if isinstance(tree.get(name), dict)), None):
        tree = tree[root]
    return {name: value for name, value in tree.items() if torch.is_tensor(value)}


def merge_fsdp_weights(case: Path, scratch: Path) -> State:
    """Accelerate's, `accelerate merge-weights`."""
    accelerate_utils = pytest.importorskip("accelerate.utils")

    accelerate_utils.merge_fsdp_weights(str(_dcp_directory(case)), str(scratch / "merged"))
    return _load(scratch / "merged")


def consolidate_safetensors_files(case: Path, scratch: Path) -> State:
    """Torch's merger of its HuggingFaceStorageWriter's shards."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as consolidating

    sharded = case / "ckpt" / "sharded"
    shards = sharded if sharded.is_dir() else case / "ckpt"
    (scratch / "consolidated").mkdir()
    mapping = dict.fromkeys(_load(shards), 1)
    consolidating.consolidate_safetensors_files(str(shards), str(scratch / "consolidated"), mapping)
    return _load(scratch / "consolidated")


def zero_to_fp32(case: Path, _scratch: Path) -> State:
    """DeepSpeed's, which it copies into each of its checkpoints."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    converter = pytest.importorskip("deepspeed.utils.zero_to_fp32")

    step = case / "ckpt" / "checkpoint-1"
    found: State = converter.get_fp32_state_dict_from_zero_checkpoint(str(step if step.is_dir() else case / "ckpt"))
    return found


Peer = Callable[[Path, Path], State]

RIGHT: Mapping[Peer, tuple[str, ...]] = {
    dcp_to_torch_save: (
        "dcp_fsdp2",
        "dcp_flat_optimizer",
        "dcp_app",
        "dcp_tp",
        "dcp_empty",
        "dcp_custom_code",
        "dcp_fsdp1_sharded_tensor",
        "dcp_zstd",
    ),
    merge_fsdp_weights: ("accelerate_fsdp1", "accelerate_fsdp2", "accelerate_fsdp2_bf16_tied", "dcp_flat_tied"),
    consolidate_safetensors_files: (
        "hf_shards_w2",
        "hf_shards_consolidated",
        "hf_shards_empty",
        "hf_shards_hsdp",
        "hf_shards_tp",
        "hf_shards_two_files",
        "hf_shards_whole",
    ),
    zero_to_fp32: (
        "deepspeed_z1_fp32_w3",
        "deepspeed_z2_aligned",
        "deepspeed_z2_fp16_w4",
        "deepspeed_z2_fp32_groups",
        "deepspeed_z2_round_robin",
        "deepspeed_z2_tied",
        "deepspeed_z2_trainer",
        "deepspeed_z3_bf16",
        "deepspeed_z3_fp16_groups_w4",
        "deepspeed_z3_sub_groups",
    ),
}

WRONG: Mapping[Peer, Mapping[str, str]] = {
    dcp_to_torch_save: {
        "dcp_rank_metadata": "other values: .*embed_tokens",
        "dcp_safetensors": "CheckpointException",
        "dcp_tp_uneven": "CheckpointException.*mismatch sizes",
    },
    merge_fsdp_weights: {
        "dcp_app": "ValueError: Key `model` is invalid",
        "dcp_flat_optimizer": "ValueError: Key `optimizer` is invalid",
        "accelerate_fsdp2_ranks": "ValueError: .*couldn't find a valid metadata file",
    },
    consolidate_safetensors_files: {
        "hf_shards_custom_code": "TypeError: torch.finfo",
        "hf_shards_tp_uneven": r"other shapes: .*\.mlp\.gate_proj\.weight",
    },
    zero_to_fp32: {
        "deepspeed_autotp_tp2": "ValueError: Expected 1 of .* but found 2 files",
        "deepspeed_moe_ep2_w4": "ValueError: .*expert_0.* is not a model state checkpoint",
        "deepspeed_pipeline_pp2": "AttributeError",
        "deepspeed_z0_bf16": "TypeError",
        "deepspeed_z1_bf16_optimizer": "ValueError: .* is not a zero checkpoint",
        "deepspeed_z2_excluded": r"missing: model\.embed_tokens\.weight$",
        "deepspeed_z2_frozen_buffer": r"other dtypes: .*\.self_attn\.k_proj\.weight",
        "deepspeed_z3_excluded": r"missing: model\.embed_tokens\.weight$",
    },
}
"""What becomes of cases that the peer refuses, or gets wrong without a word."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("peer", "name"), [pytest.param(peer, name, id=name) for peer, names in RIGHT.items() for name in names]
)
def test_a_right_peer_agrees(peer: Peer, name: str, tmp_path: Path) -> None:
    assert main(["merge", str(COMMITTED / name / "ckpt"), str(tmp_path / "output")]) == 0
    ours, theirs = _load(tmp_path / "output"), peer(COMMITTED / name, tmp_path)
    assert _difference(ours, theirs) is None
    tied = {"lm_head.weight"} if "tied" in name else set()
    assert theirs.keys() - ours.keys() == tied, "what the peer has besides"


@pytest.mark.parametrize(
    ("peer", "name", "outcome"),
    [
        pytest.param(peer, name, outcome, id=f"{peer.__name__}-{name}")
        for peer, outcomes in WRONG.items()
        for name, outcome in outcomes.items()
    ],
)
def test_a_peer_that_is_wrong(peer: Peer, name: str, outcome: str, tmp_path: Path) -> None:
    """A test that fails here tells good news of a peer: move the case to RIGHT, and correct the README."""
    raw = COMMITTED / name / "truth_raw"
    truth = _load(raw if raw.is_dir() else COMMITTED / name / "truth")
    try:
        found = _difference(truth, peer(COMMITTED / name, tmp_path))
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        found = f"{type(error).__name__}: {error}"
    assert found is not None
    assert re.search(outcome, found, re.DOTALL)


def _dcp_directory(case: Path) -> Path:
    step = case / "ckpt" / "checkpoint-1"
    return step / "pytorch_model_fsdp_0" if step.is_dir() else case / "ckpt"


def _load(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        state |= safetensors_torch.load_file(path)
    return state


def _difference(truth: State, found: State) -> str | None:
    """What is wrong with `found`, in a few words with the names; None if it holds all of the truth, bit for bit."""
    questions: tuple[tuple[str, Callable[[str], bool]], ...] = (
        ("missing", lambda name: name not in found),
        ("other dtypes", lambda name: found[name].dtype != truth[name].dtype),
        ("other shapes", lambda name: found[name].shape != truth[name].shape),
        ("other values", lambda name: _bytes(found[name]) != _bytes(truth[name])),
    )
    for words, is_wrong in questions:
        if wrong := sorted(filter(is_wrong, truth)):
            return f"{words}: {', '.join(wrong)}"
    return None


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
