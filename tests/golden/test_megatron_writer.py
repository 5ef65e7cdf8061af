"""The independent writer of Megatron checkpoints writes what megatron-core wrote: names, boxes, values."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from golden_set import COMMITTED

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402

from golden.make.megatron.families import FAMILIES  # noqa: E402
from megatron.checking import assert_same, read_model  # noqa: E402
from megatron.from_hf import mimo  # noqa: E402
from megatron.writer import write_legacy, write_torch_dist  # noqa: E402

pytestmark = pytest.mark.torch

LEGACY = sorted(path.name for path in COMMITTED.glob("megatron_legacy_*"))
TORCH_DIST = sorted(path.name for path in COMMITTED.glob("megatron_dist_*"))
ITERATION = "iter_0000010"


@pytest.mark.parametrize("name", LEGACY)
def test_ranks(name: str, tmp_path: Path) -> None:
    made, full = _case(name)
    first, last = made["first_layers"], made["last_layers"]
    ours = write_legacy(
        tmp_path,
        full,
        **{key: made[key] for key in ("tp", "pp", "vpp", "ep", "etp", "te")},
        layers=[first, last] if first else None,
        padded_vocab_size=_padded(made, full),
        experts="grouped" if made["grouped"] else "sequential",
        args={},
    )
    theirs = COMMITTED / name / "ckpt" / ITERATION
    files = sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt"))
    assert files == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
    for file in files:
        found, truth = _load(ours / file), _load(theirs / file)
        models = [key for key in truth if key.startswith("model")]
        assert models == [key for key in found if key.startswith("model")]
        for model in models:
            assert_same(_tensors(found[model]), _tensors(truth[model]))


@pytest.mark.parametrize("name", TORCH_DIST)
def test_distributed(name: str, tmp_path: Path) -> None:
    made, full = _case(name)
    ours = write_torch_dist(
        tmp_path,
        full,
        **{key: made[key] for key in ("tp", "etp", "te", "singleton")},
        homogeneous=made["homogeneous"] and not _mixed(full),
        padded_vocab_size=_padded(made, full),
    )
    theirs = COMMITTED / name / "ckpt" / ITERATION
    if not made["grouped"]:  # GroupedMLP saves all experts of a rank in one box
        assert _boxes(ours) == _boxes(theirs)
    assert_same(_load_distributed(ours), _load_distributed(theirs))


def _case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How the case was made, and the whole Megatron tensors of its truth."""
    directory = COMMITTED / name
    made = json.loads((directory / "case.json").read_text())["made"]
    kind = mimo.MiMoConfig if made["model"] == "mimo" else transformers.AutoConfig
    config = kind.from_pretrained(directory / "hf")
    return made, FAMILIES[made["model"]].to_megatron(read_model(directory / "truth"), config)


def _padded(made: dict[str, Any], full: dict[str, Any]) -> int:
    unit = made["pad"] * made["tp"] or 1
    return -(-len(full["embedding.word_embeddings.weight"]) // unit) * unit


def _mixed(full: dict[str, Any]) -> bool:
    """Whether layers differ in kind, so that they cannot be stacked."""
    kinds = {
        frozenset(name.split(".", 3)[3] for name in full if name.startswith(f"decoder.layers.{n}.")) for n in (0, 1)
    }
    return len({kind for kind in kinds if kind}) > 1


def _tensors(state: dict[str, Any]) -> dict[str, Any]:
    """The weights alone: no bytes of `_extra_state`, no counters of tokens."""
    dropped = ("_extra_state", "local_tokens_per_expert", "rotary_pos_emb.inv_freq")
    return {key: value for key, value in state.items() if torch.is_tensor(value) and not key.endswith(dropped)}


def _boxes(directory: Path) -> dict[str, set[Any]]:
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        key: {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
        for key, entry in entries.items()
        if _is_weight(key, entry)
    }


def _is_weight(key: str, entry: Any) -> bool:
    return hasattr(entry, "chunks") and not key.startswith("optimizer.") and "local_tokens" not in key


def _load_distributed(directory: Path) -> dict[str, Any]:
    entries = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if _is_weight(key, entry)
    }
    dcp.load(state, checkpoint_id=str(directory), no_dist=True)
    return state


class _Unpickler(pickle.Unpickler):
    """Reads arguments without Megatron's classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("megatron."):
            return lambda *arguments: arguments
        return super().find_class(module, name)


def _load(path: Path) -> Any:
    lenient = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="pickle")
    return torch.load(path, weights_only=False, pickle_module=lenient)
