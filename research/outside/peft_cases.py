"""PEFT's own cases: every tuner configuration of its test_custom_models.py, trained plain and prepared.

    python research/outside/peft_cases.py FOLDER      # of PEFT's source distribution, which has tests/

Each layer of the small models is a unit. Prints counts, refusals by message, and the names of cases that differ.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
from outside.torch_modules import compare, show  # noqa: E402


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and verdict of each case, once with every layer as a unit and once with everything in one."""
    from peft import get_peft_model

    sys.path.insert(0, str(folder))
    # PEFT's tests import it for pipelines that no case here uses.
    sys.modules.setdefault("diffusers", types.SimpleNamespace(StableDiffusionPipeline=None))  # type: ignore[arg-type]
    suite = importlib.import_module("tests.test_custom_models")
    inputs = torch.arange(90).view(9, 10)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    for name, model_id, config_class, options in suite.TEST_CASES:

        def build(model_id: str = model_id, config_class: Any = config_class, options: Any = options) -> nn.Module:
            model = suite.MockTransformerWrapper.from_pretrained(model_id)
            return get_peft_model(model, config_class(**options)).train()

        def call(model: nn.Module) -> Any:
            return model(inputs)

        yield name, compare(build, call, adamw, units=layers)
        yield f"{name}, one unit", compare(build, call, adamw)


def layers(model: nn.Module) -> list[str]:
    """The layers of the model inside PEFT's wrappers that have parameters."""
    inner = model.base_model.model
    prefix = next(n for n, m in model.named_modules() if m is inner)
    return [f"{prefix}.{n}" for n, m in inner.named_children() if any(True for _ in m.parameters())]


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return 0 if show("PEFT's custom models", cases(Path(sys.argv[1]))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
