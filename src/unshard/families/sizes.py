"""What a config.json says about the sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from unshard.errors import ModelError
from unshard.model_config import transformers_version

Default: TypeAlias = "int | bool | str"
"""What a key means where config.json has none: a number, a flag, or an expression over other keys."""


class Sizes:
    """Expressions over the keys of a config.json, worked out without running any code.

    An expression is a sum of chains of factors from left to right: keys or whole numbers, joined by `*` and `//`,
    as in "num_attention_heads*head_dim" or "q_lora_rank+hidden_size//num_attention_heads". A key is looked up in
    `text_config` first, where there is one, then at the top; "vision.depth" is `depth` of `vision_config`,
    "megatron.num_experts" is what training recorded under that name. Null counts as absent, a list as its length.
    Where a key is absent, `given` (what the user said) is asked, then the defaults.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        defaults: Mapping[str, Default] | None = None,
        given: Mapping[str, int | None] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._facts = facts or {}
        self._defaults = defaults or {}
        self._given = given or {}
        self._found: dict[str, int] = {}

    def stored(self, key: str) -> Any:
        """What config.json itself says (or training recorded), or None."""
        if key.startswith("megatron."):
            return self._facts.get(key.removeprefix("megatron."))
        if key.startswith("vision."):
            return _section(self.config, "vision_config").get(key.removeprefix("vision."))
        value = _section(self.config, "text_config").get(key)
        return self.config.get(key) if value is None else value

    def size(self, expression: str) -> int:
        """The value of an expression.

        Raises ModelError where a key is absent and has no default, or is no number that a size can be.
        """
        size = self._found.get(expression)
        if size is None:
            size = int(self._evaluate(expression, frozenset()))
            if size < 0 or size >= 1 << 48:
                raise ModelError(f"config.json: {expression} comes to {size}, which is no size of a tensor")
            self._found[expression] = size
        return size

    def known(self, expression: str) -> int | None:
        """The value of an expression, or None where config.json does not tell."""
        try:
            return self.size(expression)
        except ModelError:
            return None

    def flag(self, key: str) -> bool:
        """Whether config.json (or the default) says yes."""
        value = self.stored(key)
        return bool(self._defaults.get(key, False) if value is None else value)

    def has(self, key: str) -> bool:
        """Whether a key has a value; null says that it has none, even where its absence would mean a default."""
        text = _section(self.config, "text_config")
        holder = text if key in text else self.config
        return holder[key] is not None if key in holder else key in self._defaults

    @property
    def transformers_version(self) -> tuple[int, int] | None:
        """(major, minor) of the transformers version that wrote config.json, if it says."""
        return transformers_version(self.config)

    def _evaluate(self, expression: str, pending: frozenset[str]) -> float:
        return sum([self._chain(term, pending) for term in expression.split("+")])

    def _chain(self, expression: str, pending: frozenset[str]) -> float:
        result: float = 1
        for number, quotient in enumerate(expression.split("//")):
            value: float = 1
            for factor in quotient.split("*"):
                value *= self._factor(factor.strip(), pending)
            if number == 0:
                result = value
            elif value == 0:
                raise ModelError(f"config.json: {expression} divides by zero")
            else:
                result //= value
        return result

    def _factor(self, factor: str, pending: frozenset[str]) -> float:
        if factor.isdecimal():
            return int(factor)
        value = self.stored(factor)
        if value is None:
            value = self._given.get(factor)
        if value is None and factor not in pending:
            default = self._defaults.get(factor)
            value = self._evaluate(default, pending | {factor}) if isinstance(default, str) else default
        if isinstance(value, list):
            value = len(value)
        if value is None:
            hint = _HEAD_COUNT_HINTS.get(factor, "give the model's own configuration with --config DIR")
            raise ModelError(f"config.json does not say {factor}, which the shapes of this model need", hint=hint)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 48:
            raise ModelError(f"config.json: {factor} should be a size, but is {value!r}")
        return value


_HEAD_COUNT_HINTS = {
    "num_attention_heads": "say it with --num-attention-heads N",
    "num_key_value_heads": "say it with --num-key-value-heads N",
}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
