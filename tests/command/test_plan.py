"""``outcore plan``: an answer without the machine, as text and as data; a plan that a run follows; refusals."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from plans import plan_for

from outcore.command.plan import answer as planning
from outcore.command.plan import plan_request
from outcore.command.plan.answer import answer
from outcore.command.plan.question import Question
from outcore.command.plan.recipes import gains
from outcore.command.train.model.source import build_model, find_model
from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.device.cpu import CpuDevice
from outcore.planner.forward import watch
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.known_parts import known_parts
from outcore.preparation.forecast import Loop, token_batch
from outcore.probe import measured_machines as kept
from outcore.probe.measured_machines import Machine
from outcore.spec.budget import Budget
from outcore.spec.plan import Plan

from .conftest import Run, replaced

SMALL = ("--device-memory", "2MiB", "--host-memory", "4MiB", "--batch-size", 2, "--seq-len", 64)


@pytest.mark.usefixtures("gains")
def test_text_says_what_is_predicted_where_it_lives_and_what_lost(command: Run, config_json: Path):
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *SMALL)
    assert done.status == 0, done.err
    assert re.match(r"Fits\. \S+ tokens/s: a million tokens take \S+ \w+\. Limited by .+ of the step\)\.", done.out)
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines() if line)
    assert {
        "model",
        "machine",
        "step",
        "tokens",
        "busiest",
        "limited",
        "busy",
        "waits",
        "units",
        "activations",
    } <= lines.keys()
    assert re.fullmatch(r"\S+ s \(predicted, \S+ to \S+ s\) for 2 x 64 tokens", lines["step"])
    assert re.fullmatch(r"\S+ per second \(predicted, \S+ to \S+\)", lines["tokens"])
    assert {"not", "peak", "least", "helps"} <= lines.keys()
    assert "budget 2.00 MiB" in done.out


def test_known_hardware_is_listed(command: Run):
    done = command("plan", "--list-hardware")
    assert done.status == 0, done.err
    listed = {line.split()[0] for line in done.out.splitlines() if line.startswith("  ")}
    assert {*known_parts().devices, *known_parts().buses, *known_parts().hosts, *known_parts().disks} <= listed


WHOLE = """
import atexit, sys
from outcore.command import main
from outcore.command import start
class Left:
    def __del__(self): print("taken apart")
left, own = Left(), main.main
def run():
    from outcore.command.plan import recipes
    recipes.gains = lambda _: ()
    atexit.register(print, "closed")
    own()
