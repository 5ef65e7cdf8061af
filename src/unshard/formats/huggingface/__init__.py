"""Hugging Face directories: what they hold, read and laid out."""
