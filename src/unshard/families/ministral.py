"""Ministral: Mistral with a window over some of its layers."""

from dataclasses import replace

from unshard.families import mistral

FAMILY = replace(mistral.FAMILY, model_type="ministral", prefix="Ministral")
