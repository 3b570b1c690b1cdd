"""Private entry points of torch: all are in one file, and an import names those that are missing."""

from __future__ import annotations

import subprocess
import sys

import torch

from outcore.torch_private import missing_names


def test_this_torch_has_them_all():
    assert missing_names() == []


def test_another_torch_is_refused_by_the_name_that_it_lacks():
    program = "import torch\ndel torch._C._will_engine_execute_node\nimport outcore\noutcore.prepare"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert f"but torch {torch.__version__} has no torch._C._will_engine_execute_node;" in run.stderr
