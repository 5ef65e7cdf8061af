"""Megatron's names and layouts, translated into those of Hugging Face files by the rules that families have as data."""
