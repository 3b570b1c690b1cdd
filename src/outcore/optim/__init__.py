"""The update of a piece of a parameter: which optimizers, their kernels, and the blocks in which these run.

Knows no tier.
"""
