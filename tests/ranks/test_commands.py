"""``outcore train`` on several ranks: as torchrun starts them, and with ``--nproc``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import nursery
import pytest
import torch
from command.conftest import CONFIG, replaced
from safetensors.torch import load_file
from torch.distributed import TCPStore
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.command.train.command_ranks import CommandRanks, SaidElsewhereError
from outcore.command.train.spawn import num_processes
from outcore.core.errors import ConfigError, LaneError
from outcore.core.ranks import OtherRankError
from outcore.spec.hardware import Hardware

from .cases import DEVICE
from .conftest import TESTS, launch_and_wait, start

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="over gloo, between processes on the CPU"),
    pytest.mark.xdist_group("ranks"),
]
MAIN = "from outcore.command.main import main; main()"
MEMORY = ["--device-memory", "260KiB", "--host-memory", "1500KiB"]
RUN = ["--lr", "1e-3", "--max-grad-norm", "0", "--batch-size", "1", "--seq-len", "32", "--device", "cpu"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Arguments of a command: model, data, and a folder for the disk tier."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text(" ".join(f"{n} bottles of beer on the wall," for n in range(150)))
    (folder / "tier").mkdir()
    return ["--model", str(folder / "config.json"), "--data", str(folder / "text.txt"), "--disk", str(folder / "tier")]


def train(num_ranks: int, out: Path, files: list[str], *more: str) -> list[tuple[int, str, str]]:
    """Return for each rank: status, output and errors. A step has four micro-batches."""
    arguments = ["train", *files, *MEMORY, *RUN, "--out", str(out), "--grad-accum", str(4 // num_ranks), *more]
    return launch_and_wait(MAIN, num_ranks, replaced(*arguments), timeout_s=60)


@pytest.fixture(scope="module")
def runs(files, tmp_path_factory):
    """Output folder of all runs, and what their ranks report. The run of two ranks is resumed to step 4 on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    text = files[3]
    evaluated = ["--eval-data", text, "--save-every", "2"]
    one = train(1, folder / "one", files, "--steps", "4", *evaluated)
    two = train(2, folder / "two", files, "--steps", "4", *evaluated)
    for number in (3, 4):  # as if it had been stopped
        for path in folder.glob(f"two/checkpoint-{number}"):
            path.rename(folder / path.name)
    resumed = train(1, folder / "two", files, "--steps", "4", "--resume", *evaluated)
    return folder, {"one": one, "two": two, "resumed": resumed}


