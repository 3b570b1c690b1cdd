"""The command's own settings: at the top level of a file, or under ``outcore:``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from outcore.spec.model import MasterFormat
from outcore.spec.plan import AwayTier

RunPrecision = Literal["fp32", "bf16", "pure_bf16", "fp16"]
OnNonfinite = Literal["stop", "skip", "go"]
Resume = bool | Literal["auto"]
MOST_TOKENS = 2**26
"""The most tokens in a micro-batch: a plan for more would take minutes and gigabytes, and no real run is so large."""


def _named(text: Any) -> Any:
    if isinstance(text, str) and (not text.strip() or "\0" in text):
        raise PydanticCustomError("name", "Input should be a name or a path")
    return text


def _listed(names: Any) -> Any:
    if not names or not isinstance(names, str | list):
        raise PydanticCustomError("name", "Input should be a name or a path, or a list of these")
    return [names] if isinstance(names, str) else names


Name = Annotated[str, BeforeValidator(_named), AfterValidator(os.path.expanduser)]
Names = Annotated[list[Name], BeforeValidator(_listed), AfterValidator(tuple)]
File = Annotated[Path, BeforeValidator(_named), AfterValidator(lambda path: Path(os.path.expanduser(path)))]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    model: Name
    precision: RunPrecision = "bf16"
    master_format: MasterFormat = "fp32"
    """Format of fp32 masters beside bf16 weights."""
    attention: Name | None = None
    """Transformers' name of an implementation; None: what Transformers takes by itself."""
    load_in_4bit: bool = False
    """Whether the frozen base under adapters is quantised to 4 bits, with bitsandbytes."""
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    bnb_4bit_use_double_quant: bool = False
    # SFTConfig has these two, too; DPOConfig has not.
    eos_token: str | None = None
    """Token that ends a document or turn, instead of the tokenizer's own."""
    chat_template_path: File | None = None
    """Chat template to use instead of the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Where and how it runs."""

    plan: File | None = None
    activations: AwayTier | None = None
    """The tier on which what forward saves rests until backward; None: on the device, as far as it fits."""
    hardware: Name | None = None
    """The machine that times are predicted for; None: this machine."""
    compile: bool = False
    """Whether blocks are compiled with ``torch.compile``."""
    unit_micro_batches: PositiveInt | None = None
    """Pieces in which units run a micro-batch; None: one."""
    device: str | None = None
    """``cpu`` or an accelerator; None: the accelerator if there is one."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(ModelOptions, PlacementOptions):
    """What the commands decide besides TRL's settings."""

    data: Names
    """As given: files, directories and data sets, each perhaps with a weight."""
    out: File
    eval_data: Names | None = None
    save_every_minutes: PositiveFloat | None = None
    """Minutes between two saves, besides the saves that the Trainer makes."""
    grace: NonNegativeFloat = 30.0
    """Seconds from SIGTERM or SIGUSR1 to the end. Kubernetes and Slurm wait 30 s before they kill."""
    resume: Resume = False
    """``auto``: begin anew if nothing was saved."""
    on_nonfinite: OnNonfinite = "stop"
    """What becomes of a step whose loss or gradient norm is not a finite number."""
    trace: File | None = None
    """File for a timeline of a few steps."""
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True)
class OutcoreSettings(RunOptions):
    """The command's own settings, with the sizes of a budget."""

    device_memory: Any = None
    host_memory: Any = None
    disk: str | list[str] | None = None
