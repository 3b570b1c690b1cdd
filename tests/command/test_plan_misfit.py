"""A plan that does not fit: what would do, tried for real, as text, JSON and a page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from outcore.command.plan.known_models import known_models

from .conftest import CONFIG, Run, write_json

MACHINE = ("--hardware", "rtx-4090+pcie4+desktop-ddr4+no-disk", "--seq-len", "64", "--batch-size", "6")


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A model whose states are most of what it needs."""
    more = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    return write_json(tmp_path / "config.json", {**CONFIG, **more})


def test_it_is_json_a_page_and_text(command: Run, wide: Path, tmp_path: Path):
    asked = ("plan", "--model", wide, *MACHINE, "--device-memory", "24MiB", "--host-memory", "24MiB")
    done = command(*asked, "--json", "--html", tmp_path / "page.html")
    found = json.loads(done.out)
    assert (done.status, found["fits"], found["batch_size"]) == (2, False, 6)
    assert found["required_bytes"]["host"] > 24 * 2**20
    assert "no placement fits" in found["message"]
    assert "no placement fits" in done.err
    fitting = [each["options"] for each in found["recipes"] if each["fits"]]
    assert [each["options"] for each in found["recipes"]][: len(fitting)] == fitting
    assert fitting[0] == "--lora 16"  # options before hardware
    assert {each["result"] for each in found["recipes"]} == {"same bits", "other rounding", "other training"}
    assert fitting[-1] == "a disk, such as desktop-nvme"
    page = (tmp_path / "page.html").read_text()
    for options in fitting:
        assert f"  {options} " in page
        assert f"  {options} " in done.err
    assert command("plan", "--model", wide, *MACHINE, "--json").out.startswith('{\n  "fits": true,')


def test_what_is_advised_does(command: Run, wide: Path):
    asked = ("plan", "--model", wide, *MACHINE, "--device-memory", "24MiB", "--host-memory", "24MiB")
    advice = json.loads(command(*asked, "--json").out)["recipes"]
    kinds = {" ".join(re.findall("--[a-z-0-9]+", each["options"])) for each in advice}
    assert {"--lora", "--optim", "--master-format", "--precision", "--batch-size --grad-accum"} <= kinds
    for each in advice:
        if each["options"].startswith("--"):
            more = shlex.split(each["options"].replace(" --load-in-4bit", ""))
            is_4bit = "--load-in-4bit" in each["options"]
            typed = dict(zip(asked[1::2], asked[2::2], strict=True)) | dict(zip(more[::2], more[1::2], strict=True))
            words = [word for pair in typed.items() for word in pair] + ["--load-in-4bit"] * is_4bit
            assert command("plan", *words).status == (0 if each["fits"] else 2), each


def test_none_of_the_known_models_fits(command: Run, monkeypatch: pytest.MonkeyPatch):
    smallest = known_models()[-2:]
    monkeypatch.setattr("outcore.command.plan.known_models.known_models", lambda: smallest)
    done = command("plan", "--fit", "--hardware", "rtx-4090", "--device-memory", "1MiB", "--json")
    assert (done.status, json.loads(done.out)["fits"]) == (2, False)
