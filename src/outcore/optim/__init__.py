"""The update of a piece of a parameter: the supported optimizers, their kernels, and the blocks in which they run.

``Rule`` is the base class for optimizers of your own, ``Lion`` is one of them, and ``check`` tests one. This package
knows nothing of tiers.
"""

from outcore.optim.checking import check
from outcore.optim.rule import Lion, Rule, State

__all__ = ["Lion", "Rule", "State", "check"]
