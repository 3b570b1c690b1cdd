"""The library alone needs four packages; a command says which other package is missing and how to install it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outcore.core.extra import COMMAND_LINE, TRAINER, TRAINING

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {"huggingface-hub": "huggingface_hub", "pyyaml": "yaml"}
# Python cannot find any of the packages in BLOCKED.
HOOK = """
import os, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        blocked = name.partition(".")[0] in os.environ["BLOCKED"].split()
        return None if blocked else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""
STEP = """
import torch, outcore
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
before = [p.clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters())
with outcore.prepare(model, optimizer, units=[torch.nn.Linear]) as (model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    outcore.save_pretrained(model, "saved")
assert not any(map(torch.equal, before, model.parameters()))
print("trained", sorted({name.partition(".")[0] for name in sys.modules} & set(os.environ["BLOCKED"].split())))
"""
RUN = "from outcore.command.start import main; sys.argv[1:] = {arguments!r}; main()"


def python(code: str, blocked: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BLOCKED": " ".join(blocked)}
    return subprocess.run(
        [sys.executable, "-c", HOOK + code], env=env, cwd=folder, capture_output=True, text=True, check=False
    )


def outcore(*arguments: str, without: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    return python(RUN.format(arguments=list(arguments)), without, folder)


def names(requirements: list[str]) -> set[str]:
    found = {requirement.partition(">")[0] for requirement in requirements}
    return {IMPORTED_AS.get(name, name) for name in found}


def test_pyproject_lists_the_same_packages():
    assert names(PROJECT["dependencies"]) == {"torch", "numpy", "safetensors", "psutil"}
    assert names(PROJECT["optional-dependencies"]["train"]) == set(TRAINING)


def test_the_library_needs_none_of_them(tmp_path):
    done = python(STEP, (*TRAINING, "tqdm", "tokenizers", "pyarrow", "pandas", "jinja2"), tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained []\n"), done.stderr


@pytest.mark.parametrize("arguments", [("train", "--help"), ("env",), ("--version",)], ids=" ".join)
def test_help_and_environment_need_the_command_line_alone(arguments, tmp_path):
    without = tuple(name for name in TRAINING if name not in COMMAND_LINE)
    done = outcore(*arguments, without=without, folder=tmp_path)
    said = "outcore env: loading PyTorch\n" if arguments == ("env",) else ""
    assert (done.returncode, done.stderr) == (0, said)


@pytest.mark.parametrize(("without", "named"), [(("transformers",), "package transformers"), (TRAINER, "packages")])
def test_the_mixin_says_what_is_missing(without, named, tmp_path):
    done = python("from outcore.integrations.transformers import OutcoreMixin", without, tmp_path)
    assert done.stderr.splitlines()[-1].startswith(f"outcore.core.errors.ConfigError: expected the {named}")
    assert done.stderr.endswith("; pip install 'outcore[train]'\n")


JOB = ("--model", "config.json", "--data", "text.txt", "--out", "run")


@pytest.mark.parametrize(
    ("arguments", "without", "named"),
    [
        (("train", *JOB), ("trl",), "expected the package trl, but it is not installed"),
        (("dpo", *JOB), ("peft", "yaml"), "expected the packages peft, yaml, but they are not installed"),
        (("demo",), ("transformers",), "expected the package transformers, but it is"),
        (("train", *JOB), TRAINING, "expected the packages pydantic, rich, typer, but they are"),
        (("train", "--help"), ("typer",), "expected the package typer, but it is"),
        (("env",), ("typer",), "expected the package typer, but it is"),
    ],
    ids=str,
)
def test_what_is_missing_is_said(arguments, without, named, tmp_path):
    done = outcore(*arguments, without=without, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"outcore: {named}")
    assert done.stderr.endswith("; pip install 'outcore[train]'\n")
    assert (done.stderr.count("\n"), done.stdout, os.listdir(tmp_path)) == (1, "", [])
