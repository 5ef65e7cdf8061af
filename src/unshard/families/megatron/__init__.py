"""Megatron's names and layouts, translated into those of Hugging Face files by the rules that families have as data."""

from unshard.families.megatron.configuration import Derived, derive_config
from unshard.families.megatron.translation import Translation, translate

__all__ = ["Derived", "Translation", "derive_config", "translate"]
