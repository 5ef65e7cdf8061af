"""Write golden checkpoints of DeepSpeed's other parallelisms: `python -m golden.make.deepspeed.parallel` in `tests/`.

Experts (`MoE`), pipelines (`PipelineModule`), tensor parallelism (AutoTP), and Megatron-DeepSpeed, whose modules are
imitated by their names and shapes: DeepSpeed shards, trains for a step and saves. Options as of
`golden.make.deepspeed`.
"""

from __future__ import annotations

import os

import torch

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

import deepspeed
from golden.make.command import make_parser, write_cases
from golden.make.models import make_model, save_side_files
from golden.make.ranks import run_ranks
from golden_set import Run

_PACKAGES = ("torch", "transformers", "deepspeed", "safetensors")
_STORED = ("--weights-only",)
_LOW = ("--weights", "model")
_HF = ("--config", "{case}/hf")

State = dict[str, torch.Tensor]
Trained = tuple[State, State]
"""Masters in fp32, and what the layers compute with, of one rank."""


@dataclass(frozen=True)
class ParallelCase:
    """A job in miniature. `kind`: a key of `_JOBS`; `expert`, `tensor`, `pipeline`: how many ranks of each kind."""

    name: str
    about: str
    kind: str
    world: int
    stage: int = 1
    model: str = ""
    dtype: str = "bf16"
    tied: bool = False
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    options: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str = "ckpt"
    seed: int = 0

    def all_runs(self) -> tuple[Run, ...]:
        """The masters, and the model's own weights."""
        return Run(self.options), Run((*self.options, *_LOW), model="truth16")


CASES = (
    ParallelCase("deepspeed_moe_w3", "experts on every rank", "moe", 3, stage=2, options=_STORED),
    ParallelCase("deepspeed_moe_ep2_w4", "experts over two ranks, twice", "moe", 4, expert=2, options=_STORED),
    ParallelCase(
        "deepspeed_moe_ep2_w4_data_first",
        "the same in the other order of ranks",
        "moe",
        4,
        stage=2,
        expert=2,
        options=_STORED,
        config={"use_data_before_expert_parallelism": True},
    ),
    ParallelCase("deepspeed_pipeline_pp2", "layers of transformers", "pipeline", 2, model="small_qwen3", pipeline=2),
    ParallelCase(
        "deepspeed_pipeline_pp2_tied_w4",
        "a tied embedding on two stages, two data-parallel ranks",
        "pipeline",
        4,
        model="small_qwen3",
        tied=True,
        pipeline=2,
    ),
    ParallelCase("deepspeed_autotp_tp2", "uneven shards", "autotp", 2, model="small_qwen2", tensor=2),
    ParallelCase(
        "deepspeed_autotp_tp2_w4", "two data-parallel ranks", "autotp", 4, stage=2, model="small_llama", tensor=2
    ),
    ParallelCase(
        "deepspeed_megatron_tp2pp2",
        "Megatron-DeepSpeed's GPTModelPipe, imitated",
        "megatron",
        4,
        model="even_llama",
        tensor=2,
        pipeline=2,
        options=_HF,
    ),
    ParallelCase(
        "deepspeed_megatron_tp2pp2_tied",
        "the same with a tied embedding",
        "megatron",
        4,
        model="even_llama",
        tied=True,
        tensor=2,
        pipeline=2,
        options=_HF,
    ),
)


