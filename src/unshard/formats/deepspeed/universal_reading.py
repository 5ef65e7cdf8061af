"""From the folders of a universal checkpoint, and the model states beside them, to a catalog.

`fp32.pt` holds a dict with the parameter under `param`: whole, and without the rows that pad a vocabulary to the
number of ranks (`vocab_tensor`), if whoever trained declared it. Of ZeRO-3 it holds the flat tensor alone, whose shape
`param_shapes` tells. Which parameters there are, the model states say: of stages 1 and 2 the converter also makes
folders for what was not trained, buffers and second names of shared parameters, from the module's own weights of
tensor rank 0 (`.float()`). These are read from the model states, as those of ZeRO-3 must be.

Source: DeepSpeed `checkpoint/ds_to_universal.py` (`merge_tp_slices`, `merge_zero3_slices`, `main`).
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from pathlib import Path

from unshard.checkpoint import Checkpoint, Note, Shape
from unshard.errors import FormatError, IncompleteError, NotACheckpointError, UnshardError, command_line, raise_all
from unshard.formats.contract import Source
from unshard.formats.deepspeed.account import Account
from unshard.formats.deepspeed.experts import is_expert
from unshard.formats.deepspeed.files import File, TagFiles, find_files
from unshard.formats.deepspeed.gathering import read_first_states
from unshard.formats.deepspeed.megatron_args import read_args
from unshard.formats.deepspeed.model_parallel import WholeModel, join_model, missing_ranks
from unshard.formats.deepspeed.modules import read_module
from unshard.formats.deepspeed.states import ModelStates
from unshard.formats.deepspeed.universal import LATEST_UNIVERSAL, MASTER, ZERO, lost_place, place_of, pointer_in
from unshard.formats.deepspeed.weights import ModuleWeights, same_parameters, second_names
from unshard.formats.state_dict import read_whole, what_it_is
from unshard.formats.surroundings import look_around
from unshard.formats.torch_file import StoredTensor, read_torch_file
from unshard.tensors import SourceFile, Tensor
from unshard.words import count_in_words, items_in_lines, items_in_words, names_in_words

_PARENTS = 2
"""How far above the directory a config may lie, as with the tag that it was made from."""
_MAX_FOLDERS = 500_000
_LOW = {"BF16": "bf16", "F16": "fp16"}
_PIPELINE = re.compile(r"\d+\..+|tied_modules\..+")
_ORIGINAL = "read the checkpoint that it was made from: unshard inspect DIR"
_AGAIN = "fetch the directory again, or convert the checkpoint again; or read the one that it was made from"


def read_universal(source: Source) -> Checkpoint:
    """The catalog of the universal checkpoint at `source`.

    Raises what is wrong where no model states can be read; NotACheckpointError where the tag that is named is not
    there.
    """
    lost = lost_place(source.path)
    if lost is not None:
        raise _not_there(*lost)
    place = (place_of(source.path) or source.path).absolute()
    roots = source.roots if source.path.is_dir() else {**source.roots, "source": place}
    files = find_files(roots, place.name)
    account = Account()
    if place.parent == source.path.absolute():
        account.notes.append(Note(f"`{pointer_in(source.path)}` names {place.name}"))
    states = read_first_states(files, account.problems)
    if not states:
        raise_all(account.problems or [_no_states(place)])
    account.problems += [] if account.problems else missing_ranks(states)
    whole = _Reader(source, files, states, account).read(_find_masters(roots, place.name))
    around = look_around([place, *source.also], _PARENTS)
    return Checkpoint(
        format="deepspeed_universal",
        title=account.title(states[min(states)].step, has_layers=False) + ", universal",
        roots={**roots, **(around.roots or {})},
        tensors=whole.tensors,
        config=around.config,
        assets=around.assets,
        adapter=around.adapter,
        dialect=whole.dialect,
        facts=whole.facts,
        weights=account.taken,
        excluded=account.excluded,
        notes=(*whole.notes, *_notes(account)),
        problems=(*account.problems, *around.problems),
    )


def _find_masters(roots: Mapping[str, Path], tag: str) -> dict[str, File | None]:
    """Parameter → its `fp32.pt`, None where its folder has none. A root may be the tag, or have it below."""
    found: dict[str, File | None] = {}
    for root, directory in roots.items():
        for prefix in (f"{ZERO}/", f"{tag}/{ZERO}/"):
            folder = directory / prefix
            names = [entry.name for entry in islice(os.scandir(folder), _MAX_FOLDERS)] if folder.is_dir() else []
            for name in sorted([name for name in names if (folder / name).is_dir()]):
                path = folder / name / MASTER
                there = File(path, SourceFile(root, f"{prefix}{name}/{MASTER}")) if path.is_file() else None
                found[name] = found.get(name) or there
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Puts masters, and what has none, together; what is found and what is wrong goes to `account`.

    states: by model-parallel rank, the model states of its first data-parallel rank.
    cut:    shapes of masters without the rows that pad a vocabulary.
    """

    source: Source
    files: TagFiles
    states: Mapping[int, ModelStates]
    account: Account
    cut: set[Shape] = field(default_factory=set)

    def read(self, files: Mapping[str, File | None]) -> WholeModel:
        """The model; `files`: those of the masters."""
        account, first = self.account, self.states[min(self.states)]
        account.stage, account.taken = first.stage, self.source.weights
        account.problems += _refuse_names(self.states.values())
        weights = {
            rank: read_module(self.files, states, rank, states.stage, None, account)
            for rank, states in self.states.items()
        }
        module = self._join(self.files, self.states, {rank: held.stored for rank, held in weights.items()})
        own, shared = weights[min(weights)], same_parameters(first)
        if account.taken == "model" and first.stage < 3:
            return self._in_order(module, module.tensors, own, shared)
        account.problems += [*_refuse_undeclared(self.states), *_refuse_round_robin(first)]
        masters = self._read_masters(files, {name for held in weights.values() for name in held.order})
        if account.taken == "model":
            masters = {name: own.round(tensor) for name, tensor in masters.items()}
        whole = self._join(TagFiles(), {0: self._with_rows_as_cut(first)}, {0: masters})
        if len(self.states) > 1:
            account.problems += self._compare(whole.tensors, module.tensors)
        having = {*whole.tensors, *[name for name, other in shared.items() if other in whole.tensors]}
        beside = {name: tensor for name, tensor in module.tensors.items() if name not in having}
        if account.taken == "master":
            beside = account.widened.widen(beside, (), first.buffers)
        return self._in_order(whole, beside | dict(whole.tensors), own, shared)

    def _join(
        self, files: TagFiles, states: Mapping[int, ModelStates], held: Mapping[int, Mapping[str, Tensor]]
    ) -> WholeModel:
        return join_model(self.source, files, states, held, self.account.widened.widen, self.account.problems)

    def _with_rows_as_cut(self, states: ModelStates) -> ModelStates:
        """The same, without what was recorded of a vocabulary's padding where the masters have none."""
        facts = read_args(states.recorded.get("args"))
        if not self.cut or facts.pop("padded_vocab_size", None) is None:
            return states
        return replace(states, recorded={**states.recorded, "args": facts})

    def _read_masters(self, files: Mapping[str, File | None], known: Collection[str]) -> dict[str, Tensor]:
        """The masters of all trained parameters; `known`: all names in the model states."""
        shapes: dict[str, list[Shape]] = defaultdict(list)
        for states in self.states.values():
            for group in states.groups or ():
                for name, shape in group.items():
                    shapes[name].append(shape)
        self.account.problems += _without_file(shapes, files)
        self.account.problems += _unknown([name for name in files if name not in known and name not in shapes])
        masters: dict[str, Tensor] = {}
        wrong: list[str] = []
        for name, held in shapes.items():
            file = files.get(name)
            if file is None:
                continue
            try:
                tensor, is_cut = _read_master(file, name, held)
            except FormatError as error:
                self.account.problems.append(error)
                continue
            if not _fits(tensor.shape, held, is_cut=is_cut):
                wrong.append(f"{name}: {list(tensor.shape)}, but {_in_words(held)} in the model states")
            masters[name] = tensor
            self.cut.update([tensor.shape] if is_cut else [])
        self.account.problems += _misfits(wrong)
        self.account.mastered = len(masters)
        return masters

    def _compare(self, masters: Mapping[str, Tensor], module: Mapping[str, Tensor]) -> Iterator[UnshardError]:
        """A problem where the converter put the ranks' shards together in another way than the model states declare."""
        wrong = []
        for name, tensor in masters.items():
            other = module.get(name)
            if other is not None and not _fits(tensor.shape, [other.shape], is_cut=tensor.shape in self.cut):
                wrong.append(f"{name}: {list(tensor.shape)}, but {list(other.shape)} by the shards of the ranks")
        return _misfits(wrong)

    def _in_order(
        self, whole: WholeModel, tensors: Mapping[str, Tensor], own: ModuleWeights, shared: Mapping[str, str]
    ) -> WholeModel:
        """`whole` with these tensors in the order of the module; second names get the tensor of the other."""
        named = own.in_order(tensors, shared)
        lost, left_out = own.without_values(named, shared)
        self.account.notes += second_names(left_out)
        if lost and not self.account.problems:
            self.account.problems.append(_no_values(lost))
        return replace(whole, tensors=named)


