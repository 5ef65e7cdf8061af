"""The table of Megatron's golden checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from golden_set import Run

_CONFIG = ("--config", "{case}/hf")


@dataclass(frozen=True)
class MegatronCase:
    """A training job of megatron-core in miniature.

    model:    a key of `families.FAMILIES`.
    te:       the spec of TransformerEngine (with stand-ins for its modules), else the local one.
    grouped:  GroupedMLP, which keeps all experts in the memory of two parameters.
    mtp:      the number of layers that predict further tokens.
    etp:      tensor parallelism of the experts; None: as `tp`.
    pad:      the vocabulary is padded to a multiple of `pad * tp` rows.
    first_layers, last_layers: those of an uneven pipeline.
    format:   "legacy" (`mp_rank_*`) or "torch_dist".
    homogeneous, singleton: how torch_dist names layers, experts, gates.
    optimizer: an optimizer's state beside the model.
    """

    name: str
    about: str
    model: str = "llama"
    layers: int = 2
    dtype: str = "bf16"
    tied: bool = False
    te: bool = False
    grouped: bool = False
    mtp: int = 0
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    pad: int = 0
    first_layers: int | None = None
    last_layers: int | None = None
    format: Literal["legacy", "torch_dist"] = "legacy"
    homogeneous: bool = True
    singleton: bool = False
    optimizer: bool = False
    source: str = "ckpt"
    seed: int = 0
    runs: tuple[Run, ...] = field(default=(Run(_CONFIG),))

    @property
    def world(self) -> int:
        """The number of ranks: those of one pipeline stage must be shared by experts as well."""
        stage = self.tp * self.dp
        experts = self.ep * (self.etp or self.tp)
        while stage % experts:
            stage += self.tp
        return stage * self.pp

    def padded(self, vocabulary: int) -> int:
        """The rows of the embedding."""
        unit = self.pad * self.tp or 1
        return -(-vocabulary // unit) * unit

    def all_runs(self) -> tuple[Run, ...]:
        """What is typed, and what must come of it."""
        return self.runs


def _dist(name: str, about: str, model: str = "llama", **facts: Any) -> MegatronCase:
    return MegatronCase(f"megatron_dist_{name}", about, model, format="torch_dist", **facts)


def _legacy(name: str, about: str, model: str = "llama", **facts: Any) -> MegatronCase:
    return MegatronCase(f"megatron_legacy_{name}", about, model, **facts)


LEGACY = (
    _legacy("tp2", "tensor parallel, an optimizer beside the model", layers=1, tp=2, optimizer=True),
    _legacy("tp2pp2", "tensor and pipeline parallel", tp=2, pp=2, te=True),
    _legacy("pp2_uneven", "two layers, then one", pp=2, layers=3, first_layers=2, last_layers=1, te=True),
    _legacy("pp2vpp2", "virtual stages, q/k norms", "qwen3", layers=4, pp=2, vpp=2, te=True),
    _legacy("tp2_tied_pad", "tied, biases, a padded vocabulary", "qwen2", tp=2, tied=True, pad=16),
    _legacy("pp2_tied", "tied: the last stage has a copy", "qwen2", pp=2, tied=True, te=True),
    _legacy("tp2_fp16", "heads of a size of their own", "mistral", tp=2, dtype="fp16"),
    _legacy("ep2", "experts on two ranks", "qwen3_moe", layers=1, ep=2),
    _legacy("tp2ep2etp1", "dense parts cut, experts whole", "mixtral", layers=1, tp=2, ep=2, etp=1),
    _legacy("tp2pp2ep2", "all at once", "mixtral", tp=2, pp=2, ep=2, te=True),
    _legacy(
        "grouped_tp2ep2",
        "GroupedMLP: experts in the memory of one parameter",
        "mixtral",
        layers=1,
        tp=2,
        ep=2,
        grouped=True,
    ),
)

TORCH_DIST = (
    _dist("tp2", "layers stacked, an optimizer beside the model", tp=2, optimizer=True),
    _dist("pp2vpp2_dp2", "virtual stages, written by both copies", layers=4, pp=2, vpp=2, dp=2, te=True),
    _dist("tp2_tied_pad", "tied, biases, a padded vocabulary", "qwen2", tp=2, tied=True, pad=16),
    _dist("tp2_per_layer", "a key for each layer, q/k norms", "qwen3", tp=2, homogeneous=False),
    _dist("pp2_uneven", "two layers, then one", pp=2, layers=3, first_layers=2, last_layers=1),
    _dist("tp2_singleton", "gate and up under keys of their own", tp=2, te=True, singleton=True),
    _dist("ep2", "experts on two ranks", "qwen3_moe", layers=1, ep=2, te=True),
    _dist(
        "tp2ep2etp1", "dense parts cut, experts whole; the local spec's name of a norm", "mixtral", tp=2, ep=2, etp=1
    ),
    _dist("tp2ep2_per_layer", "experts, a key for each layer", "qwen3_moe", tp=2, ep=2, homogeneous=False, te=True),
    _dist("ep2_singleton", "a key for each expert", "qwen3_moe", layers=1, ep=2, singleton=True),
    _dist("grouped_tp2ep2", "GroupedMLP", "mixtral", layers=1, tp=2, ep=2, grouped=True, te=True),
)

FAMILIES = (
    _legacy("mimo", "MiMo: Qwen2 with a layer of MTP", "mimo", tp=2, mtp=1, te=True),
    _legacy("gemma2", "Gemma 2: norms behind attention and MLP, centred at zero", "gemma2", tp=2, tied=True, te=True),
    _dist("gemma3", "Gemma 3: the same, and q/k norms", "gemma3", tp=2, tied=True, te=True, dtype="fp32"),
    _legacy("qwen3_5", "Qwen3.5: gated delta nets, dense", "qwen3_5", tp=2, te=True, dtype="fp32"),
    _legacy("phi3", "Phi-3", "phi3", tp=2),
    _legacy("qwen2_moe", "Qwen2-MoE: shared experts and their gate", "qwen2_moe", layers=1, tp=2),
    _legacy("deepseek_v2", "DeepSeek-V2: latent attention, dense first", "deepseek_v2", tp=2, te=True),
    _legacy("deepseek_v3", "DeepSeek-V3: routing biases, a layer of MTP", "deepseek_v3", tp=2, ep=2, mtp=1, te=True),
    _dist("deepseek_v3", "DeepSeek-V3: routing biases, a layer of MTP", "deepseek_v3", pp=2, ep=2, mtp=1, te=True),
    _legacy("glm4_moe", "GLM-4.5: biases, q/k norms, a layer of MTP", "glm4_moe", pp=2, mtp=1),
    _legacy("qwen3_next", "Qwen3-Next: gated delta nets, gated attention", "qwen3_next", tp=2, te=True, dtype="fp32"),
    _dist("qwen3_next", "Qwen3-Next: gated delta nets, gated attention", "qwen3_next", tp=2, te=True, dtype="fp32"),
    _legacy("gpt_oss", "gpt-oss: sinks, biases", "gpt_oss", tp=2, ep=2, etp=1),
)

CASES = (*LEGACY, *TORCH_DIST, *FAMILIES)