def write_parallel_case(case: ParallelCase, directory: Path) -> None:
    """Write `ckpt/`, `truth/` (masters) and `truth16/`."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    model = None
    if case.model:
        model = make_model(case.model, dtype="fp32", tied=case.tied, task="causal", seed=case.seed)
    if model is not None:
        model.config.dtype = None  # there are two truths, of different types
        save_side_files(model, directory / ("hf" if case.kind == "megatron" else "ckpt"))
    run_ranks(_run_rank, case.world, model, case, directory)
    for script in directory.rglob("zero_to_*.py"):
        script.unlink()


def _run_rank(rank: int, model: Any, case: ParallelCase, directory: Path) -> None:
    deepspeed.init_distributed("gloo")  # pipelines and layouts of ranks ask for it before `initialize`
    masters, low = _JOBS[case.kind](rank, model, case, directory / "ckpt")
    everyone: list[Any] = [None] * case.world
    dist.all_gather_object(everyone, (masters, low))
    if rank == 0:
        for place, name in enumerate(("truth", "truth16")):
            whole = _WHOLE[case.kind]([held[place] for held in everyone], case)
            (directory / name).mkdir()
            whole = {key: value.contiguous().clone() for key, value in whole.items()}
            save_file(whole, directory / name / "model.safetensors", metadata={"format": "pt"})
            if model is not None:
                model.config.save_pretrained(directory / name)


def _config(case: ParallelCase, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": case.stage},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        case.dtype: {"enabled": True},
        **case.config,
        **more,
    }


def _take(module: nn.Module) -> Trained:
    """What this rank holds, by its own names."""
    masters, low = {}, {}
    for name, parameter in module.named_parameters():
        low[name] = parameter.detach().clone()
        masters[name] = safe_get_full_fp32_param(parameter).detach().clone().reshape(parameter.shape)
        if not torch.equal(masters[name].to(low[name].dtype), low[name]):
            raise AssertionError(f"{name}: the master is not that of the parameter")
    return masters, low


# Experts --------------------------------------------------------------------------------------------------------------

_EXPERTS = 4


class _Sparse(nn.Module):
    """Two MoE layers between dense ones."""

    def __init__(self, expert_ranks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.layers = nn.ModuleList(
            [
                MoE(
                    4,
                    nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)),
                    num_experts=_EXPERTS,
                    ep_size=expert_ranks,
                    min_capacity=4,
                )
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(4, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return self.head(hidden).float().pow(2).mean()


def _train_experts(rank: int, _model: Any, case: ParallelCase, checkpoint: Path) -> Trained:
    torch.manual_seed(case.seed + rank)  # experts of different ranks must differ
    model = _Sparse(case.expert)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*model.parameters()], "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=_config(case))
    engine.backward(engine(torch.randint(0, 11, (1, 12))))
    engine.step()
    engine.save_checkpoint(str(checkpoint))
    module = engine.module.layers[0].deepspeed_moe
    first = dist.get_rank(group=module.ep_group) * (_EXPERTS // case.expert)
    renamed = [{_global_expert(name, first): value for name, value in held.items()} for held in _take(engine.module)]
    return renamed[0], renamed[1]


def _global_expert(name: str, first: int) -> str:
    before, found, rest = name.partition("deepspeed_experts.")
    number, _, inner = rest.partition(".")
    return f"{before}{found}{first + int(number)}.{inner}" if found else name


def _join_experts(held: list[State], _case: ParallelCase) -> State:
    whole: State = {}
    for state in held:
        for name, value in state.items():
            if not torch.equal(whole.setdefault(name, value), value):
                raise AssertionError(f"{name} differs between ranks")
    return whole


# Pipelines ------------------------------------------------------------------------------------------------------------


class _Block(Qwen3DecoderLayer):
    """A layer of transformers whose only input is the hidden states."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        self._rotary = [Qwen3RotaryEmbedding(config)]  # in a list: no module of this one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])[None]
        result = super().forward(hidden, position_embeddings=self._rotary[0](hidden, positions))
        return result[0] if isinstance(result, tuple) else result


