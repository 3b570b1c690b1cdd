"""``python -m outcore``: the command ``outcore``."""

from __future__ import annotations

from outcore.cli.main import main

if __name__ == "__main__":
    main()
