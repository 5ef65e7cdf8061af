"""Ministral 3, the language model alone: Mistral with a head size of its own."""

from dataclasses import replace

from unshard.families import mistral

FAMILY = replace(mistral.FAMILY, model_type="ministral3", prefix="Ministral3", defaults={"head_dim": 128})
