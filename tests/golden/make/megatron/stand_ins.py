"""What lets megatron-core run on a machine without CUDA, TransformerEngine and flash-linear-attention.

TransformerEngine's layers are imitated by few lines each: the names of their parameters and what they compute. All
else, the layer specs and the modules of the checkpoints' keys, is megatron-core's own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import random as tensor_parallel_random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def stand_in() -> None:
    """Put the stand-ins into torch and megatron-core, for the rest of the process."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    tensor_parallel_random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):  # megatron-core 0.16.1 forgets the name without TransformerEngine
        moe_utils.te_general_gemm = None
    experts.gg.assert_grouped_gemm_is_available = lambda: None  # the module is built, and never run
    gpt_layer_specs.TESpecProvider = TransformerEngineProvider
    gpt_layer_specs.TENorm = Norm
    multi_latent_attention.TELinear = DuplicatedLinear
    experimental_attention_variant_module_specs._get_backend_spec_provider = lambda **_: TransformerEngineProvider()
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class Norm(torch.nn.Module):
    """RMSNorm, its weight centred at zero where the config says so."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.eps, self.zero_centred = eps, config.layernorm_zero_centered_gamma

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return _rms_norm(hidden, self.weight, self.eps, self.zero_centred)


class NormedColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel layer with the norm before it, as TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))

    def forward(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Normalise, then project."""
        centred = self.config.layernorm_zero_centered_gamma
        hidden = _rms_norm(hidden, self.layer_norm_weight, self.config.layernorm_epsilon, centred)
        return super().forward(hidden, *arguments, **options)


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool) -> torch.Tensor:
    whole = weight + 1 if zero_centred else weight
    return F.rms_norm(hidden, (hidden.shape[-1],), whole, eps)


class PostNormedRowParallelLinear(RowParallelLinear):
    """A row-parallel layer with a norm behind it, as Megatron-Bridge's TERowParallelLinearLayerNorm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = Norm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Project, then normalise."""
        output, bias = super().forward(hidden)
        return self.post_layernorm(output), bias


def add_post_norms(block: TransformerBlockSubmodules) -> None:
    """Put norms behind attention and MLP, as Megatron-Bridge does for Gemma."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.linear_proj = PostNormedRowParallelLinear
        layer.submodules.mlp.submodules.linear_fc2 = PostNormedRowParallelLinear


class Attention(DotProductAttention):
    """The local attention, for heads whose values have another size than their keys as well."""

    def __init__(
        self, config: Any, *arguments: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> None:
        super().__init__(config, *arguments, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if k_channels is not None and options.get("softmax_scale") is None:
            self.softmax_scale = k_channels**-0.5


class DuplicatedLinear(torch.nn.Linear):
    """A layer that every rank holds whole, as TELinear in its mode "duplicated"."""

    def __init__(self, input_size: int, output_size: int, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        """Project; megatron-core's layers return a bias too."""
        return super().forward(hidden), None


class TransformerEngineProvider(LocalSpecProvider):
    """The modules of the TransformerEngine spec, for what megatron-core asks of a provider."""

    def linear(self) -> type:
        """A layer without parallelism."""
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        """As in the local spec."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """As in the local spec."""
        return RowParallelLinear

    def core_attention(self) -> type:
        """What TEDotProductAttention computes."""
        return Attention

    def fuse_layernorm_and_linear(self) -> bool:
        """Norms are parts of the layers behind them."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and layer in one."""
        return NormedColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """The norm where it stands alone."""
        return Norm
