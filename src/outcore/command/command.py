"""Commands of the command line: an option that is given twice is refused, since only one of its values could count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from outcore.core.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_TIMES = {2: "twice"}


class Command(TyperCommand):
    """A command whose options are given once, except for those that are lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises: ConfigError: An option is given twice."""
        typed = [*args]
        rest = super().parse_args(ctx, args)  # first: --help goes before all refusals
        for option, values in self._given(ctx, typed).items():
            if len(values) > 1:
                said = f"{', '.join(values[:-1])} and {values[-1]}"
                times = _TIMES.get(len(values), f"{len(values)} times")
                raise ConfigError(
                    f"outcore {ctx.command_path.partition(' ')[2]}: {option} is given {times} ({said}); give it once"
                )
        return rest

    def _given(self, ctx: Any, args: list[str]) -> dict[str, list[str]]:
        """Return what was typed for each option that takes one value."""
        singles = [param for param in self.get_params(ctx) if isinstance(param, TyperOption) and not param.multiple]
        try:
            for param in singles:
                param.multiple = True  # so that the parser keeps all values
            found, *_ = self.make_parser(ctx).parse_args(args)
        finally:
            for param in singles:
                param.multiple = False
        return {
            param.opts[0]: [_as_typed(param, value) for value in found[param.name]]
            for param in singles
            if param.name in found
        }


def _as_typed(option: TyperOption, value: object) -> str:
    if isinstance(value, bool):  # a flag
        return option.opts[0] if value else option.secondary_opts[0]
    return str(value)


class CommandLine(typer.Typer):
    """A Typer whose commands are ``Command``, unless they name a kind of it."""

    def command(self, *name: Any, **given: Any) -> Callable[[_Function], _Function]:
        """Register a command, as ``Typer.command``."""
        return super().command(*name, **{"cls": Command, **given})
