"""``outcore dpo`` end to end: it trains what TRL's DPOTrainer trains, over all tiers, and it can be resumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from outcore.command.train.model import reference
from outcore.command.train.model.byte_tokenizer import byte_tokenizer
from outcore.command.train.model.reference import PlacedModel, plan_both
from outcore.core.errors import PlanInfeasibleError
from outcore.spec.budget import Budget

from .conftest import CHECKPOINTING, CONFIG, Run, read_jsonl, write_jsonl

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning",
)

# Windows of three batches, of which the last in an epoch is short; a clipped norm; a schedule with a warmup.
LOOP = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    "max_length": 24,
    "beta": 0.3,
    "loss_type": ["sigmoid", "ipo"],
}
ALL_TIERS = {"device", "host", "disk"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with random weights; dropout makes the order of random numbers matter."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**CONFIG, "attention_dropout": 0.1, "initializer_range": 0.1})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [{"prompt": f"q {n}?", "chosen": f" yes, {n}", "rejected": " no" + n * " never"} for n in range(7)]
    return write_jsonl(tmp_path / "pairs.jsonl", rows)


def plain(weights: Path, folder: Path, rows: list[dict[str, Any]], evaluation: Any = None, **more: Any) -> DPOTrainer:
    """The same job, trained by TRL's trainer with everything in memory."""
    args = DPOConfig(
        output_dir=str(folder), save_strategy="no", logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True,
        bf16=False, **{CHECKPOINTING: False}, per_device_eval_batch_size=1, **{**LOOP, **more},
    )  # fmt: skip
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if evaluation is None else Dataset.from_list(evaluation),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    return trainer


def dpo(command: Run, weights: Path, data: Path, out: Path, *more: Any, **settings: Any) -> Any:
    options = [part for name, value in (LOOP | settings).items() for part in ("--set", f"{name}={json.dumps(value)}")]
    shared = ("--model", weights, "--data", data, "--out", out, "--precision", "fp32", "--disk", out.parent)
    return command("dpo", *shared, *options, *more)


def assert_same_lines(out: Path, trainer: DPOTrainer) -> None:
    """Check that the output has everything that TRL logs, bit for bit."""
    bookkeeping = ("runtime", "per_second", "step", "epoch", "num_tokens", "learning_rate")
    for first in ("loss", "eval_loss"):
        mine = [line for line in read_jsonl(out / "metrics.jsonl") if first in line]
        theirs = [line for line in trainer.state.log_history if first in line]
        assert len(mine) == len(theirs) > 0
        names = [name for name in theirs[0] if not name.endswith(bookkeeping)]
        assert len(names) > 9
        for name in names:
            assert [line[name] for line in mine] == [line[name] for line in theirs], name


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def tiers_used(folder: Path) -> set[str]:
    units = json.loads((folder / "plan.json").read_text())["units"]
    return {unit[what] for unit in units for what in ("weights", "gradients", "states")}


def test_model_and_reference_over_all_tiers_equal_the_plain_trainer(command, weights, pairs, tmp_path):
    out, evaluation = tmp_path / "run", ("--eval-data", pairs)
    tiers = ("--device-memory", "430KiB", "--host-memory", "700KiB")
    done = dpo(command, weights, pairs, out, *tiers, *evaluation, eval_steps=2)
    assert done.status == 0, done.err
    assert tiers_used(out) == ALL_TIERS
    assert "its frozen reference:" in done.out
    said = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert ["beta", "0.3"] in said
    assert ["loss_type", "sigmoid, ipo"] in said
    trainer = plain(
        weights, tmp_path / "plain", read_jsonl(pairs), read_jsonl(pairs), eval_strategy="steps", eval_steps=2
    )
    assert_same_lines(out, trainer)
    trained = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    assert_equal(dict(trained.state_dict()), dict(trainer.model.state_dict()))
    assert sorted(p.name for p in out.iterdir()) == ["metrics.jsonl", "model", "plan.json"]
    line = read_jsonl(out / "metrics.jsonl")[0]
    alone = json.loads((out / "plan.json").read_text())["tier_bytes"]
    assert line["peak_bytes"]["device"] > alone["device"], "the reference counts"
    assert line["peak_bytes"]["device"] <= 430 * 2**10
    assert line["peak_bytes"]["host"] <= 700 * 2**10
    judged = f"margin {line['rewards/margins']:.3f}  accuracy {line['rewards/accuracies']:.3f}"
    assert f"loss {line['loss']:.3f}  {judged}  " in done.out


