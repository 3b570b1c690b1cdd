"""Free memory, read from faked /proc and from /sys/fs/cgroup of both versions."""

from __future__ import annotations

import os

import pytest

from outcore.memory.machine import cpu_quota, disk_free_bytes, host_free_bytes

GIB = 2**30


def machine(root, files, *, available=64 * GIB, cgroup="0::/user/run\n"):
    files = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:  {available // 1024} kB\n", **files}
    files["proc/self/cgroup"] = cgroup
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder, *, limit, used=0, stat="", high="max"):
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    files = {"memory.max": limit, "memory.current": used, "memory.stat": stat, "memory.high": high}
    return {f"{base}/{name}": f"{value}\n" for name, value in files.items()}


def test_no_limit_leaves_what_the_machine_has(tmp_path):
    assert host_free_bytes(machine(tmp_path, v2("user/run", limit="max", used=5))) == 64 * GIB


def test_version_2_limit_minus_use_plus_page_cache(tmp_path):
    stat = f"anon 7\ninactive_file {GIB}\nactive_file {2 * GIB}\n"
    root = machine(tmp_path, v2("user/run", limit=10 * GIB, used=9 * GIB, stat=stat))
    assert host_free_bytes(root) == 4 * GIB


def test_version_2_nothing_used_yet(tmp_path):
    assert host_free_bytes(machine(tmp_path, v2("user/run", limit=10 * GIB))) == 10 * GIB


def test_every_group_above_limits_too(tmp_path):
    files = v2("user/run", limit=10 * GIB) | v2("user", limit=6 * GIB, used=4 * GIB)
    assert host_free_bytes(machine(tmp_path, files)) == 2 * GIB


def test_memory_high_limits_as_well(tmp_path):
    assert host_free_bytes(machine(tmp_path, v2("user/run", limit=10 * GIB, high=3 * GIB, used=GIB))) == 2 * GIB


@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/docker/0123\n", "0::/../../other\n"])
def test_a_container_that_sees_itself_as_the_top(tmp_path, cgroup):
    root = machine(tmp_path, v2("", limit=8 * GIB, used=2 * GIB), cgroup=cgroup)
    assert host_free_bytes(root) == 6 * GIB


def v1(folder, *, limit, used, stat=""):
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    files = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"{base}/{name}": f"{value}\n" for name, value in files.items()}


V1_CGROUP = "9:name=systemd:/\n4:memory:/run/a\n1:cpu,cpuacct:/run/a\n0::/\n"


def test_version_1_counts_the_groups_below(tmp_path):
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    files = v1("run/a", limit=8 * GIB, used=7 * GIB, stat=stat) | v1("", limit=9223372036854771712, used=0)
    assert host_free_bytes(machine(tmp_path, files, cgroup=V1_CGROUP)) == 3 * GIB


def test_version_1_in_a_container(tmp_path):
    assert host_free_bytes(machine(tmp_path, v1("", limit=8 * GIB, used=7 * GIB), cgroup=V1_CGROUP)) == GIB


def test_more_used_than_allowed_is_nothing_free(tmp_path):
    assert host_free_bytes(machine(tmp_path, v2("user/run", limit=GIB, used=2 * GIB))) == 0


def test_no_control_groups_at_all(tmp_path):
    assert host_free_bytes(machine(tmp_path, {}, cgroup="")) == 64 * GIB


@pytest.mark.parametrize(
    ("text", "cores"), [("200000 100000", 2), ("150000 100000", 1), ("1000 100000", 1), ("max 1", None)]
)
def test_cores_of_version_2(tmp_path, text, cores):
    assert cpu_quota(machine(tmp_path, {"sys/fs/cgroup/user/run/cpu.max": text})) == cores


def test_cores_of_every_group_above(tmp_path):
    base = "sys/fs/cgroup"
    files = {f"{base}/user/run/cpu.max": "max 100000", f"{base}/user/cpu.max": "300000 50000"}
    assert cpu_quota(machine(tmp_path, files)) == 6
    assert cpu_quota(machine(tmp_path, files | {f"{base}/user/run/cpu.max": "400000 100000"})) == 4


def test_cores_of_a_container_that_sees_itself_as_the_top(tmp_path):
    assert cpu_quota(machine(tmp_path, {"sys/fs/cgroup/cpu.max": "300000 100000"}, cgroup="0::/docker/0123\n")) == 3


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_cores_of_version_1(tmp_path, mount):
    base = f"sys/fs/cgroup/{mount}"
    files = {f"{base}/run/cpu.cfs_quota_us": "300000", f"{base}/run/cpu.cfs_period_us": "100000"}
    files |= {f"{base}/cpu.cfs_quota_us": "-1", f"{base}/cpu.cfs_period_us": "100000"}
    assert cpu_quota(machine(tmp_path, files, cgroup=V1_CGROUP)) == 3


def test_no_limit_on_cores(tmp_path):
    base = "sys/fs/cgroup/cpu"
    files = {f"{base}/cpu.cfs_quota_us": "-1", f"{base}/cpu.cfs_period_us": "100000"}
    assert cpu_quota(machine(tmp_path, files, cgroup=V1_CGROUP)) is None
    assert cpu_quota(machine(tmp_path / "none", {}, cgroup="")) is None


def test_this_machine(tmp_path):
    assert host_free_bytes() > 0
    assert 1 <= (cpu_quota() or 1) <= os.cpu_count()
    assert disk_free_bytes(tmp_path) == os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert disk_free_bytes(tmp_path / "still" / "to be made") > 0