def _notes(account: Account) -> Iterator[Note]:
    if account.taken == "model":
        yield from account.lines()
        return
    low = " and ".join([word for kind, word in _LOW.items() if account.kinds[kind]])
    masters = f"fp32 masters of {count_in_words(account.mastered, 'parameter')}, whole, as the converter joined them"
    yield Note(masters + (f"; --weights model takes the {low} weights" if low else ""))
    yield from account.widened.note()
    yield from account.notes


def _read_master(file: File, name: str, shapes: Sequence[Shape]) -> tuple[Tensor, bool]:
    """The parameter in a `fp32.pt`, and whether the converter cut its vocabulary.

    shapes: those that the model-parallel ranks recorded. Raises FormatError for a file that holds no parameter.
    """
    root = read_torch_file(file.path, file.name).root
    value = root.get("param") if isinstance(root, Mapping) else root
    if not isinstance(value, StoredTensor):
        raise FormatError(f"{file.name}: holds {what_it_is(root)}, not a parameter", hint=_AGAIN)
    try:
        tensor = Tensor(name, value.dtype, value.shape, read_whole(value, None))
    except FormatError as error:
        raise FormatError(f"{file.name}: holds {error.message}", hint=error.hint) from error
    if isinstance(root, Mapping):
        return tensor, root.get("vocab_tensor") is True and tensor.ndim == 2
    is_flat = len(shapes) == 1 and tensor.ndim == 1 and tensor.size == prod(shapes[0])
    return tensor.reshape(shapes[0]) if is_flat else tensor, False


