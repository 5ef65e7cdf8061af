"""Kimi K2: DeepSeek V3 under another model type (`modeling_deepseek.py` beside its weights)."""

from dataclasses import replace

from unshard.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, model_type="kimi_k2")