main.main = run
start.main()
"""


def test_the_command_by_itself_says_the_same_and_ends_at_once(command: Run, config_json: Path):
    asked = ("plan", "--model", config_json, "--hardware", "rtx-4090", *SMALL)
    done = subprocess.run([sys.executable, "-c", WHOLE, *map(str, asked)], capture_output=True, text=True, check=True)
    assert done.stdout == command(*asked).out + "closed\n"


@pytest.mark.parametrize(("name", "least", "most"), [("lion_32bit", 8, 8.6), ("adamw_8bit", 6, 11.8)])
def test_what_an_optimizer_takes(command: Run, config_json: Path, name: str, least: float, most: float):
    """Bytes beside a 4-byte master. In 8 bits, embeddings and small parameters keep 32 bits; most here are small."""
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *SMALL, "--optim", name)
    assert done.status == 0, done.err
    said = next(line.split() for line in done.out.splitlines() if line.startswith("optimizer"))
    assert said[1] == f"{name}:"
    assert least <= float(said[2]) <= most


@pytest.mark.usefixtures("gains")
def test_json_has_the_plan_that_out_has_too(command: Run, config_json: Path, tmp_path: Path):
    machine, plan = tmp_path / "hardware.json", tmp_path / "plan.json"
    known_hardware("a100-40gb+pcie3").save(machine)
    options = (
        "--hardware",
        machine,
        "--grad-accum",
        2,
        "--no-clipping",
        "--out",
        plan,
        *SMALL,
        "--device-memory",
        "900KiB",
    )
    done = command(*replaced("plan", "--model", config_json, *options, "--json"))
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["predicted_step_s"] >= found["busiest_lane"]["seconds"] * 0.999 > 0
    assert found["predicted_tokens_per_s"] == pytest.approx(2 * 2 * 64 / found["predicted_step_s"])
    fast_s, slow_s = found["predicted_step_s_range"]
    assert fast_s <= found["predicted_step_s"] <= slow_s
    assert found["limits"] == {
        "device_bytes": 900 * 2**10,
        "host_bytes": 4 * 2**20,
        "disk_bytes": int(0.9 * 3.84e12),
    }
    assert sum(found["binding"].values()) == pytest.approx(1)
    assert set(found["peak_bytes"]) == {"device", "host", "disk"}
    assert found["peak_bytes"]["host"] <= found["reserved_bytes"]["host"]
    assert found["least_bytes_with_others_as_given"]["host"] <= 4 * 2**20
    assert found["least_bytes"]["device"] <= found["least_bytes_with_others_as_given"]["device"]
    assert sum(way["units"] for way in found["activations"]) == 3
    assert 0 < found["activation_bytes"] <= found["workspace_bytes"] + found["kept_bytes"]
    assert found["recipes"]
    assert all(recipe["gain"] >= 1.02 for recipe in found["recipes"])
    results = [recipe["result"] for recipe in found["recipes"]]
    assert results == sorted(results, key=["same bits", "other rounding", "other training"].index)
    assert Plan.load(plan) == Plan.from_json(json.dumps(found["plan"]))
    assert Plan.load(plan).accumulation_steps == 2


@pytest.mark.parametrize(
    ("device", "host", "hardware", "ways"),
    [
        ("1GiB", "1GiB", {}, {("keep", "device")}),
        ("700KiB", "4MiB", {}, {("recompute", "device")}),
        ("1200KiB", "4MiB", {"bf16_flops": 1e9}, {("select", "device")}),
        ("700KiB", "4MiB", {"bf16_flops": 1e9}, {("recompute", "device"), ("select", "device")}),
        ("1700KiB", "4MiB", {"bf16_flops": 1e9}, {("keep", "host")}),
    ],
    ids=["all on the device", "computed again", "what is dear is saved", "of some units", "all leaves"],
)
def test_a_run_with_these_budgets_would_follow_the_same_plan(
    monkeypatch: pytest.MonkeyPatch,
    config_json: Path,
    tmp_path: Path,
    device: str,
    host: str,
    hardware: dict[str, float],
    ways: set[tuple[str, str]],
):
    monkeypatch.setattr(watch, "SMALL_BYTES", 64)
    machine = known_hardware("rtx-4090+no-disk")
    machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, **hardware))
    machine.save(tmp_path / "hardware.json")
    asked = Question(
        model=str(config_json),
        hardware=str(tmp_path / "hardware.json"),
        batch_size=2,
        seq_len=128,
        grad_accum=2,
        precision="bf16",
        clipping=True,
        device_memory=device,
        host_memory=host,
        disk_size=None,
    )
    found = answer(asked)
    monkeypatch.setattr(CpuDevice, "activation_share", 0.3)  # as on an accelerator
    monkeypatch.setattr(CpuDevice, "has_host_memory", False)
    model = build_model(find_model(str(config_json)), "bf16")
    _, plan = plan_for(
        model,
        torch.optim.AdamW(model.parameters()),
        sample={**token_batch(2, 128), "use_cache": False},
        budget=Budget(device=device, host=host),
        precision="bf16",
        device="cpu",
        hardware=machine,
        loop=Loop(2, is_promised=True, makes_logits=False),
    )
    assert found.found.plan == plan
    assert found.policies.keys() == ways
    assert found.peak_bytes()["device"] <= parse_bytes(device, what="budget")


@pytest.mark.usefixtures("gains")
def test_what_would_help_is_left_out_where_a_card_cannot_compute_it(command: Run, config_json: Path):
    done = command("plan", "--model", config_json, "--hardware", "v100-32gb", "--precision", "fp16")
    assert done.status == 0, done.err
    assert "helps" in done.out
    assert "pure_bf16" not in done.out


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", None), ("fp16", torch.float16)])
def test_a_model_is_followed_as_a_run_computes(
    command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch, precision: str, dtype: torch.dtype | None
):
    """In fp16 a run computes under autocast. What would help, such as pure bf16, is followed later."""
    seen, follow = list[torch.dtype | None](), plan_request.footprint_of

    def watched(*args: Any, **options: Any) -> Any:
        device = args[2].type
        seen.append(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)
        return follow(*args, **options)

    monkeypatch.setattr(plan_request, "footprint_of", watched)
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", "--precision", precision)
    assert done.status == 0, done.err
    assert seen[0] == dtype


@pytest.mark.usefixtures("gains")
def test_a_model_that_cannot_be_followed_is_told_by_its_parameters(
    command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("it needs values")

    monkeypatch.setattr("outcore.command.plan.plan_request.counted_work", refuse)
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *SMALL)
    assert done.status == 0, done.err
    assert "of unknown size, so they get a share of the device, and homes follow the rule: it needs values" in done.out


def test_a_run_of_a_model_that_cannot_be_followed_would_have_the_same_plan(
    config_json: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("it needs values")

    monkeypatch.setattr("outcore.command.plan.plan_request.counted_work", refuse)
    machine = known_hardware("rtx-4090+no-disk")
    slow = dataclasses.replace(machine.host, update_parameters_per_s=1e3)  # a search would let the device update
    dataclasses.replace(machine, host=slow).save(tmp_path / "hardware.json")
    found = answer(asked(config_json, tmp_path / "hardware.json", device_memory="700KiB"))
    assert {unit.update for unit in found.found.plan.units} == {"host"}
    assert gains(found) == ()


def asked(config_json: Path, hardware: Path | None, **more: object) -> Question:
    usual = Question(
        model=str(config_json),
        hardware=None if hardware is None else str(hardware),
        batch_size=2,
        seq_len=64,
        grad_accum=1,
        precision="bf16",
        clipping=True,
        device_memory="2MiB",
        host_memory="4MiB",
        disk_size=None,
    )
    return dataclasses.replace(usual, **more)


class TestThisMachine:
    """Measured without an accelerator: each tier has half of the machine's memory."""

    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        machine = known_hardware("rtx-4090")
        device = dataclasses.replace(machine.device, runs_ahead=0.0, memory_bytes=1e9)
        host = dataclasses.replace(machine.host, memory_bytes=1e9)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("OUTCORE_HARDWARE")
        whole = dataclasses.replace(machine, device=device, host=host)
        monkeypatch.setattr(
            kept, "measure", lambda _, disks, __: whole if disks else dataclasses.replace(whole, disk=None)
        )

    def test_of_what_it_has_most_is_taken_once(self, config_json: Path, tmp_path: Path):
        Machine(None, (tmp_path,)).measure("whole")
        found = answer(asked(config_json, None, device_memory=None, host_memory=None))
        assert (found.limits.device_bytes, found.limits.host_bytes) == (int(0.9e9), int(0.8e9))

    def test_the_disk_that_was_measured_may_have_a_size(self, command: Run, config_json: Path, tmp_path: Path):
        options = ("--model", config_json, *SMALL, "--disk-size", "1GB", "--json")
        done = command("plan", *options)
        assert done.status == 2
        assert "measure this one with outcore probe --disk-dir" in done.err
        assert "note: this machine was measured once" in done.err
        Machine(None, (tmp_path,)).measure("whole")
        done = command("plan", *options)
        assert done.status == 0, done.err
        assert json.loads(done.out)["limits"]["disk_bytes"] == 10**9