def _fits(found: Shape, shapes: Sequence[Shape], *, is_cut: bool) -> bool:
    """Whether a whole parameter may have this shape, where model-parallel ranks have those; one rank has the whole.

    is_cut: it has fewer rows than the ranks have.
    """
    if any(len(shape) != len(found) for shape in shapes):
        return False
    first = 1 if is_cut else 0
    least = [max(sizes) for sizes in zip(*shapes, strict=True)][first:]
    if len(shapes) > 1:
        return all(size >= small for size, small in zip(found[first:], least, strict=True))
    return list(found[first:]) == least and (not is_cut or found[0] <= shapes[0][0])


def _in_words(shapes: Sequence[Shape]) -> str:
    return " and ".join([str(list(shape)) for shape in dict.fromkeys(shapes)])


def _refuse_names(states: Iterable[ModelStates]) -> Iterator[UnshardError]:
    """Problems where names of masters mean nothing without files that the converter leaves out."""
    names = dict.fromkeys([name for state in states for group in state.groups or () for name in group])
    for what, found in (
        ("layers of a pipeline module", [name for name in names if _PIPELINE.fullmatch(name)]),
        ("experts of MoE layers", [name for name in names if is_expert(name)]),
    ):
        if found:
            yield FormatError(
                f"a universal checkpoint with {what} ({names_in_words(found)}) is not read: the converter leaves out "
                "the files that tell which they are",
                hint=_ORIGINAL,
            )


