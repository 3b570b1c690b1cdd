"""The update of a piece of a parameter: which optimizers, their kernels, and the blocks in which these run.

``Rule`` is the base of optimizers of your own, ``Lion`` is one, and ``check`` tries one. Knows no tier.
"""

from outcore.optim.checking import check
from outcore.optim.rule import Lion, Rule, State

__all__ = ["Lion", "Rule", "State", "check"]
