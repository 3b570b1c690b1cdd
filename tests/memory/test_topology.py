"""Cores by NUMA node, read from faked /sys, /proc and affinity."""

from __future__ import annotations

import os

import pytest

from outcore.memory import machine as this_machine
from outcore.memory.machine import Node, Others, Topology, cache_bytes, read_topology


@pytest.fixture
def machine(tmp_path, monkeypatch):
    def make(usable, files, cgroup="0::/\n"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
        for name, text in {"proc/self/cgroup": cgroup, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def node(number, cpulist):
    return {f"sys/devices/system/node/node{number}/cpulist": f"{cpulist}\n"}


def threads(pairs, name="core_cpus_list"):
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{siblings}\n"
        for siblings in pairs
        for cpu in map(int, siblings.replace("-", ",").split(","))
    }


def caches(cpu, *levels):
    folder = f"sys/devices/system/cpu/cpu{cpu}/cache"
    found = {}
    for i, (level, size, cpus) in enumerate(levels):
        found |= {f"{folder}/index{i}/{name}": text for name, text in (("level", level), ("size", size))}
        found[f"{folder}/index{i}/shared_cpu_list"] = f"{cpus}\n"
    return found


QUOTA_OF_3 = {"sys/fs/cgroup/cpu.max": "300000 100000\n"}
TWO_SOCKETS = node(0, "0-1,4-5") | node(1, "2-3,6-7")  # cpu n and n + 4 are threads of one core


def test_nothing_readable_is_one_node_without_hyper_threads(machine):
    assert read_topology(machine({3, 5}, {}, cgroup="")) == Topology((Node(frozenset({3, 5}), 2),), None)


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_threads_of_a_core_count_once(machine, name):
    root = machine(range(4), threads(["0-1", "2,3"], name))
    assert read_topology(root) == Topology((Node(frozenset(range(4)), 2),), None)
    assert read_topology(root).num_cores == 2


def test_one_thread_of_each_core_is_all_cores(machine):
    assert read_topology(machine({0, 2}, threads(["0-1", "2,3"]))).num_cores == 2


def test_cores_by_node(machine):
    root = machine(range(8), TWO_SOCKETS | threads(["0,4", "1,5", "2,6", "3,7"]))
    first, second = frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})
    assert read_topology(root) == Topology((Node(first, 2), Node(second, 2)), None)


def test_affinity_within_nodes(machine):
    assert read_topology(machine({1, 2, 3}, TWO_SOCKETS)).nodes == (Node(frozenset({1}), 1), Node(frozenset({2, 3}), 2))


def test_a_cpuset_inside_one_node_leaves_one_node(machine):
    assert read_topology(machine({2, 3}, TWO_SOCKETS)).nodes == (Node(frozenset({2, 3}), 2),)


def test_a_node_without_cpus_and_other_entries_are_none(machine):
    files = TWO_SOCKETS | node(2, "") | {"sys/devices/system/node/node3x/cpulist": "0\n"}
    assert len(read_topology(machine(range(8), files)).nodes) == 2


def test_nodes_in_the_order_of_their_numbers(machine):
    files = {k: v for i in (10, 9) for k, v in node(i, i).items()}
    assert [node.cpus for node in read_topology(machine({9, 10}, files)).nodes] == [{9}, {10}]


def test_nodes_that_leave_a_cpu_out_are_not_believed(machine):
    assert read_topology(machine(range(9), TWO_SOCKETS)).nodes == (Node(frozenset(range(9)), 9),)


@pytest.mark.parametrize("text", ["x", "-3", "3-", "0-99999999999", "1 2", "\0", "0-70000"])
def test_what_is_no_list_is_not_believed(machine, text):
    files = node(0, text) | threads(["0-1"]) | {"sys/devices/system/cpu/cpu2/topology/core_cpus_list": text}
    assert read_topology(machine(range(3), files)) == Topology((Node(frozenset(range(3)), 2),), None)


