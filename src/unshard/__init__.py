"""Turn the checkpoint fragments of distributed training into a Hugging Face model.

>>> import unshard
>>> checkpoint = unshard.open("global_step_100/actor")
>>> checkpoint["model.norm.weight"].numpy()
>>> report = unshard.merge("global_step_100/actor", "merged")
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unshard.api import merge, open, plan, verify
    from unshard.errors import UnshardError

__all__ = ["UnshardError", "__version__", "merge", "open", "plan", "verify"]


def __getattr__(name: str) -> Any:
    """Load the rooms on first use, so that `unshard --help` stays quick."""
    if name == "UnshardError":
        from unshard.errors import UnshardError

        return UnshardError
    if name in __all__:
        from unshard import api

        return getattr(api, name)
    raise AttributeError(f"module `unshard` has no attribute `{name}`")


class _Package(ModuleType):
    """The package, in which the functions `plan` and `verify` go before the rooms of the same names.

    Python makes every submodule that is imported an attribute of its package; then `unshard.verify(…)` would be a
    module's call. `from unshard.verify.compare import …` does not need the attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
