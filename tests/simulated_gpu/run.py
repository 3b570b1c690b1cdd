"""Run as ``python`` does, with a simulated GPU: ``run.py FILE``, ``run.py -m pytest -m gpu``, ``run.py -c CODE``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import simulator

if __name__ == "__main__":
    simulator.load()
    arguments = sys.argv[1:]
    if arguments[0] == "-c":
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