def _refuse_undeclared(states: Mapping[int, ModelStates]) -> Iterator[UnshardError]:
    """A problem where tensor-parallel ranks declare nothing.

    Told to go on (`--inject_missing_state`), the converter puts all their shards one behind the other along axis 0.
    """
    if len(states) > 1 and not all(one.recorded.get("universal_checkpoint_info") for one in states.values()):
        yield FormatError(
            f"{len(states)} model-parallel ranks without universal_checkpoint_info: what ds_to_universal made of their "
            "shards is a guess, wrong for most models",
            hint=_ORIGINAL,
        )


def _refuse_round_robin(states: ModelStates) -> Iterator[UnshardError]:
    """A problem where the converter cut the partitions in the wrong places.

    It goes by `param_slice_mappings`, which has the parameters in the model's order; dealt out to several ranks in turn
    (`round_robin_gradients`), they lie in another.
    """
    zero = states.config.get("zero_optimization")
    is_round_robin = isinstance(zero, Mapping) and zero.get("round_robin_gradients")
    if is_round_robin and states.stage < 3 and states.recorded.get("dp_world_size") != 1:
        yield FormatError(
            "the run had `round_robin_gradients`, under which ds_to_universal takes parameters for one another: the "
            "values in the folders are not those of the parameters they are named for",
            hint=f"{_ORIGINAL}; or take the module's own weights: --weights model",
        )


def _without_file(shapes: Iterable[str], files: Mapping[str, File | None]) -> Iterator[UnshardError]:
    names = list(shapes)
    if not names:
        yield IncompleteError(
            "the model states name no parameters that have masters (`param_shapes`)",
            hint="--weights model takes the module's own weights",
        )
    missing = [f"{ZERO}/{name}/{MASTER}" for name in names if files.get(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        yield IncompleteError(
            f"{len(missing):,} of {count_in_words(len(names), 'file')} of masters {are} missing:\n"
            + items_in_lines(missing),
            hint=_AGAIN,
        )


def _unknown(names: Sequence[str]) -> Iterator[UnshardError]:
    if names:
        yield IncompleteError(
            f"{ZERO}/ has folders of parameters that the model states do not know: {names_in_words(names)}",
            hint="the folders and the model states must be of one conversion: fetch them again",
        )


def _misfits(wrong: Sequence[str]) -> Iterator[UnshardError]:
    if wrong:
        yield IncompleteError(f"masters of shapes that do not fit:\n{items_in_lines(wrong)}", hint=_AGAIN)


def _no_values(names: Sequence[str]) -> UnshardError:
    return IncompleteError(
        f"the model states have placeholders of shape [0] for these, and no folder in {ZERO}/ has their values:\n"
        + items_in_lines(names),
        hint=_AGAIN,
    )


def _not_there(named: Path, there: Sequence[Path]) -> UnshardError:
    return NotACheckpointError(
        f"{named.parent / LATEST_UNIVERSAL} says that {named.name} is the latest tag, but no such directory is there; "
        f"there {'is' if len(there) == 1 else 'are'} {items_in_words([place.name for place in there])}",
        hint="name a tag that is there: " + command_line("unshard", "inspect", there[-1]),
    )


def _no_states(place: Path) -> UnshardError:
    return IncompleteError(
        f"{place}: names, shapes and buffers lie in files of model states, of which none is here",
        hint=f"fetch `*mp_rank_*_model_states.pt` too: {command_line('ls', place)}",
    )
