"""How a frozen base is quantised, as the command line puts it, under the names of Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, final

from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.spec.model import Precision

Kind4bit = Literal["nf4", "fp4"]


@final
@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantisation of all linear layers but the head, with bitsandbytes or as a checkpoint has them."""

    bits: Literal[4, 8]
    kind: Kind4bit = "nf4"
    nested: bool = False
    stored: Mapping[str, Any] | None = None
    """What the configuration says of a checkpoint that is quantised already; None: the run quantises it."""

    @classmethod
    def stored_as(cls, said: Mapping[str, Any]) -> Self:
        """Return the quantisation of a checkpoint. Args: said: What its configuration says of it."""
        kind, nested = said.get("bnb_4bit_quant_type", "fp4"), said.get("bnb_4bit_use_double_quant", False)
        return cls(bits=4 if said.get("load_in_4bit") else 8, kind=kind, nested=bool(nested), stored=said)

    def config(self, precision: Precision) -> Any:
        """Return what ``outcore.quantized`` takes. Args: precision: Of other weights; layers compute in its dtype."""
        if self.stored is not None:
            return self.stored
        import torch
        from transformers import BitsAndBytesConfig

        if self.bits != 4:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.nested,
            bnb_4bit_compute_dtype={"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16),
        )

    def __str__(self) -> str:
        if self.stored is not None and self.stored.get("quant_method") == "torchao":
            way = self.stored.get("quant_type")
            named = way.get("default", {}).get("_type") if isinstance(way, Mapping) else way
            return f"torchao's {named or 'formats'}"
        if self.bits != 4:
            return "8 bits"
        return f"4 bits, {self.kind}{', its statistics too' if self.nested else ''}"


def quantization_of(
    *, in_4bit: bool, in_8bit: bool, has_adapters: bool, kind: Kind4bit = "nf4", nested: bool = False
) -> Quantization | None:
    """Return what the options ask for; None: nothing is quantised.

    Raises:
        ConfigError: They exclude one another, there are no adapters to train, or bitsandbytes is not installed.
    """
    if not (in_4bit or in_8bit):
        return None
    flag = "--load-in-4bit" if in_4bit else "--load-in-8bit"
    if in_4bit and in_8bit:
        raise ConfigError("--load-in-4bit: expected it without --load-in-8bit, but got both; leave one out")
    if not has_adapters:
        raise ConfigError(
            f"{flag}: expected --lora RANK beside it, since quantised weights stay as they are and adapters are "
            "trained on them, but got none; add it"
        )
    try:
        refuse_missing("bitsandbytes", extra="quantized")
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return Quantization(bits=4 if in_4bit else 8, kind=kind, nested=nested)