def test_a_directory_needs_no_weights(command: Run, config_json: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(config_json.read_text())
    done = command("plan", "--model", tmp_path, "--hardware", "rtx-4090", *SMALL)
    assert done.status == 0, done.err


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer each question once: a test asks again to get the answer in another form."""
    monkeypatch.setattr(planning, "answer", functools.cache(planning.answer))


@pytest.mark.usefixtures("planned_once")
def test_bytes_written_and_what_they_mean_to_a_drive(command: Run, config_json: Path):
    tight = ("--device-memory", "450KiB", "--host-memory", "450KiB", "--seq-len", 16)
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *tight, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["written_bytes_per_1000_steps"] > 0
    assert found["drive_life_steps"] == pytest.approx(1200e12 / (found["written_bytes_per_1000_steps"] / 1000))
    text = command("plan", "--model", config_json, "--hardware", "rtx-4090", *tight).out
    assert "written per 1,000 steps; the drive lasts" in text


RANKS = ("--nodes", 2, "--gpus-per-node", 4)


@pytest.mark.usefixtures("planned_once")
def test_ranks_share_a_node(command: Run, config_json: Path):
    tight = ("--hardware", "a100-80gb", "--host-memory", "4MiB", "--device-memory", "900KiB", "--seq-len", 64)
    alone, *both = (
        command("plan", "--model", config_json, *tight, *options)
        for options in (("--json",), (*RANKS, "--json"), RANKS)
    )
    assert all(done.status == 0 for done in (alone, *both)), both[0].err
    one, found, text = json.loads(alone.out), json.loads(both[0].out), both[1].out
    assert found["limits"]["host_bytes"] == 2**20
    assert found["limits"]["device_bytes"] == one["limits"]["device_bytes"] == 900 * 2**10
    assert found["predicted_tokens_per_s"] == pytest.approx(8 * 64 / found["predicted_step_s"])
    assert found["node_peak_bytes"]["host"] == 4 * found["peak_bytes"]["host"] <= 4 * 2**20
    trained = sum(unit["weights"] is not None for unit in found["plan"]["units"])
    assert trained
    assert 0 < found["received_bytes"]["gather"] <= found["received_bytes"]["reduce"]
    assert one["received_bytes"] == {"reduce": 0, "gather": 0, "link": 0}
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line)
    assert lines["ranks"].startswith("8 (2 nodes x 4)")
    assert "8 ranks with 1 x 64 tokens" in lines["step"]
    assert "of gradients" in lines["received"]
    assert "by all ranks of a node" in text


def test_a_plan_for_ranks_that_does_not_fit_says_what_a_node_needs(command: Run, config_json: Path):
    options = ("--hardware", "h100+no-disk", "--host-memory", "40KiB", "--device-memory", "900KiB", *RANKS)
    done = command("plan", "--model", config_json, *options)
    assert done.status == 2
    assert "These are budgets of one rank. 4 ranks share those of host memory and disk." in done.err


@pytest.mark.parametrize("optim", ["adamw_8bit", "adafactor"])
def test_optimizers_whose_parameters_ranks_cut_elsewhere_or_not_at_all(command: Run, config_json: Path, optim: str):
    done = command("plan", "--model", config_json, "--hardware", "h100", "--optim", optim, *RANKS)
    assert done.status == 0, done.err
    assert "8 (2 nodes x 4)" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hardware", "rtx4090"), "the nearest is 'rtx-4090'"),
        (("--hardware", "none.json"), "expected a readable JSON file at 'none.json'"),
        (("--hardware", "/"), "hardware: expected a JSON file, or names of parts, but '/' is a folder"),
        (("--hardware", "h100", "--gpus-per-node", "8", "--host-memory", "7"), "0 bytes for each of 8 ranks, but got"),
        (("--hardware", "h100", "--gpus-per-node", "8", "--disk-size", "7"), "--disk-size: expected more than 0 bytes"),
        (("--hardware", "h100", "--device-memory", "0"), "--device-memory: expected more than 0 bytes"),
        (("--hardware", "h100", "--host-memory", "-1GiB"), "--host-memory: expected bytes"),
        (("--hardware", "h100+no-disk", "--disk-size", "1TB"), "expected a machine with a disk"),
        (("--hardware", "h100", "--precision", "fp8"), "--precision: expected one of fp32, bf16, pure_bf16"),
        (("--hardware", "h100", "--device-memory", "10KiB"), "no placement fits"),
        (("--hardware", "h100", "--master-format", "bf16"), "--master-format: expected one of fp32, compact, but"),
        (("--hardware", "h100", "--optim", "galore_adamw"), "--optim: expected one of adamw_torch_fused, adamw_torch,"),
        (("--hardware", "h100", "--seq-len", "1000000000"), "expected at most 67,108,864 tokens in a micro-batch"),
        (("--hardware", "h100", "--grad-accum", "100000"), "--grad-accum: expected at most 1,024 micro-batches"),
        (("--hardware", "h100", "--lora", "100000000"), "--lora: expected a rank of at most 260"),
        (("--hardware", "h100", "--model", "~nobody-here"), "--model '~nobody-here': expected"),
        (("--hardware", "h100", "--nodes", "10000000"), "--nodes, --gpus-per-node: expected at most 16,384 ranks"),
    ],
)
def test_bad_input_is_one_message(command: Run, config_json: Path, options: tuple[str, ...], message: str):
    done = command(*replaced("plan", "--model", config_json, *options))
    assert done.status == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--out", "missing/plan.json"),
            "--out: expected a file in a folder that is there, but got 'missing/plan.json'",
        ),
        (("--html", "missing/plan.html"), "--html: expected a file in a folder that is there, but got"),
        (("--out", "."), "--out: expected a file in a folder that is there, but got '.'"),
        (("--html", "."), "--html: expected a file in a folder that is there, but got '.'"),
        (("--out", "same", "--html", "./same"), "--html: expected another file than --out, but got 'same' for both"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_the_search(
    command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
):
    monkeypatch.chdir(config_json.parent)
    monkeypatch.setattr(planning, "answer", lambda *_: pytest.fail("it was planned"))
    done = command("plan", "--model", config_json, "--hardware", "h100", *options)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert [p.name for p in config_json.parent.iterdir()] == ["config.json"]


def test_damaged_hardware_and_unknown_models(command: Run, config_json: Path, tmp_path: Path):
    machine = json.loads(known_hardware("h100").to_json())
    for part, name, value, message in (
        ("bus", "h2d_bytes_per_s", -1, "from 1 to 1e+19, but got -1; correct the file, or measure the machine again"),
        ("bus", "h2d_bytes_per_s", 10**400, f"but got {10**79}; correct"),
        ("device", "memory_bytes", 1, "--device-memory: expected more than 0 bytes, but got 0.9 from 'h100'"),
    ):
        changed = {**machine, part: {**machine[part], name: value}}
        (tmp_path / "hardware.json").write_text(json.dumps(changed))
        done = command("plan", "--model", config_json, "--hardware", tmp_path / "hardware.json")
        assert (done.status, done.out) == (2, "")
        assert message in done.err
    done = command("plan", "--model", tmp_path / "nothing", "--hardware", "h100")
    assert (done.status, done.out) == (2, "")


def test_a_folder_may_have_the_name_of_a_part(command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(config_json.parent)
    (config_json.parent / "h100").mkdir()
    done = command("plan", "--model", config_json, "--hardware", "h100", "--seq-len", 8)
    assert done.status == 0, done.err


def test_rows_must_fit_into_a_table_of_positions(command: Run, tmp_path: Path):
    """OPT's table has two more rows than positions. Rotary positions have no end."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    opt = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 128}
    llama = {"model_type": "llama", "intermediate_size": 64, "vocab_size": 64}
    for config, seq_len, status in ((opt, 64, 0), (opt, 65, 2), (llama, 65, 0)):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **config}))
        done = command("plan", "--model", tmp_path / "config.json", "--hardware", "rtx-4090", "--seq-len", seq_len)
        assert done.status == status, done.err
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **opt}))
    done = command("plan", "--model", tmp_path / "config.json", "--hardware", "rtx-4090", "--seq-len", 65)
    assert "--seq-len: expected at most 64, since 'opt' has a table of 64 positions, but got 65" in done.err


def test_what_is_said_while_planning_is_a_notice(command, config_json: Path, monkeypatch):
    def warn(*_: object) -> None:
        warnings.warn("this machine was measured", stacklevel=1)
        raise ConfigError("that is all")

    monkeypatch.setattr("outcore.command.plan.answer.answer_for", warn)
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090")
    assert done.status == 2
    assert "this machine was measured" in done.err
    assert "UserWarning" not in done.err


def test_from_the_hub_only_the_configuration_is_fetched(config_json: Path, monkeypatch: pytest.MonkeyPatch):
    asked_for = []

    def fetch(name: str, *, allow_patterns: list[str]) -> str:
        asked_for.append((name, allow_patterns))
        return str(config_json.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    found = answer(asked(Path("owner/name"), Path("rtx-4090")))
    assert asked_for == [("owner/name", ["config.json"])]
    assert len(found.spec.units) == 4


def test_well_known_models_need_no_hub(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("nothing is to be fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    built = []
    monkeypatch.setattr(planning, "answer_for", lambda asked, found, *others: built.append(found))
    answer(asked(Path("meta-llama/Llama-3.1-8B"), Path("rtx-4090")))
    assert (built[0].config.num_hidden_layers, built[0].weights) == (32, None)
