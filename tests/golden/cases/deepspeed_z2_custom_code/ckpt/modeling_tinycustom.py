"""A model that no library knows: its code lies beside its weights, as that of many models on the hub does."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class TinyCustomConfig(PretrainedConfig):
    """The sizes of a TinyCustomModel."""

    model_type = "tinycustom"

    def __init__(self, hidden_size: int = 12, vocab_size: int = 67, **rest: object) -> None:
        """Set the sizes, in elements."""
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.auto_map = {
            "AutoConfig": "modeling_tinycustom.TinyCustomConfig",
            "AutoModel": "modeling_tinycustom.TinyCustomModel",
        }
        super().__init__(**rest)


class TinyCustomModel(PreTrainedModel):
    """One linear layer, a scalar, and a persistent buffer of every dtype that quantised and routed models keep."""

    config_class = TinyCustomConfig
    _no_split_modules = ("Linear",)

    def __init__(self, config: TinyCustomConfig) -> None:
        """Make the parameters; the buffers hold a few values each, all different."""
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.linear = nn.Linear(config.hidden_size, config.hidden_size)
        self.temperature = nn.Parameter(torch.ones(1))
        ramp = torch.linspace(-2, 2, 2 * config.hidden_size).reshape(2, -1)
        self.register_buffer("scale_e4m3", ramp.to(torch.float8_e4m3fn))
        self.register_buffer("scale_e5m2", ramp.to(torch.float8_e5m2))
        self.register_buffer("codes", torch.arange(-6, 6, dtype=torch.int8))
        self.register_buffer("mask", torch.arange(config.hidden_size) % 3 == 0)
        self.register_buffer("steps", torch.tensor(2**40 + 1))
        self.register_buffer("inverse", torch.arange(4, dtype=torch.float32) / 3, persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        return

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, length] to hidden states [batch, length, hidden]."""
        return self.linear(self.embed(input_ids)) * self.temperature