def test_rank_0_writes_and_speaks_for_all(runs):
    folder, said = runs
    assert [status for status, *_ in said["two"]] == [0, 0], said["two"]
    assert "of each of 2 ranks:" in said["two"][0][1]
    assert said["two"][1][1:] == ("", "")
    lines = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (folder / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [line["step"] for line in lines]
    for mine, other in zip(found, lines, strict=True):
        for name in other.keys() & {"loss", "eval_loss", "lr", "grad_norm"}:
            assert mine[name] == pytest.approx(other[name], rel=1e-3)


def test_the_model_is_that_of_one_rank(runs):
    folder, said = runs
    for run in ("one", "resumed"):
        assert said[run][0][0] == 0, said[run]
    wanted = load_file(folder / "one" / "model" / "model.safetensors")
    torch.testing.assert_close(load_file(folder / "checkpoint-4" / "model.safetensors"), wanted, rtol=0, atol=0)
    torch.testing.assert_close(load_file(folder / "two" / "model" / "model.safetensors"), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--lr", "fast"], "expected a"),
        (["--host-memory", "1KiB"], "These are budgets of one rank. 2 ranks share"),
        (["--data", "/nowhere.txt"], "'/nowhere.txt': expected a file"),
    ],
    ids=["option", "budget", "data"],
)
def test_a_mistake_is_said_once(changed, said, files, tmp_path):
    ended = train(2, tmp_path / "out", files, "--steps", "4", *changed)
    assert [status for status, *_ in ended] == [2, 2], ended
    complaints = [err for *_, err in ended]
    assert said in complaints[0]
    assert complaints[0].count("outcore:") == 1
    assert complaints[1] == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_model_that_cannot_be_saved_is_said_once(more, files, tmp_path):
    """Rank 0 finds it out, and the others hear of it before any step."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.9}))
    ended = train(2, tmp_path / "out", ["--model", str(tmp_path / "config.json"), *files[2:]], "--steps", "4", *more)
    assert [status for status, *_ in ended] == [2, 2], ended
    assert ended[0][2].count("outcore: generation_config.json: expected what can be saved") == 1
    assert ended[1][2] == ""
    assert not (tmp_path / "out").exists()


METHODS = {
    "8 bits": ("train", ["--set", "optim=adamw_8bit", "--set", "master_format=compact", "--precision", "bf16"]),
    "whole": ("train", ["--optim", "muon"]),
    "preferences": ("dpo", []),
    "preferences of adapters": ("dpo", ["--lora", "2"]),
    "quantised base": ("train", ["--lora", "2", "--load-in-4bit"]),
}


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model with random weights, and data for each command."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**CONFIG, "initializer_range": 0.1, "hidden_size": 64, "intermediate_size": 128})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    rows = [{"prompt": f"q {n}?", "chosen": f" yes, {n}", "rejected": " no" + n % 5 * " never"} for n in range(16)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "model", {"train": files[3], "dpo": str(folder / "pairs.jsonl")}, folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_train_what_one_does(method, trained, tmp_path):
    (command, options), (model, data, tier) = METHODS[method], trained
    if options[-1:] == ["--load-in-4bit"]:
        pytest.importorskip("bitsandbytes")
    found = []
    for num_ranks in (1, 2):
        out = tmp_path / str(num_ranks)
        shared = ["--model", str(model), "--data", data[command], "--disk", str(tier), "--save-every", "2"]
        arguments = [command, *shared, *RUN, "--out", str(out), "--grad-accum", str(4 // num_ranks), "--steps", "3"]
        tight = ["--device-memory", "600KiB", "--host-memory", "3MiB"]
        ended = launch_and_wait(MAIN, num_ranks, [*arguments, *tight, *options], timeout_s=60)
        assert [status for status, *_ in ended] == [0] * num_ranks, ended
        found.append([load_file(path) for path in sorted(out.glob("model/*.safetensors"))])
    assert len(found[0]) == 1
    torch.testing.assert_close(*found, rtol=0, atol=0)


LITTLE = """
import math
from outcore.memory import machine
machine._LEAST_S = math.inf
from outcore.probe import links, measure
from outcore.probe.measure import MIB, Effort
least = Effort(window_s=0.004, buffer_bytes=2 * MIB, sizes=(MIB // 16, MIB), disk_bytes=4 * MIB, steps=2)
measure.EFFORTS = {"whole": least}
links._TIMES = 1
"""


def test_ranks_measure_what_is_between_them(tmp_path):
    """Plans for ranks on this machine use the measured links."""
    out = tmp_path / "hardware.json"
    arguments = ["probe", "--device", "cpu", "--out", str(out)]
    cache = {"XDG_CACHE_HOME": str(tmp_path), "OUTCORE_HARDWARE": ""}
    first, other = launch_and_wait(LITTLE + MAIN, 2, arguments, timeout_s=60, **cache)
    assert (first[0], *other) == (0, 0, "", ""), (first, other)
    assert re.search("^ranks  .*/s to a device, .*/s to host memory from others of the node", first[1], re.MULTILINE)
    (kept,) = tmp_path.glob("outcore/hardware-*.json")
    measured = Hardware.load(out)
    assert measured.links is not None
    assert measured.links.sources["bytes_per_s"] == "measured"
    assert json.loads(kept.read_text())["hardware"] == json.loads(out.read_text())


FAILS_ALONE = """
import os
from trl import SFTTrainer
whole = SFTTrainer.training_step
def training_step(self, *args, **options):
    if os.environ["RANK"] == "1" and self.state.global_step == 1:
        raise KeyError("on one rank")
    return whole(self, *args, **options)
SFTTrainer.training_step = training_step
"""


def test_what_one_rank_alone_does_wrong_it_says(files, tmp_path):
    arguments = ["train", *files, *MEMORY, *RUN, "--out", str(tmp_path / "out"), "--steps", "3"]
    first, other = launch_and_wait(FAILS_ALONE + MAIN, 2, arguments, timeout_s=60)
    assert (first[0], other[0]) == (1, 1), (first, other)
    in_a_library = "Connection closed by peer"  # if its lanes were done when it met the others in a metric of TRL's
    assert re.search(f"expected (all ranks to|the same backward on all ranks)|{in_a_library}", first[2]), first[2]
    assert "KeyError: 'on one rank'" in other[2], other[2]


FAILS_FIRST = """
import os
from accelerate import PartialState
def fails(self):
    raise KeyError("in what rank 0 does first")
if os.environ["RANK"] == "0":
    PartialState.main_process_first = fails
    from outcore.command.train import command_ranks as crew
    crew._PATIENCE_S = 3600
"""


def test_others_do_not_wait_for_what_rank_0_should_have_done_first(files, tmp_path):
    """They are in a barrier of Accelerate, and rank 0 waits for them."""
    arguments = ["train", *files, *MEMORY, *RUN, "--out", str(tmp_path / "out"), "--steps", "3"]
    first, other = launch_and_wait(FAILS_FIRST + MAIN, 2, arguments, timeout_s=3600)  # nor do they wait that long
    assert (first[0], other[0]) in ((1, 1), (2, 2)), (first, other)
    assert "in what rank 0 does first" in first[2], first[2]
    assert other[1:] == ("", ""), other


NO_FOLDER = """
import os
from pathlib import Path
mkdir = Path.mkdir
def full(self, *args, **options):
    if self.name == ".model-partial":
        raise OSError(28, "No space left on device")
    return mkdir(self, *args, **options)
Path.mkdir = full
"""


def test_others_hear_that_there_is_no_folder_for_the_model(files, tmp_path):
    """With cut weights they would otherwise wait for rank 0 to read them."""
    arguments = ["train", *files, *MEMORY, *RUN, "--out", str(tmp_path / "out"), "--steps", "1", "--save-every", "1"]
    first, other = launch_and_wait(NO_FOLDER + MAIN, 2, arguments, timeout_s=60)
    assert (first[0], *other) == (1, 1, "", ""), (first, other)
    assert "expected room at" in first[2]
    assert "checkpoint-1 holds everything up to step 1" in first[2]


def test_ranks_of_a_dry_run_read_the_data_for_themselves(files, tmp_path):
    ended = train(2, tmp_path / "out", files, "--steps", "1", "--dry-run")
    assert [status for status, *_ in ended] == [0, 0], ended
    assert "of each of 2 ranks:" in ended[0][1]
    assert ended[1][1:] == ("", "")
    assert not (tmp_path / "out").exists()


class Store:
    """The parts of torch's store that a crew of one rank uses."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.set = self.values.__setitem__

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= set(self.values)

    def get(self, key: str) -> str:
        return self.values[key]


def test_ranks_are_told_of_any_size():
    store = TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
    teller, hearer = CommandRanks(0, 2, store), CommandRanks(1, 2, store)
    late = threading.Timer(0.2, hearer.gather)
    late.start()
    teller.gather()
    assert store.check(["outcore/came/1"])
    late.join()
    values = [b"0123456789abcdef" * 2**20, "short"]
    for value in values:
        teller.tell(value)
    assert [hearer.hear() for _ in values] == values


def test_rank_0_ends_when_all_have_heard():
    """The store that they share may end with its process."""
    store = Store()
    teller, hearer = CommandRanks(0, 2, store), CommandRanks(1, 2, store)
    teller.tell("all is done")
    ending = threading.Thread(target=teller.end)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    assert hearer.hear() == "all is done"
    ending.join(30)
    assert not ending.is_alive()


def test_who_waits_until_rank_0_has_said_it():
    """A rank waits for rank 0's report, unless its own error decides its status."""
    lost = LaneError("a lane failed")
    lost.__cause__ = OtherRankError("rank 1: expected all ranks to come")
    for error, has_begun, status in (
        (SaidElsewhereError(2), False, 2),
        (lost, True, 1),
        (ConfigError("a mistake"), False, 1),
        (KeyError("of a library"), False, 1),
        (KeyError("here alone"), True, None),
        (ConfigError("damaged while it ran"), True, None),
    ):
        store = Store()
        crew = CommandRanks(1, 2, store)
        crew.has_begun = has_begun
        said = threading.Timer(0.0 if has_begun else 0.3, store.set, ("outcore/said", "1"))
        said.start()
        if has_begun:  # also if rank 0 was first
            said.join()
        assert crew.told(error) == status, error
        said.join()
        assert isinstance(error, SaidElsewhereError) or "outcore/heard/1" in store.values


@pytest.mark.parametrize("told", [(0, 1), (1,)], ids=["all", "one of them"])
def test_a_signal_stops_all_behind_a_checkpoint(told, files, tmp_path):
    out = tmp_path / "out"
    arguments = ["train", *files, *MEMORY, *RUN, "--out", str(out), "--steps", "100000"]
    ranks = start(MAIN, 2, arguments, timeout_s=60)
    try:
        while not ranks[0].stdout.readline().startswith("step "):  # until the first step is over
            assert ranks[0].poll() is None
        for number in told:
            ranks[number].send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [143, 143], said
    (checkpoint,) = out.glob("checkpoint-*")
    assert f"{checkpoint} holds everything up to step" in said[0][1]
    assert said[1] == ("", "")


SPAWN = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from outcore.command.train.spawn import spawn
sys.exit(spawn(2, sys.argv[1:]))
"""


def spawn(program: str, **options) -> subprocess.Popen:
    return nursery.Popen([sys.executable, "-c", SPAWN, "-c", program], stdout=-1, stderr=-1, text=True, **options)


def test_nproc_starts_ranks_and_has_their_status():
    with spawn("import os; os.write(1, f\"{os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n\".encode())") as process:
        said = process.communicate(timeout=120)
    assert (process.returncode, sorted(said[0].split("\n")), said[1]) == (0, ["", "0 2", "1 2"], "")
    with spawn("import sys; sys.exit(2)") as process:
        assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 2


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_signals_to_nproc_reach_all_ranks(sent, status):
    program = (
        "import os, signal, sys, time\n"
        "for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):\n"
        "    signal.signal(one, lambda number, _: (os.write(1, b'got %d\\n' % number), sys.exit(0)))\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(300)"
    )
    with spawn(program) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(sent)
        said = process.communicate(timeout=120)
    assert (process.returncode, said) == (status, (f"got {int(sent)}\n" * 2, ""))


def test_number_of_processes(monkeypatch):
    assert (num_processes("3"), num_processes("1")) == (3, None)
    for wrong in ("0", "many", "-1", "1.5"):
        with pytest.raises(ConfigError, match=f"--nproc: expected a positive integer, but got '{wrong}'"):
            num_processes(wrong)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert num_processes("2") is None
    with pytest.raises(ConfigError, match="one of 2 processes .* and --nproc says 3; leave one out"):
        num_processes("3")