def test_a_quota_below_the_cores(machine):
    topology = read_topology(machine(range(8), TWO_SOCKETS | QUOTA_OF_3))
    assert (topology.quota, topology.num_cores, len(topology.nodes)) == (3, 3, 2)
    assert read_topology(machine(range(2), QUOTA_OF_3)).num_cores == 2


def test_this_machine():
    topology = read_topology()
    assert frozenset().union(*[node.cpus for node in topology.nodes]) == os.sched_getaffinity(0)
    assert 1 <= topology.num_cores <= len(os.sched_getaffinity(0))


def test_last_level_caches_count_once_each_however_many_cores_share_them(machine):
    small = ("1", "32K", "0"), ("1", "32K", "0"), ("2", "1024K", "0")
    files = {}
    for cpu in range(8):
        files |= caches(cpu, *small, ("3", "32768K", "0-3" if cpu < 4 else "4-7"))
    assert cache_bytes(machine(range(8), files)) == 2 * 32 * 2**20
    assert cache_bytes(machine({0, 1}, files)) == 32 * 2**20


@pytest.mark.parametrize("size", ["", "big", "-1K", "32M"])
def test_caches_that_are_not_reported_have_no_bytes(machine, size):
    assert cache_bytes(machine({0}, caches(0, ("3", size, "0")))) == 0


def test_caches_of_which_the_cores_are_not_known_count_as_one(machine):
    files = {}
    for cpu in range(16):
        files |= caches(cpu, ("3", "1024K", ""))
    assert cache_bytes(machine(range(16), files)) == 2**20


def ticks(**used):
    return {"proc/stat": "cpu 1 1 1 1 1 1 1 1 0 0\n" + "".join(f"{cpu} {line}\n" for cpu, line in used.items())}


@pytest.mark.parametrize(
    ("usable", "after", "own_s", "quota", "said"),
    [
        ({0, 1}, ticks(cpu0="1000 0 900 0 0 0 0 0 0 0", cpu1="1000 0 0 0 0 0 0 0 0 0"), 19.0, "", ""),
        ({0, 1}, ticks(cpu0="1000 0 0 0 0 0 0 0 0 0", cpu1="1000 0 0 0 0 0 0 0 0 0"), 10.0, "", "1.0 of 2"),
        ({0, 1}, ticks(cpu0="0 0 0 0 0 0 0 800 0 0", cpu1="0 400 0 0 0 0 0 0 0 0"), 0.0, "", "1.2 of 2"),
        ({0}, ticks(cpu0="500 0 0 500 0 0 0 0 0 0", cpu1="1000 0 0 0 0 0 0 0 0 0"), 5.0, "", ""),
        ({0, 1}, ticks(cpu0="1000 0 0 0 0 0 0 0 0 0", cpu1="0 0 0 0 0 0 0 0 0 0"), 0.0, "100000 100000\n", ""),
        ({0, 1}, {"proc/stat": "none of this kernel's business"}, 10.0, "", ""),
    ],
    ids=["alone", "others", "another virtual machine", "on other cpus", "within a quota", "unreadable"],
)
def test_others_count_if_they_leave_too_little(machine, monkeypatch, usable, after, own_s, quota, said):
    """Ten seconds pass. A tick is a hundredth of a second; own time in the kernel is nobody's."""
    now = [0.0, 0.0]
    monkeypatch.setattr(this_machine, "_LEAST_S", 0.5)
    monkeypatch.setattr(this_machine.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "times", lambda: os.times_result((now[1], 0, 0, 0, 0)))
    zero = ticks(cpu0="0 0 0 0 0 0 0 0 0 0", cpu1="0 0 0 0 0 0 0 0 0 0")
    files = {"sys/fs/cgroup/cpu.max": quota} if quota else {}
    others = Others(machine(usable, {**zero, **files}))
    now[:] = 0.4, own_s
    assert others.busy() == "", "too short to tell"
    now[0] = 10.0
    machine(usable, after)
    assert others.busy() == (f"others kept {said} cores busy" if said else "")
