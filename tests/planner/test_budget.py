from __future__ import annotations

from pathlib import Path

import pytest

from outcore.core.errors import ConfigError
from outcore.spec.budget import Budget


def test_default_is_what_is_free_and_no_disk():
    budget = Budget()
    assert (budget.device, budget.host, budget.disk, budget.disk_bytes, budget.paths) == (None, None, None, None, ())


def test_reads_sizes_and_folders(tmp_path):
    budget = Budget(device="20GiB", host=7, disk=[tmp_path, "b"], disk_bytes="1 TB")
    assert (budget.device, budget.host, budget.disk_bytes) == (20 * 2**30, 7, 10**12)
    assert budget.paths == (str(tmp_path), "b")


@pytest.mark.parametrize("disk", ["/mnt/nvme", Path("/mnt/nvme"), ["/mnt/nvme"], (Path("/mnt/nvme"),)])
def test_one_folder_in_every_form(disk):
    assert Budget(disk=disk) == Budget(disk="/mnt/nvme")


def test_is_frozen():
    with pytest.raises(AttributeError):
        Budget().device = 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": -1}, r"Budget\(device=\)"),
        ({"device": "20 Gigs"}, r"Budget\(device=\).*20 Gigs"),
        ({"host": 2.5}, r"Budget\(host=\)"),
        ({"disk": []}, "empty list"),
        ({"disk": ""}, "but got ''"),
        ({"disk": 3}, "but got 3"),
        ({"disk": [b"/mnt"]}, "but got b'/mnt'"),
        ({"disk": ["/mnt/a", "/mnt/b/../a/"]}, "'/mnt/b/../a/' is named twice"),
        ({"disk": "/mnt", "disk_bytes": "much"}, r"Budget\(disk_bytes=\)"),
        ({"disk_bytes": 5}, "expected disk= beside disk_bytes=5"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        Budget(**options)
