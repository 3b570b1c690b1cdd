"""The command line's frame: quick help, exit statuses, one message instead of a traceback."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys

import pytest
import typer

from outcore.command import main as cli
from outcore.command.start import LoadingNotice
from outcore.command.terminal import Terminal, fitted
from outcore.command.train.output.notices import notices
from outcore.core.errors import ConfigError, DiskError, PlanInfeasibleError


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["outcore", *args])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    return stop.value.code


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def demo() -> None:
        raise error

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(("command", "option"), [("demo", "--steps"), ("train", "--device-memory"), ("dpo", "--beta")])
def test_help_needs_no_torch(command, option):
    """Help is instant and importing torch takes seconds: neither the package nor the command line may import it."""
    code = (
        f"import sys; sys.argv[1:] = ['{command}', '--help']\n"
        "from outcore.command.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy', 'yaml', 'transformers'} & sys.modules.keys() or 'light')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert option in done.stdout
    assert done.stdout.splitlines()[-1] == "light"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("plan --model gpt2 --device-memory 3XB", "--device-memory: expected bytes"),
        ("plan --model no/such/model", "--model 'no/such/model': expected a directory"),
        ("plan --model config.json", "--model 'config.json': expected JSON"),
        ("plan --model gpt2 --hardware rtx-409", "the nearest is 'rtx-4090'"),
        ("plan --model gpt2 --load-in-4bit", "--load-in-4bit: expected --lora RANK"),
        ("plan --fit --precision bf15", "--precision: expected one of"),
        ("plan --model gpt2 --seq 3", "--seq"),
        ("train --model gpt2 --out o", "but got no --data"),
        ("train run.yaml --model no/such/model --data model.json", "--model 'no/such/model': expected a directory"),
        ("train run.yaml", "--data 'nowhere.jsonl': expected a file or a directory, but there is none"),
        ("dpo run.yaml --data model.json --host-memory 3XB", "--host-memory: expected bytes"),
        ("train run.yaml --data model.json --hardware rtx-409", "the nearest is 'rtx-4090'"),
        ("train run.yaml --data model.json --set outcore.device_memory=3XB", "--set outcore.device_memory: expected"),
    ],
)
def test_what_needs_no_torch_is_refused_without_it(tmp_path, typed, says):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "run.yaml").write_text("data: nowhere.jsonl\nout: run\noutcore: {host_memory: 1GiB}\n")
    (tmp_path / "model.json").write_text("{}")
    model = [] if "--model" in typed or typed.startswith("plan") else ["--model", "model.json"]
    code = (
        "import sys\n"
        "from outcore.command.start import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, {'torch', 'transformers'} & sys.modules.keys() or 'light')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *typed.split(), *model],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert says in done.stderr
    assert done.stdout == "2 light\n"
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.json", "run.yaml"}


def test_loading_torch_is_said_once_by_the_first_rank(monkeypatch, capsys):
    for rank, said in (("0", "outcore train: loading PyTorch\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        loading = LoadingNotice("outcore train")
        assert [loading.find_spec(name) for name in ("json", "torch.nn", "torch", "torch")] == 4 * [None]
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("steps: expected 1 or more, but got 0"), 2),
        (PlanInfeasibleError("device: needs 3 GiB of 1 GiB", {"device": 3 * 2**30}), 2),
        (DiskError("short read"), 1),
    ],
)
def test_an_error_is_one_message_and_a_status(monkeypatch, capsys, error, status):
    fail_with(monkeypatch, error)
    assert run(monkeypatch) == status
    captured = capsys.readouterr()
    assert captured.err == f"outcore: {error}\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback(monkeypatch):
    fail_with(monkeypatch, AssertionError("slot 3 is taken twice"))
    monkeypatch.setattr(sys, "argv", ["outcore"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(AssertionError, match="slot 3"):
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_is_130(monkeypatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert run(monkeypatch) == 130


def test_sigterm_unwinds(monkeypatch):
    def demo() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    monkeypatch.setattr(cli, "app", app)
    assert run(monkeypatch) == 143


@pytest.mark.parametrize("args", [("demo", "--steps", "0"), ("demo", "--step", "3"), ("prove",)])
def test_wrong_usage_is_2(monkeypatch, capsys, args):
    assert run(monkeypatch, *args) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_commands_and_options_are_these():
    """Adding a command or option is a decision, not an accident."""
    command = typer.main.get_command(cli.app)
    options = {name: sorted(p.name for p in sub.params) for name, sub in command.commands.items()}
    group = command.commands["checkpoint"].commands
    options |= {f"checkpoint {name}": sorted(p.name for p in sub.params) for name, sub in group.items()}
    trains = [
        *(
            "activations",
            "assignments",
            "attention",
            "batch_size",
            "compile",
            "config",
            "data",
            "device",
            "device_memory",
            "disk",
            "dry_run",
            "epochs",
        ),
        *(
            "eval_data",
            "grace",
            "grad_accum",
            "hardware",
            "host_memory",
            "keep",
            "load_in_4bit",
            "load_in_8bit",
            "lora",
            "lr",
            "max_grad_norm",
            "model",
            "nproc",
            "out",
        ),
        *(
            "on_nonfinite",
            "optim",
            "plan",
            "precision",
            "report_to",
            "resume",
            "save_every",
            "save_every_minutes",
            "seed",
            "seq_len",
            "steps",
            "trace",
            "unit_micro_batches",
        ),
    ]
    assert options == {
        "checkpoint": [],
        "checkpoint ls": ["directory"],
        "checkpoint prune": ["directory", "keep"],
        "checkpoint verify": ["directory"],
        "demo": ["device", "fit", "folder", "steps"],
        "env": ["as_json"],
        "export": ["checkpoint", "directory", "form", "merge"],
        "plan": sorted(
            [
                *("as_json", "batch_size", "clipping", "device_memory", "disk_size", "fit", "gpus_per_node"),
                *("at_least", "grad_accum", "hardware", "inputs", "list_hardware"),
                *(
                    "host_memory",
                    "html",
                    "load_in_4bit",
                    "load_in_8bit",
                    "lora",
                    "master_format",
                    "model",
                    "nodes",
                    "optim",
                    "out",
                    "precision",
                    "seq_len",
                ),
            ]
        ),
        "probe": ["device", "disk_dir", "out"],
        "train": sorted([*trains, "packing"]),
        "dpo": sorted([*trains, "beta"]),
    }


@pytest.mark.parametrize("name", ["demo", "plan", "probe", "train", "dpo"])
def test_help_explains_every_option_and_fits_a_terminal(monkeypatch, capsys, name):
    command = typer.main.get_command(cli.app).commands[name]
    assert [p.name for p in command.params if len(p.help or "") < 12] == []
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, name, "--help") == 0
    shown = {line.strip() for line in capsys.readouterr().out.splitlines()}
    below = "\n".join(command.help.split("\n\n")[1:])  # the first paragraph may be wrapped
    said = [re.sub(r"\[/?bold\]", "", line).strip() for line in below.splitlines()]
    assert [line for line in said if line not in shown] == [], "no line is wrapped"


@pytest.mark.parametrize(
    "topic", ["assistant_only_loss=true", "prompt and completion", "lora:", "outcore:", "metrics.jsonl", "Exit status"]
)
def test_help_of_train_needs_no_other_page(topic):
    assert topic in typer.main.get_command(cli.app).commands["train"].help


@pytest.mark.parametrize(
    ("args", "resume"),
    [
        (("c.yaml",), None),
        (("--resume", "c.yaml"), "true"),
        (("c.yaml", "--resume"), "true"),
        (("c.yaml", "--resume", "auto"), "auto"),
        (("--resume=auto", "c.yaml"), "auto"),
        (("--resume", "auto", "c.yaml"), "auto"),
    ],
)
def test_resume_takes_a_word_or_none(args, resume):
    command = typer.main.get_command(cli.app).commands["train"]
    params = command.make_context("train", list(args)).params
    assert (str(params["config"]), params["resume"]) == ("c.yaml", resume)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("train", "outcore: prepare: expected MASTER_ADDR and MASTER_PORT in the environment beside WORLD_SIZE"),
        ("demo", "outcore demo: expected one process on one device, but this is rank 1 of 2"),
    ],
)
def test_one_of_several_ranks(command, job, said, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    files = ["--model", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "out"]
    outcome = command(job, *(files if job == "train" else []))
    assert outcome.status == 2
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["torchao", "bitsandbytes", "torch.utils._pytree"])
def test_libraries_that_tell_of_themselves_are_not_heard(name: str, capsys: pytest.CaptureFixture[str]):
    """They warn on import, whatever the command does."""
    log = logging.getLogger(name)
    with notices():
        log.warning("a kernel is not for this machine")
        logging.getLogger("transformers").warning("this is heard")
    assert capsys.readouterr().err == "note: this is heard\n"
    assert log.getEffectiveLevel() <= logging.WARNING


class Wide(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("print_to", ["fitted", "console"])
def test_a_terminal_breaks_lines_between_words(print_to, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [f"word{n}-with-more" for n in range(30)]
    line = "activations  " + " ".join(words)
    if print_to == "fitted":
        text = fitted(line, Wide())
        assert all(each.startswith(13 * " " + "word") for each in text.splitlines()[1:]), "below its column"
        assert all(each.startswith(4 * " " + "word") for each in fitted(4 * " " + " ".join(words), Wide()).splitlines())
        assert fitted(line, io.StringIO()) == line, "elsewhere lines stay whole"
    else:
        console = Terminal(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
        console.print(line, markup=False, soft_wrap=True)
        text = console.file.getvalue()
    assert text.split() == ["activations", *words]
    assert max(map(len, text.splitlines())) <= 80