def test_adapters_need_no_reference_and_are_the_same_over_all_tiers(command, weights, pairs, tmp_path):
    tiers = ("--device-memory", "180KiB", "--host-memory", "130KiB")
    for name, more in (("one", ()), ("three", tiers), ("away", ("--activations", "disk"))):
        done = dpo(command, weights, pairs, tmp_path / name, "--lora", 2, *more)
        assert done.status == 0, done.err
        assert "reference" not in done.out
    assert tiers_used(tmp_path / "one") == {"device"}
    assert tiers_used(tmp_path / "three") > {"device"}
    units = json.loads((tmp_path / "away" / "plan.json").read_text())["units"]
    assert {unit["activations"] for unit in units[1:]} == {"disk"}
    losses = [[line["loss"] for line in read_jsonl(tmp_path / n / "metrics.jsonl")] for n in ("one", "three", "away")]
    assert losses[0] == losses[1] == losses[2]
    names = [tmp_path / name / "model" / "adapter_model.safetensors" for name in ("one", "three", "away")]
    adapters = [load_file(name) for name in names]
    assert_equal(*adapters[:2])
    assert_equal(*adapters[1:])
    assert any(tensor.any() for name, tensor in adapters[0].items() if "lora_B" in name), "they were trained"


def test_conversations_and_prompts_inside_of_answers(command, weights, tmp_path):
    """As TRL does, the shared beginning of both answers is taken as the prompt."""

    def answers(n: int) -> dict[str, Any]:
        asked = [{"role": "system", "content": "Short."}, {"role": "user", "content": f"{n}?"}]
        said = {"chosen": f"It is {n}.", "rejected": "Who knows?"}
        return {name: [*asked, {"role": "assistant", "content": text}] for name, text in said.items()}

    data, out = write_jsonl(tmp_path / "chats.jsonl", [answers(n) for n in range(5)]), tmp_path / "run"
    done = dpo(command, weights, data, out, max_length=128, max_steps=2)
    assert done.status == 0, done.err
    trainer = plain(weights, tmp_path / "plain", read_jsonl(data), max_length=128, max_steps=2)
    assert [line["loss"] for line in read_jsonl(out / "metrics.jsonl")] == [
        line["loss"] for line in trainer.state.log_history if "loss" in line
    ]


def test_a_resumed_run_ends_where_the_whole_one_ends(command, weights, pairs, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert dpo(command, weights, pairs, whole, "--save-every", 2).status == 0
    shutil.copytree(whole, out)
    for name in ("checkpoint-4", "model"):
        shutil.rmtree(out / name)
    done = dpo(command, weights, pairs, out, "--save-every", 2, "--resume")
    assert done.status == 0, done.err
    assert "at step 2 of 4" in done.out
    assert_equal(*(load_file(folder / "model" / "model.safetensors") for folder in (out, whole)))


def test_a_dry_run_writes_nothing(command, weights, pairs, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    done = dpo(command, weights, pairs, tmp_path / "run", "--dry-run")
    assert done.status == 0, done.err
    assert "its frozen reference:" in done.out
    assert "rows" in done.out.partition("Data")[2]
    assert sorted(tmp_path.rglob("*")) == before


def test_cut_rows_are_counted(command, weights, pairs, tmp_path):
    done = dpo(command, weights, pairs, tmp_path / "run", max_steps=1, max_length=13)
    assert done.status == 0, done.err
    assert "--data: 6 of 7 rows have more than 13 tokens and are cut; raise --seq-len" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--data", "messages"), "expected preferences .*, but found 'messages'; train on it with outcore train"),
        (("--data", "half"), "line 1: expected 'prompt' and 'chosen' and 'rejected', but found 'prompt', 'chosen'"),
        (("--data", "apart"), "line 1: expected a 'prompt', or that 'chosen' and 'rejected' begin with it"),
        (("--model", "config"), "expected a model with weights, of which the reference is a copy"),
        (("--seq-len", "2"), "--data: expected rows with something to learn, but nothing is left of all 7"),
        (("--set", "loss_type=[sigmod]"), "--set loss_type: expected one of sigmoid, .* did you mean 'sigmoid'"),
        (("--set", "f_divergence_type=kl"), "--set f_divergence_type: expected one of reverse_kl, .* but got 'kl'"),
        (("--set", "precompute_ref_log_probs=true"), "expected this to be left out.*the frozen reference is kept"),
        (("--set", "sync_ref_model=true"), "sync_ref_model"),
        (("--set", "packing=true"), "--set packing: unknown setting 'packing'"),
        (("--set", "metric_for_best_model=rewards/margins"), "expected --eval-data"),
        (("--beta", "-1"), "--beta: expected a number of at least 0, but got"),
        (("--device-memory", "100KiB"), "the model and its frozen reference together"),
    ],
)  # fmt: skip
def test_is_refused(command, weights, pairs, config_json, tmp_path, options, says):
    files = {
        "config": config_json,
        "messages": write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "a"}]}]),
        "half": write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "chosen": "b"}]),
        "apart": write_jsonl(tmp_path / "c.jsonl", [{"chosen": "b", "rejected": "c"}]),
    }
    name, value = options
    shared = {"--model": weights, "--data": pairs, "--out": tmp_path / "run", "--steps": 1, "--disk": tmp_path}
    typed = {**shared, name: files.get(value, value)}
    before = sorted(tmp_path.rglob("*"))
    done = command("dpo", *(part for item in typed.items() for part in item))
    assert done.status == 2, done.err
    said = " ".join(line for line in done.err.splitlines() if not line.startswith("note: "))
    assert re.search(says, said), said
    assert "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_what_the_error_names_is_enough(command, weights, pairs, tmp_path):
    little = dpo(command, weights, pairs, tmp_path / "run", "--device-memory", 1, "--host-memory", 1)
    assert little.status == 2
    named = little.err.rpartition("as options: ")[2].split(";")[0].split()
    done = dpo(command, weights, pairs, tmp_path / "run", *named, max_steps=1)
    assert done.status == 0, done.err