def _logits(embedding: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.weight.t()


def _identity(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def _train_pipeline(_rank: int, model: Any, case: ParallelCase, checkpoint: Path) -> Trained:
    config, embed = model.config, (nn.Embedding, model.config.vocab_size, model.config.hidden_size)
    config._attn_implementation = "eager"
    layers: list[Any] = [TiedLayerSpec("embed", *embed) if case.tied else LayerSpec(*embed), _identity]
    layers += [LayerSpec(_Block, config, number) for number in range(config.num_hidden_layers)]
    layers.append(LayerSpec(Qwen3RMSNorm, config.hidden_size))
    if case.tied:
        layers.append(TiedLayerSpec("embed", *embed, forward_fn=_logits))
    else:
        layers.append(LayerSpec(nn.Linear, config.hidden_size, config.vocab_size, bias=False))
    pipe = PipelineModule(
        layers,
        num_stages=case.pipeline,
        loss_fn=lambda logits, _: logits.float().pow(2).mean(),
        partition_method="uniform",
    )
    names = _pipeline_names(pipe, config.num_hidden_layers)
    start = model.state_dict()
    with torch.no_grad():
        for name, parameter in pipe.named_parameters():
            parameter.copy_(start[names[name]])
    engine, *_ = deepspeed.initialize(
        model=pipe, optimizer=torch.optim.AdamW(pipe.parameters(), lr=1e-2), config=_config(case)
    )
    torch.manual_seed(case.seed)
    tokens = torch.randint(3, 17, (1, 12))
    engine.train_batch(iter([(tokens, tokens)]))
    engine.save_checkpoint(str(checkpoint))
    renamed = [{names[name]: value for name, value in held.items()} for held in _take(engine.module)]
    return renamed[0], renamed[1]


def _pipeline_names(pipe: PipelineModule, blocks: int) -> dict[str, str]:
    """The engine's names of this stage's parameters → the model's."""
    ends = {"0.weight": "model.embed_tokens.weight", "tied_modules.embed.weight": "model.embed_tokens.weight"}
    ends |= {f"{blocks + 2}.weight": "model.norm.weight", f"{blocks + 3}.weight": "lm_head.weight"}
    names = {}
    for name, _ in pipe.named_parameters():
        number, _, inner = name.partition(".")
        names[name] = ends.get(name) or f"model.layers.{int(number) - 2}.{inner}"
    return names


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def _train_autotp(_rank: int, model: Any, case: ParallelCase, checkpoint: Path) -> Trained:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config = _config(case, tensor_parallel={"autotp_size": case.tensor}, optimizer=optimizer)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(case.seed)
    engine.backward(engine(input_ids=torch.randint(3, 17, (1, 12))).logits.float().pow(2).mean())
    engine.step()
    engine.save_checkpoint(str(checkpoint))
    return _take(engine.module)


def _join_autotp(held: list[State], case: ParallelCase) -> State:
    """Rows of what projects into heads, widths and the vocabulary; columns of what projects back; all else is whole."""
    whole = {}
    for name, first in held[0].items():
        shards = [state[name] for state in held[: case.tensor]]
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")):
            whole[name] = torch.cat(shards, 0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            whole[name] = torch.cat(shards, 1)
        else:
            whole[name] = first
    return whole


# Megatron-DeepSpeed ---------------------------------------------------------------------------------------------------

_PADDED = 32


class _Named(nn.Module):
    """Parameters under names with dots."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in parameters.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    setattr(module, part, nn.Module())
                module = getattr(module, part)
            setattr(module, last, nn.Parameter(value.clone()))

    @property
    def word_embeddings_weight(self) -> Any:
        """What the engine sums the gradients of."""
        return self.word_embeddings.weight


def _save_megatron(rank: int, model: Any, case: ParallelCase, checkpoint: Path) -> Trained:
    """No step is taken, for the modules compute nothing: the masters are made to differ from the parameters."""
    topology = PipeModelDataParallelTopology(
        num_pp=case.pipeline, num_mp=case.tensor, num_dp=case.world // case.pipeline // case.tensor
    )
    tensor = topology.get_coord(rank).model
    shards = [{name: _cut(name, value, tensor, case) for name, value in layer.items()} for layer in _layers(model)]
    embed, *blocks, norm, head = [(_Named, shard) for shard in shards]
    layers: list[Any] = [_identity]
    tie = {"tied_weight_attr": "word_embeddings_weight"}
    layers.append(TiedLayerSpec("embed", *embed, **tie) if case.tied else LayerSpec(*embed))
    layers += [LayerSpec(*block) for block in blocks] + [LayerSpec(*norm)]
    layers.append(TiedLayerSpec("embed", *embed, forward_fn=_logits, **tie) if case.tied else LayerSpec(*head))
    layers.append(_identity)
    pipe = PipelineModule(layers, topology=topology, loss_fn=_logits, partition_method="uniform")
    engine, *_ = deepspeed.initialize(
        model=pipe, optimizer=torch.optim.AdamW(pipe.parameters(), lr=1e-2), config=_config(case)
    )
    for partition in engine.optimizer.single_partition_of_fp32_groups:
        partition.data.mul_(1 + 2**-10)
    args = _arguments(model.config, case)
    engine.save_checkpoint(str(checkpoint), client_state={"args": args, "checkpoint_version": 3.0, "iteration": 1})
    low = {name: value.bfloat16() for name, value in model.state_dict().items()}
    low = {name: value for name, value in low.items() if not (case.tied and name == "lm_head.weight")}
    return {name: value.float() * (1 + 2**-10) for name, value in low.items()}, low


def _layers(model: Any) -> Iterator[State]:
    """The whole layers of a Llama under Megatron's names from before megatron-core, padded vocabulary and all."""
    state, config = model.state_dict(), model.config
    groups, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    pad = (0, 0, 0, _PADDED - config.vocab_size)
    yield {"word_embeddings.weight": nn.functional.pad(state["model.embed_tokens.weight"], pad)}
    for number in range(config.num_hidden_layers):
        own = f"model.layers.{number}."
        heads = [state[f"{own}self_attn.{part}_proj.weight"] for part in "qkv"]
        grouped = torch.cat([part.view(groups, -1, size, config.hidden_size) for part in heads], 1)
        gate, up = (state[f"{own}mlp.{part}_proj.weight"] for part in ("gate", "up"))
        yield {
            "input_layernorm.weight": state[f"{own}input_layernorm.weight"],
            "self_attention.query_key_value.weight": grouped.reshape(-1, config.hidden_size),
            "self_attention.dense.weight": state[f"{own}self_attn.o_proj.weight"],
            "post_attention_layernorm.weight": state[f"{own}post_attention_layernorm.weight"],
            "mlp.dense_h_to_4h.weight": torch.stack([gate, up]),
            "mlp.dense_4h_to_h.weight": state[f"{own}mlp.down_proj.weight"],
        }
    yield {"weight": state["model.norm.weight"]}
    yield {"lm_head.weight": nn.functional.pad(state["lm_head.weight"], pad)}


def _cut(name: str, whole: torch.Tensor, rank: int, case: ParallelCase) -> torch.Tensor:
    """One tensor-parallel rank's shard."""
    if whole.dim() == 1:
        return whole
    if name == "mlp.dense_h_to_4h.weight":
        return whole.chunk(case.tensor, 1)[rank].flatten(0, 1)
    return whole.chunk(case.tensor, int(name.endswith(("dense.weight", "4h_to_h.weight"))))[rank]


def _arguments(config: Any, case: ParallelCase) -> Namespace:
    return Namespace(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        padded_vocab_size=_PADDED,
        swiglu=True,
        normalization="rmsnorm",
        untie_embeddings_and_output_weights=not case.tied,
        use_rotary_position_embeddings=True,
        num_experts=[1],
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.pipeline,
    )


def _first(held: list[State], _case: ParallelCase) -> State:
    return held[0]


_JOBS: dict[str, Callable[[int, Any, ParallelCase, Path], Trained]] = {
    "moe": _train_experts,
    "pipeline": _train_pipeline,
    "autotp": _train_autotp,
    "megatron": _save_megatron,
}
_WHOLE: dict[str, Callable[[list[State], ParallelCase], State]] = {
    "moe": _join_experts,
    "pipeline": _join_experts,
    "autotp": _join_autotp,
    "megatron": _first,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    write_cases(make_parser(__doc__).parse_args(), CASES, _PACKAGES, write_parallel_case)
