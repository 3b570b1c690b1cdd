"""Programs that ask how good plans are: each prints a table, and has a report in ``reports/``.

Run ``python -m planning.NAME`` in the folder ``research``.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