class TestSharing:
    """How two planners share a budget. Each needs at least ``least`` of a tier and takes at most ``most``."""

    def planner(self, least: tuple[int, int], most: tuple[int, int]) -> reference.Planner:
        def plan(budget: Budget) -> Any:
            got = (min(budget.device, most[0]), min(budget.host, most[1]))
            if got[0] < least[0] or got[1] < least[1]:
                raise PlanInfeasibleError("too little", {"device": least[0], "host": least[1], "disk": 0})
            return Fake({"device": got[0], "host": got[1], "disk": 0})

        return plan

    @pytest.mark.parametrize(
        ("given", "want"),
        [
            ((200, 400), (20, 40)),  # in proportion
            ((95, 200), (10, 22)),  # the least that the second one needs
            ((90, 180), (10, 20)),
        ],
    )
    def test_shares(self, given, want):
        ours, other = self.planner((80, 160), (10**6, 10**6)), self.planner((10, 20), (20, 40))
        first, second = plan_both(Budget(device=given[0], host=given[1]), ours, other)
        assert (second.taken["device"], second.taken["host"]) == want
        assert first.taken["device"] + second.taken["device"] <= given[0]

    def test_host_memory_that_another_share_of_the_device_spares(self):
        """Each needs much less host memory with a little more of the device."""

        def planner(host_of: dict[int, int]) -> reference.Planner:
            def plan(budget: Budget) -> Any:
                rows = [row for row in host_of.items() if row[0] <= budget.device]
                fitting = [row for row in rows if row[1] <= budget.host]
                if fitting:
                    return Fake({"device": fitting[-1][0], "host": fitting[-1][1], "disk": 0})
                least = dict(zip(("device", "host"), next(iter(host_of.items())), strict=True))
                raised = {"host": rows[-1][1]} if rows else {}
                raise PlanInfeasibleError("too little", {**least, "disk": 0}, raised)

            return plan

        given = Budget(device=90, host=115)
        first, second = plan_both(given, planner({50: 300, 60: 100}), planner({10: 100, 30: 10}))
        assert (first.taken["device"], second.taken["device"]) == (60, 30)

    def test_too_little(self):
        ours, other = self.planner((80, 160), (80, 160)), self.planner((10, 20), (20, 40))
        with pytest.raises(PlanInfeasibleError, match="together") as refusal:
            plan_both(Budget(device=89, host=180), ours, other)
        assert refusal.value.required_bytes == {"device": 90, "host": 180, "disk": 0}


class Fake(PlacedModel):
    def __new__(cls, taken: dict[str, int]) -> Fake:
        made = super().__new__(cls, None, None)
        made.bytes = taken
        return made

    @property
    def taken(self) -> dict[str, int]:
        return self.bytes
