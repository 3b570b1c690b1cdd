"""Forwards of units, compiled by ``torch.compile``.

[Note: compiled blocks] torch.compile caches compiled code by function, not by module, and takes a module's parameters
as inputs. Its guards compare classes, shapes and strides of parameters, and torch's modes. If all of these agree, all
units of a class run the same code, wherever their weights are. A recompute must run exactly the code of its forward,
since other code rounds differently. So ``CastsOfCompiled`` treats the modes alike in forward and recompute.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.recompute.replay import CastsOfCompiled, CastsOfUnit
from outcore.model.equal_calls import is_own
from outcore.model.partition import Partition

Forward = Callable[..., Any]
CompileOptions = bool | Mapping[str, Any]
"""Whether to compile, or arguments of ``torch.compile``."""

_KNOWN: Final = frozenset(inspect.signature(torch.compile).parameters) - {"model"}
_BY_ADDRESS = ("reduce-overhead", "max-autotune")
_MOST_SAID = 200  # characters quoted of torch's error: some errors list all that torch knows


class Compiling:
    """Compiles the forwards of units."""

    def __init__(self, options: CompileOptions) -> None:
        """Check the options. Args: options: False: nothing is compiled.

        Raises:
            ConfigError: ``torch.compile`` has no such option.
            UnsupportedError: With such an option the code would read weights at the address of its first call.
        """
        self.is_on = options is not False
        self._options = dict(options) if isinstance(options, Mapping) else {}
        if not isinstance(options, bool | Mapping):
            raise ConfigError(f"compile: expected a bool or a dict of torch.compile's options, but got {options!r}")
        unknown = sorted(map(str, self._options.keys() - _KNOWN))
        if unknown:
            raise ConfigError(
                f"compile: expected options of torch.compile ({', '.join(sorted(_KNOWN))}), but got "
                f"{', '.join(unknown)}; leave out what it does not have"
            )
        mode, inner = self._options.get("mode"), self._options.get("options") or {}
        if mode in _BY_ADDRESS or inner.get("triton.cudagraphs"):
            raise UnsupportedError(
                f"compile: expected code that reads weights wherever they are, but "
                f"{f'mode {mode!r}' if mode in _BY_ADDRESS else 'triton.cudagraphs'} replays CUDA graphs, which read "
                "them at the address of the first call; leave it out, or take mode 'max-autotune-no-cudagraphs'"
            )

    def check(self, cut: Partition, device: torch.device) -> None:
        """Look for modules that are compiled already, and try to compile a line of code.

        Raises:
            ConfigError: This machine cannot compile.
            UnsupportedError: A module was compiled before. Its code would end where a unit begins.
        """
        compiled = {
            u.name for u, m in zip(cut.spec.units, cut.modules, strict=True) if m._compiled_call_impl is not None
        }
        if self.is_on:
            compiled |= {name for name, module in cut.modules[0].named_modules() if _is_wrapper(module)}
        if compiled - {""}:
            raise UnsupportedError(
                f"expected a model whose blocks are not compiled, but '{min(compiled - {''})}' is, and its code would "
                "end where a unit begins; leave torch.compile out of the model and give outcore.prepare() compile=True"
            )
        if not self.is_on:
            return
        try:
            torch.compile(_line, **self._options)(torch.zeros(2, device=device))
        except Exception as error:
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_MOST_SAID]
            raise ConfigError(
                f"compile: expected a torch that can compile for {device.type}, but it says: "
                f"{type(error).__name__}: {said}; install what it asks for (for the CPU a C++ compiler), or leave "
                "compile out"
            ) from error

    def forward_of(self, module: nn.Module) -> Forward:
        """Return what to run as the forward of a unit. An embedding is not compiled: it has nothing to fuse."""
        if not self.is_on or isinstance(module, nn.Embedding):
            return module.forward
        compiled = torch.compile(module.forward, **self._options)

        def run(*args: Any, **kwargs: Any) -> Any:
            """Run without the call's own caches: with one, code would be compiled anew for each of its layers."""
            named = {name: None if is_own(value) else value for name, value in kwargs.items()}
            return compiled(*[None if is_own(value) else value for value in args], **named)

        return run

    def casts_of(self, params: Sequence[nn.Parameter], device: torch.device) -> CastsOfUnit:
        """Return what handles autocast's cache of casts for a unit. Args: params: The unit's parameters."""
        return (CastsOfCompiled if self.is_on else CastsOfUnit)(params, device)


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` makes of one."""
    return type(module).__name__ == "OptimizedModule"


def _line(x: torch.Tensor) -> torch.Tensor:
    return x.exp() + 1
