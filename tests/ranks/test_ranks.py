"""The number of ranks does not change the result: the plain loop, bit for bit, for any number of processes."""

from __future__ import annotations

import json

import pytest

from .cases import CASES, DEVICE, plain
from .conftest import launch, launch_and_wait
from .faults import TIMEOUT_S

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="over gloo, between processes on the CPU"),
    pytest.mark.xdist_group("ranks"),
]
RUN = "from ranks.cases import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By number of ranks: what every rank says of every case."""
    results = {}
    for num_ranks in (2, 3):
        folder = tmp_path_factory.mktemp("disk")
        said = launch(RUN, num_ranks, [json.dumps(CASES), str(folder)])
        results[num_ranks] = [[json.loads(line) for line in of_rank.splitlines()] for of_rank in said]
        assert list(folder.iterdir()) == []
    return results


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_is_the_plain_loop(number, found):
    wanted = plain(CASES[number])
    for num_ranks, ranks in found.items():
        weights = [of_rank[number]["weights"] for of_rank in ranks]
        assert weights == [wanted] * num_ranks, num_ranks


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_states_and_norms_are_the_same_on_every_rank(number, found):
    said = [of_rank[number] for ranks in found.values() for of_rank in ranks]
    assert all(one == said[0] for one in said)
    assert len(said[0]["norms"]) == (3 if CASES[number].clip else 0)


def test_what_ranks_see():
    said = launch("from ranks.faces import main; main()", 2)
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 5


SAVED = "from ranks.saved import main; main()"


@pytest.mark.filterwarnings("ignore:load_checkpoint")
def test_saved_by_three_and_loaded_by_others(tmp_path):
    saved = [json.loads(said) for said in launch(SAVED, 3, ["save", str(tmp_path)])]
    assert saved[1:] == saved[:1] * 2
    for num_ranks in (1, 2, 3, 5):
        for said in launch(SAVED, num_ranks, ["load", str(tmp_path)]):
            loaded = json.loads(said)
            assert loaded == [case[: len(loaded[0])] for case in saved[0]], num_ranks
            assert len(loaded[0]) == (1 if num_ranks == 5 else 2)


def test_a_save_that_fails_on_one_rank_fails_on_all(tmp_path):
    launch(SAVED, 2, ["fail", str(tmp_path)])


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("dies", "rank 1 in backward"),
        ("stalls", "rank 1 in backward"),
        ("skips", "rank 1 in optimizer.step"),
        ("asks", "rank 1 in a gradient's norm"),
    ],
)
def test_a_rank_that_fails_ends_all(what, seen):
    ended = launch_and_wait("from ranks.faults import main; main()", 3, [what], timeout_s=60)
    assert [status for status, _, _ in ended] == [3, -9 if what == "dies" else 3, 3], ended
    for rank in (0, 2):
        seconds, _, error = ended[rank][1].partition(" ")
        assert float(seconds) < TIMEOUT_S + 5
        start = f"rank {rank}: expected all ranks to exchange gradients of unit 'blocks.2' on lane reduce, but one has"
        assert error.startswith(start)
        assert seen in error


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("zeroes", "expected the same backward on all ranks, with the same gradients held before"),
        ("multiplies", "what they were multiplied by"),
        ("slows", "settings of param groups"),
        ("reads", "was about to read the gradient of"),
    ],
)
def test_what_one_rank_does_alone_is_noticed(what, seen):
    """Weights would come out alike on all ranks, and wrong."""
    ended = launch_and_wait("from ranks.faults import main; main()", 2, [what], timeout_s=30)
    assert [status for status, _, _ in ended] == [3, 3], ended
    assert all(seen in said for _, said, _ in ended), ended
