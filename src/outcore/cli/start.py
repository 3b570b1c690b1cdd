"""Where ``outcore`` begins: the command line itself needs a package, too."""

from __future__ import annotations

import sys

from outcore.core.errors import ConfigError
from outcore.core.extra import COMMAND_LINE, refuse_missing


def main() -> None:
    """Run the command line and exit."""
    try:
        refuse_missing(*COMMAND_LINE)
    except ConfigError as error:
        print(f"outcore: {error}", file=sys.stderr)
        sys.exit(2)
    from outcore.cli.main import main as run

    run()
