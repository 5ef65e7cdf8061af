"""Which tensors of a training state are the model's: told by the recorded paths, and by names where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from unshard.errors import NotACheckpointError, UsageError
from unshard.formats.dcp.metadata import Outline
from unshard.formats.dcp.roots import Choice, choose_model

MODEL = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
ADAM = ("step", "exp_avg", "exp_avg_sq")
PLACE = Path("run") / "optimizer_0"


def choose(*paths: tuple[str | int, ...], wanted: str | None = None, recorded: bool = True) -> Choice:
    """The choice among tensors of four bytes at these paths, those of groups of parameters being objects."""
    keys = {".".join(map(str, steps)): steps for steps in paths}
    objects = [key for key, steps in keys.items() if "param_groups" in steps]
    tensors = {key: 4 for key in keys if key not in objects}
    return choose_model(Outline(tensors, objects, keys if recorded else {}), PLACE, wanted)


def under(*steps: str | int, names: tuple[str, ...] = MODEL) -> list[tuple[str | int, ...]]:
    return [(*steps, name) for name in names]


def adam(*steps: str) -> list[tuple[str | int, ...]]:
    """What `get_optimizer_state_dict` gives for each parameter."""
    return [(*steps, "state", name, slot) for name in MODEL for slot in ADAM]


def flat_adam(*steps: str) -> list[tuple[str | int, ...]]:
    """The same with `flatten_optimizer_state_dict`, as torchtitan saves it."""
    return [(*steps, f"state.{name}.{slot}") for name in MODEL for slot in ADAM]


ROOTS: Mapping[str, tuple[str | int, ...]] = {
    "nothing around it": (),
    "accelerate": ("model",),
    "PyTorch's tutorial": ("app", "model"),
    "flame": ("state", "model"),
    "Lightning": ("state_dict",),
    "DataParallel": ("module",),
    "a list": ("models", 0),
    "a name of one's own": ("net.main",),
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
@pytest.mark.parametrize("beside", [[], adam("optim"), flat_adam("optimizer"), adam("app", "optimizers")])
def test_the_root_is_what_the_paths_say(root: tuple[str | int, ...], beside: list[tuple[str | int, ...]]) -> None:
    """torch#137327, flame#15, flame#48: keys of several flattenings, `model.model.*` among them."""
    choice = choose(*under(*root), *beside)
    assert choice.model.path == root
    assert tuple(choice.model.names.values()) == MODEL
    assert len(choice.optimizer) == len(beside)
    assert choice.recorded
    assert not choice.models
    assert not choice.other


@pytest.mark.parametrize("name", ["optimizer_0", "optimizers", "optim_state_dict", "OPTIM", "generator_optimizer", "o"])
def test_optimizers_by_name_or_by_what_they_keep(name: str) -> None:
    groups = [(name, "param_groups", 0, "lr")]
    for states in (adam(name), flat_adam(name), [(name, "state", "0", "ax")], [(name, "state", "0", "a.weight")]):
        choice = choose(*under("model"), *states, *groups)
        assert sorted(choice.optimizer) == sorted([".".join(map(str, steps)) for steps in states])
        assert not choice.models
        assert not choice.other


@pytest.mark.parametrize(
    "steps",
    [("lr_scheduler", "last_lr"), ("dataloader", "dp_rank_0"), ("train_state", "step"), ("rng", "cuda.0"), ("step",),
     ("extra_state", "weight"), ("loops", "a.weight"), ("scaler", "scale"), ("random_states", 3, "torch")],
    ids=str,
)  # fmt: skip
def test_other_states_are_no_model(steps: tuple[str | int, ...]) -> None:
    for root in ((), ("model",)):
        if len(steps) > 1 or root:
            choice = choose(*under(*root), steps)
            assert choice.model.path == root
            assert choice.other == [".".join(map(str, steps))]
            assert not choice.models


def test_parameters_that_are_called_like_states_stay() -> None:
    """What a dict of parameters holds is not asked for the names of states: modules may have any."""
    names = ("optimizer.weight", "rng.weight", "state.a.step", "lr_scheduler.bias")
    assert tuple(choose(*under("model", names=names), *adam("optim")).model.names.values()) == names


def test_names_are_the_paths_below_the_root() -> None:
    names = ("_orig_mod.a.weight", "module.a.weight", "model.a.weight", "weight")
    choice = choose(*under("model", names=names))
    assert choice.model.names == {f"model.{name}": name for name in names}


def test_the_main_one_of_several_models() -> None:
    for other in (("ema",), ("model", "teacher"), ("copies", 1)):
        choice = choose(*under("model"), *under(*other))
        assert choice.model.path == ("model",)
        assert [group.path for group in choice.models] == [other]
    choice = choose(*under(), *under("ema"))
    assert choice.model.path == ()
    assert [group.title for group in choice.models] == ["ema"]


SEVERAL: Mapping[str, list[tuple[str | int, ...]]] = {
    "neither is named": [*under("actor"), *under("critic")],
    "both are named": [*under("actor", "model"), *under("critic", "model")],
    "a list": [*under("models", 0), *under("models", 1)],
    "one at the top": [*under(), *under("model")],
}


