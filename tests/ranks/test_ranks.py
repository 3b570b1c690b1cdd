"""The number of ranks does not change the result: the plain loop, bit for bit, for any number of processes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest

from outcore.core.errors import ConfigError
from outcore.core.ranks import TIMEOUT
from outcore.ranks.agreement import agree
from outcore.ranks.world import join_world

from . import endings
from .cases import ADAPTED, CASES, CUT, DEVICE, MACHINES, Case, plain
from .conftest import free_port, launch, launch_and_wait
from .faults import Fault
from .planted import BETWEEN_RANKS
from .watched import run as run_fault

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="over gloo, between processes on the CPU"),
    pytest.mark.xdist_group("ranks"),
]
RUN = "from ranks.cases import main; main(sys.argv[1:])"
EVERY = [case for case in (*CASES, *CUT) if case.kind not in ADAPTED[1:] or find_spec(case.kind)]
NAMES = [case.name for case in EVERY]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """For every case what each of three ranks reports, and for every second case what each of two reports."""
    results: list[list[list[Any]]] = [[] for _ in EVERY]
    for num_ranks in (2, 3):
        folder, every = tmp_path_factory.mktemp("disk"), 4 - num_ranks
        said = launch(RUN, num_ranks, [json.dumps(EVERY[::every]), str(folder)])
        for of_case, of_ranks in zip(results[::every], zip(*map(str.splitlines, said), strict=True), strict=True):
            of_case.append([json.loads(line) for line in of_ranks])
        assert list(folder.iterdir()) == []
    return results


@pytest.mark.parametrize("number", range(len(EVERY)), ids=NAMES)
def test_is_the_plain_loop(number, found):
    wanted = plain(EVERY[number])
    for ranks in found[number]:
        assert [of_rank["weights"] for of_rank in ranks] == [wanted] * len(ranks), len(ranks)


@pytest.mark.parametrize("number", range(len(EVERY)), ids=NAMES)
def test_states_and_norms_are_the_same_on_every_rank(number, found):
    said = [of_rank for ranks in found[number] for of_rank in ranks]
    assert all(one == said[0] for one in said)
    assert len(said[0]["norms"]) == (3 if EVERY[number].clip else 0)


def test_two_machines(tmp_path):
    """Four ranks get the result of one rank, wherever weights are cut."""
    said = {}
    for num_ranks, per_node in ((1, 1), (4, 2)):
        environment = {"LOCAL_WORLD_SIZE": str(per_node), "OUTCORE_TEST_LOOP": "8 2"}
        ranks = launch(RUN, num_ranks, [json.dumps(MACHINES), str(tmp_path)], **environment)
        said[num_ranks] = [[json.loads(line) for line in of_rank.splitlines()] for of_rank in ranks]
    for i, case in enumerate(MACHINES):
        wanted = {**said[1][0][i], "norms": said[4][0][i]["norms"]}  # a single rank has torch's norm
        assert [of_rank[i] for of_rank in said[4]] == [wanted] * 4, case.name


def test_cut_weights_are_whole_where_they_are_read(tmp_path):
    said = launch("from ranks.cut_faces import main; main()", 2, [str(tmp_path)])
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 4


def test_all_ranks_visit_the_same_units_by_link(tmp_path):
    case = Case("routes", partition="world")
    ended = launch_and_wait(RUN, 2, [json.dumps([case]), str(tmp_path)], timeout_s=60)
    for rank, (status, _, error) in enumerate(ended):
        assert status == 1
        start = f"rank {rank}: expected all ranks to all-gather weights of unit 'blocks."
        assert start in error, error
        assert f"rank {1 - rank} was about to all-gather weights of unit 'blocks." in error


def test_what_ranks_see():
    said = launch("from ranks.faces import main; main()", 2)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 8


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("MASTER_PORT", None, "prepare: expected MASTER_ADDR .*but: .*MASTER_PORT expected, but not set; start"),
        ("MASTER_PORT", "abc", "prepare: expected MASTER_ADDR .*'abc'; start with torchrun"),
        ("RANK", None, "beside WORLD_SIZE and RANK, as torchrun .*RANK expected, but not set; start"),
        (TIMEOUT, "1e14", "OUTCORE_RANKS_TIMEOUT_S: expected a number of seconds up to 1e[+]09, but got '1e14'"),
        (TIMEOUT, "nan", "OUTCORE_RANKS_TIMEOUT_S: expected a number of seconds up to 1e[+]09, but got 'nan'"),
    ],
)
def test_an_unusable_environment_is_refused(name, value, match, monkeypatch):
    given = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), name: value}
    for key, text in given.items():
        monkeypatch.delenv(key, raising=False) if text is None else monkeypatch.setenv(key, text)
    with pytest.raises(ConfigError, match=match):
        join_world("cpu")


def test_a_fact_that_a_rank_lacks_is_named():
    said = []
    world = Mock(all_of=lambda mine: said.append(mine) or said)
    agree(world, {"unit 'a'": "1", "unit 'b'": "2", "precision=": "fp32"})
    with pytest.raises(ConfigError, match="but unit 'b' of rank 1 differs from rank 0's"):
        agree(world, {"unit 'a'": "1", "precision=": "fp32"})


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_closes_first_takes_nothing_from_the_others(num_ranks, tmp_path):
    seed, count = num_ranks, 8
    assert endings.lost(endings.run(seed, count, num_ranks, tmp_path), seed, count) == []


SAVED = "from ranks.saved import main; main()"


@pytest.mark.filterwarnings("ignore:load_checkpoint")
def test_saved_by_three_and_loaded_by_others(tmp_path):
    saved = [json.loads(said) for said in launch(SAVED, 3, ["save", str(tmp_path)])]
    assert saved[1:] == saved[:1] * 2
    for num_ranks in (1, 2, 5):
        for said in launch(SAVED, num_ranks, ["load", str(tmp_path)]):
            loaded = json.loads(said)
            assert loaded == [case[: len(loaded[0])] for case in saved[0]], num_ranks
            assert len(loaded[0]) == (1 if num_ranks == 5 else 2)


def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path):
    launch(SAVED, 2, ["fail", str(tmp_path)], is_fresh=True)


FAULTS = [
    Fault("dies", "exchange", 2),
    Fault("dies", "update", 1, rank=0, homes="disk"),
    Fault("stalls", "backward"),
    Fault("is_interrupted", "gather", 1),
    Fault("is_interrupted", "link", 4, partition="world"),
    Fault("skips", "backward", 1),
    Fault("asks", "norm"),
    Fault("asks", "gradient", rank=2),
    Fault("stays_away"),
    Fault("fails_in_prepare", "model"),
    Fault("fails_in_prepare", "homes", rank=0, homes="disk"),
    Fault("fails_in_prepare", "homes", partition="world"),
    Fault("fails_in_prepare", "first value", 3),
    Fault("fills_the_drive", "write", 1, rank=0),
    Fault("fills_the_drive", "write", 2),
    Fault("does_alone", "zero"),
    Fault("does_alone", "factor"),
    Fault("does_alone", "rate"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.kind} {fault.point} {fault.rank}" for fault in FAULTS])
def test_a_rank_that_fails_ends_all(fault):
    verdict = run_fault(fault, 3)
    assert verdict.is_reached
    assert not verdict.wrong, "\n".join(verdict.wrong)


@pytest.mark.parametrize("num_ranks", BETWEEN_RANKS)
def test_no_wait_between_ranks_can_be_dropped_unnoticed(num_ranks, tmp_path):
    """See ``tests/parity/test_planted_bugs.py``."""
    for said in launch("from ranks.planted import main; main()", num_ranks, [str(tmp_path)]):
        assert json.loads(said) == dict.fromkeys(sorted(BETWEEN_RANKS[num_ranks]), True)
