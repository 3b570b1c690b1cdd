"""``python -m outcore`` runs the command ``outcore``."""

from __future__ import annotations

from outcore.command.start import main

if __name__ == "__main__":
    main()