@pytest.mark.parametrize("paths", SEVERAL.values(), ids=SEVERAL)
def test_several_models_are_listed(paths: list[tuple[str | int, ...]]) -> None:
    with pytest.raises(NotACheckpointError) as caught:
        choose(*paths)
    titles = {".".join(map(str, steps[:-1])) or "." for steps in paths}
    assert "2 models are stored" in caught.value.message
    for title in titles:
        assert f"  {title}: 3 tensors (model.embed_tokens.weight, model.layers.0" in caught.value.message
        choice = choose(*paths, wanted=title)
        assert choice.model.title == title
        assert tuple(choice.model.names.values()) == MODEL
        assert {group.title for group in choice.models} == titles - {title}
    assert "--model-key " in str(caught.value.hint)


def test_what_is_asked_for_is_taken_with_the_dicts_below_it() -> None:
    """A model of two parts, each a dict of its own, is one where a person says so."""
    parts = [*under("net", "encoder", names=("a.weight",)), *under("net", "decoder", names=("a.weight",))]
    with pytest.raises(NotACheckpointError, match=r"net\.encoder"):
        choose(*parts)
    choice = choose(*parts, wanted="net")
    assert choice.model.names == {
        "net.encoder.a.weight": "encoder.a.weight",
        "net.decoder.a.weight": "decoder.a.weight",
    }
    assert choose(*under("net.main"), wanted="net.main").model.path == ("net.main",)


def test_nothing_lies_at_the_place_that_is_asked_for() -> None:
    with pytest.raises(
        UsageError, match=r"`--model-key modle`: nothing lies there in run.optimizer_0; models are\n  mod"
    ):
        choose(*under("model"), wanted="modle")
    with pytest.raises(UsageError, match="leave `--model-key` out"):
        choose(*adam("optim"), wanted="model")


@pytest.mark.parametrize("beside", [[], [("step",)], [("rng", "state")]])
def test_an_optimizer_alone_is_no_model(beside: list[tuple[str | int, ...]]) -> None:
    saved_by_itself = [*adam(), ("param_groups", 0, "lr")]
    for states in (adam("optimizer"), flat_adam("optim"), adam("app", "optim"), saved_by_itself):
        with pytest.raises(NotACheckpointError, match="only the states of an optimizer") as caught:
            choose(*states, *beside)
        assert f"unshard inspect {Path.cwd() / 'run'}" in str(caught.value.hint)


def test_other_states_alone_are_no_model() -> None:
    with pytest.raises(NotACheckpointError, match="no tensor of a model"):
        choose(("dataloader", "state"))


@pytest.mark.parametrize(
    ("prefix", "taken"),
    [
        ("", ""),
        ("model.", "model"),
        ("app.model.", "app.model"),
        ("state.model.", "state.model"),
        ("module.", "module"),
    ],
)
def test_names_alone_where_no_paths_are_recorded(prefix: str, taken: str) -> None:
    own = [(prefix + name,) for name in MODEL]
    states = [(f"optimizer.state.{name}.{slot}",) for name in MODEL for slot in ADAM]
    choice = choose(*own, *states, ("lr_scheduler.last_lr",), recorded=False)
    assert choice.model.names == {prefix + name: name for name in MODEL}
    assert choice.model.title == (taken or ".")
    assert not choice.recorded
    assert len(choice.optimizer) == len(states)
    assert choice.other == ["lr_scheduler.last_lr"]


def test_a_prefix_that_may_be_a_part_of_names_stays() -> None:
    """Of a tied model without its head, all names begin with `model.`, which is its own."""
    names = ("model.embed_tokens.weight", "model.norm.weight")
    choice = choose(*[(name,) for name in names], recorded=False)
    assert tuple(choice.model.names.values()) == names


def test_parameters_that_are_called_like_states_stay_where_no_paths_are_recorded() -> None:
    """`sampler.weight` was left out of models whose writer records no paths, as torch's safetensors writer."""
    names = ("model.norm.weight", "lm_head.weight", "sampler.weight", "extra.proj.bias")
    choice = choose(*[(name,) for name in (*names, "rng.cuda")], recorded=False)
    assert tuple(choice.model.names.values()) == names
    assert choice.other == ["rng.cuda"]
    nested = choose(*[(f"model.{name}",) for name in MODEL], ("extra.weight",), recorded=False)
    assert nested.other == ["extra.weight"]


def test_a_path_that_is_not_its_keys_is_no_path() -> None:
    """Two keys that claim one path would be one name."""
    outline = Outline({"a.weight": 4, "b.weight": 4}, (), {"a.weight": ("model", "x"), "b.weight": ("model", "x")})
    choice = choose_model(outline, PLACE)
    assert choice.model.names == {"a.weight": "a.weight", "b.weight": "b.weight"}


@pytest.mark.parametrize("step", ["optim" + "1" * 60 + "x", "_state" * 12 + "!", "a_" * 30 + "!", "x" * 5_000_000])
def test_names_of_strangers_take_no_time(step: str) -> None:
    """No expression tries the same ending in countless ways."""
    choice = choose((step, "a.weight"))
    assert choice.model.path == (step,)
    assert len(choice.model.title) <= 201
