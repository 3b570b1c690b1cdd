"""Commands of the command line: an option that is given twice is refused, since only one of its values could count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from outcore.core.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose options are given once, except for those that are lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments. Raises: ConfigError: An option is given twice."""
        typed = [*args]
        rest = super().parse_args(ctx, args)  # first: --help goes before all refusals
        *_, given = self.make_parser(ctx).parse_args(typed)
        for param, count in Counter(given).items():
            if isinstance(param, TyperOption) and not param.multiple and count > 1:
                times = "twice" if count == 2 else f"{count} times"
                command = ctx.command_path.partition(" ")[2]
                raise ConfigError(f"outcore {command}: {param.opts[0]} is given {times}; give it once")
        return rest


class CommandLine(typer.Typer):
    """A Typer whose commands are ``Command``, unless they name a kind of it."""

    def command(self, *name: Any, **given: Any) -> Callable[[_Function], _Function]:
        """Register a command, as ``Typer.command``."""
        return super().command(*name, **{"cls": Command, **given})
