"""A question to the planner. It is checked as far as that needs neither torch nor Transformers, which take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from outcore.command.plan.known_models import known_named
from outcore.command.train.model.place import find_place
from outcore.command.train.model.quantization import Quantization, quantization_of
from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.planner.timing.known_hardware import NO_TIMES, named_hardware
from outcore.planner.timing.rank_layout import Ranks
from outcore.spec.model import MasterFormat

_MOST_MICRO_BATCHES, _MOST_RANKS = 2**10, 2**14
"""Limits of a question: more would take minutes and gigabytes to plan for, and no real run is so large."""


@dataclass(frozen=True, kw_only=True)
class MachineQuestion:
    """The machines that a question is about."""

    hardware: str | None
    """File or names of parts; None: this machine."""
    device_memory: str | None
    host_memory: str | None
    disk_size: str | None
    nodes: int = 1
    gpus_per_node: int = 1
    """Ranks of a node. Batch and device memory are those of one rank, host memory and disk those of a node."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that train together."""
        return Ranks(self.nodes, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Question(MachineQuestion):
    """A question to the planner, as the command line puts it."""

    model: str
    batch_size: int
    seq_len: int | None
    """Tokens of a sample; None: its inputs have no tokens."""
    grad_accum: int
    precision: str
    clipping: bool
    optim: str = "adamw_torch"
    """The optimizer, as training arguments name it."""
    master_format: str = "fp32"
    lora: int | None = None
    """Rank of adapters; None: all weights are trained."""
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    inputs: Sequence[str] | None = None
    """Inputs that are given, as ``--input`` takes them."""

    @property
    def counted(self) -> str:
        """What a step is counted in."""
        return "samples" if self.seq_len is None else "tokens"

    @property
    def micro_batch(self) -> str:
        """Say the size of a micro-batch."""
        return f"{self.batch_size} samples" if self.seq_len is None else f"{self.batch_size} x {self.seq_len} tokens"

    @property
    def quantization(self) -> Quantization | None:
        """How the base is quantised; None: it is not. Raises: ConfigError: It cannot be quantised so."""
        return quantization_of(in_4bit=self.load_in_4bit, in_8bit=self.load_in_8bit, has_adapters=self.lora is not None)

    def refuse_absent(self) -> None:
        """Refuse what can be found wrong without planning.

        Raises:
            ConfigError: A number is too large, a size is none, or a word, the machine, the model or the quantisation
                does not exist.
        """
        # Here, since outcore.plan needs none of the settings' own libraries.
        from outcore.command.train.settings.outcore_settings import MOST_TOKENS, RunPrecision

        tokens, ranks = self.batch_size * (self.seq_len or 1), self.nodes * self.gpus_per_node
        for flags, number, most, of in (
            ("--batch-size, --seq-len", tokens, MOST_TOKENS, "tokens in a micro-batch"),
            ("--grad-accum", self.grad_accum, _MOST_MICRO_BATCHES, "micro-batches in a step"),
            ("--nodes, --gpus-per-node", ranks, _MOST_RANKS, "ranks"),
        ):
            if number > most:
                raise ConfigError(f"{flags}: expected at most {most:,} {of}, but got {number:,}; plan for fewer")
        for flag, got, words in (
            ("--precision", self.precision, get_args(RunPrecision)),
            ("--master-format", self.master_format, get_args(MasterFormat)),
        ):
            if got not in words:
                raise ConfigError(f"{flag}: expected one of {', '.join(words)}, but got '{got}'")
        for flag in ("device_memory", "host_memory", "disk_size"):
            if (size := getattr(self, flag)) is not None:
                parse_bytes(size, what=f"--{flag.replace('_', '-')}")
        _ = self.quantization
        if self.hardware not in (None, NO_TIMES):
            named_hardware(self.hardware)
        if self.model and known_named(self.model) is None:
            find_place(self.model)
