"""The options of ``outcore train`` and ``outcore dpo``, and their help. Imports little: help must not wait for torch.

No option has a default here, so that only what was typed overrides a YAML file's value. No option is checked here,
since ``settings`` checks them all with one kind of message, wherever they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from outcore.command.command import Command

_TRAIN_ROWS = """Fine-tune or pre-train a language model that does not fit, with TRL's SFTTrainer.

--model, --data and --out must be given, here or in the YAML file.

[bold]What the data holds[/bold], the same in every row:
  text                   plain text; a .txt file is one text
  prompt and completion  two texts; the loss is on the completion
  messages               a list of {"role": ..., "content": ...}, and perhaps
                         tools beside it. With --set assistant_only_loss=true
                         the loss is on what the assistant says
ShareGPT conversations and Alpaca instructions are read as these.
"""

_DPO_ROWS = """Teach a language model that does not fit to prefer answers, with TRL's DPOTrainer.

--model, --data and --out must be given, here or in the YAML file.
The model is trained against a frozen copy of itself, which lives within the
same memory; with --lora no copy is needed.

[bold]What the data holds[/bold], the same in every row:
  prompt               a text, or a list of {"role": ..., "content": ...}
  chosen and rejected  the better and the worse answer, as the prompt is; they
                       may also begin with it, in place of a prompt
"""

_HELP = """{rows}These are the keys of a JSON line or the columns of a table.

[bold]What the YAML file holds[/bold]: the options below (batch_size for --batch-size),
every field of TRL's {config}, under lora: those of PEFT's LoraConfig, and
under outcore: the options for memory. Options and --set override the file.
  model: Qwen/Qwen3-0.6B
  data: {data}
  out: run
  lr: {lr}
  lr_scheduler_type: cosine
  {own}
  lora: {{r: 8, lora_dropout: 0.1}}
  outcore: {{device_memory: 20GiB, host_memory: 48GiB, disk: /mnt/nvme}}

[bold]Examples[/bold]
{examples}

[bold]What is written to --out[/bold]
  model/         what from_pretrained loads: the model, or the LoRA adapters,
                 with tokenizer and chat template
  plan.json      where every byte lives
  metrics.jsonl  a line per step: step, epoch, loss, lr, grad_norm,
                 tokens_per_s, step_s, compute_s, bytes moved and seconds
                 waited for per lane, peak bytes per tier; and a line per
                 evaluation
  checkpoint-N/  with --save-every or --save-every-minutes, and where a
                 signal stops the run: all that --resume needs

[bold]Exit status[/bold]: 0 done; 2 a mistake in the request, reported before anything
is written; 130 stopped by Ctrl-C; 143 by SIGTERM or SIGUSR1; 1 anything else.
"""

TRAIN_HELP = _HELP.format(
    rows=_TRAIN_ROWS,
    config="SFTConfig",
    data="chats.jsonl",
    lr="1e-5",
    own="assistant_only_loss: true",
    examples="""  outcore train --model Qwen/Qwen3-0.6B --data chats.jsonl --out run
  outcore train --model config.json --data book.txt --out run --steps 500
  outcore train run.yaml --lr 1e-4 --set lora.r=16 --dry-run
  outcore train run.yaml --resume""",
)
DPO_HELP = _HELP.format(
    rows=_DPO_ROWS,
    config="DPOConfig",
    data="pairs.jsonl",
    lr="1e-6",
    own="beta: 0.05",
    examples="""  outcore dpo --model run/model --data pairs.jsonl --out preferred
  outcore dpo run.yaml --beta 0.05 --set lora.r=16 --dry-run
  outcore dpo run.yaml --resume""",
)

_WHAT, _HOW, _WHERE, _OUTPUT = "Model and data", "Training", "Memory", "Output"


class TrainCommand(Command):
    """Accepts ``--resume`` alone or followed by ``auto``: Typer's own options take a value always or never."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give ``--resume`` its value."""
        given: list[str] = []
        for arg in args:
            if arg == "auto" and given[-1:] == ["--resume=true"]:
                given[-1] = "--resume=auto"
            else:
                given.append("--resume=true" if arg == "--resume" else arg)
        return super().parse_args(ctx, given)


def _option(panel: str, metavar: str | None, text: str, *names: str, kind: Any = str) -> Any:
    return Annotated[kind | None, typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel)]


_SHARED: Mapping[str, Any] = {
    "config": Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings in YAML.", show_default=False)
    ],
    "model": _option(
        _WHAT,
        "DIR|ID|config.json",
        "A directory with config.json and safetensors, a model's ID on the Hugging Face hub, or a config.json alone: a "
        "new model with random weights. Without a tokenizer beside it, every byte is a token.",
    ),
    "data": _option(
        _WHAT,
        "FILE[:WEIGHT]|DIR|ID",
        "A .txt, .jsonl, .csv or .parquet file, a directory of them, or a data set on the hub as ID, ID:split or "
        "ID:config:split. Its contents are described above. Repeat it for more: all rows in this order, or with a "
        "weight for each, as many rows as there are, drawn by weight.",
        kind=list[str],
    ),
    "eval_data": _option(
        _WHAT,
        "FILE|DIR|ID",
        "Data to evaluate on, every --save-every (or eval_steps) steps, else after every epoch; repeat it for more.",
        kind=list[str],
    ),
    "lora": _option(_WHAT, "RANK", "Train LoRA adapters of this rank in all linear layers, not the weights."),
    "load_in_4bit": _option(
        _WHAT,
        None,
        "Under --lora: quantise the base to 4 bits with bitsandbytes, weight by weight as it is read (QLoRA). nf4, or "
        "--set bnb_4bit_quant_type=fp4; --set bnb_4bit_use_double_quant=true saves some more.",
        "--load-in-4bit",
        kind=bool,
    ),
    "load_in_8bit": _option(_WHAT, None, "The same to 8 bits.", "--load-in-8bit", kind=bool),
    "steps": _option(_HOW, "N", "Optimizer steps of the whole run."),
    "epochs": _option(_HOW, "N", "Passes over the data, instead of --steps; 3 by default."),
    "batch_size": _option(_HOW, "N", "Rows that go through the model at once; 8 by default."),
    "grad_accum": _option(_HOW, "N", "Batches per optimizer step; 1 by default."),
    "seq_len": _option(_HOW, "N", "Tokens per row, 1024 by default; longer rows are cut."),
    "lr": _option(_HOW, "X", "Peak learning rate; 2e-5 by default, 1e-6 in dpo."),
    "optim": _option(
        _HOW,
        "NAME",
        "The optimizer, by its name in Transformers: adamw_torch_fused (the default), adamw_8bit, lion_32bit, "
        "adafactor and others. Or muon: Muon for the matrices of blocks, AdamW for the rest; settings of Muon are in "
        "--set optim_args=momentum=0.95,ns_steps=5.",
    ),
    "max_grad_norm": _option(_HOW, "X", "Clip the gradient's norm to this; 1 by default, 0 for no clipping."),
    "precision": _option(
        _HOW,
        "WORD",
        "bf16: bf16 weights with fp32 masters and optimizer states, the default. fp32: all in fp32. pure_bf16: all in "
        "bf16. fp16: fp16 weights with fp32 masters, and a gradient scaler, for GPUs without bf16.",
    ),
    "attention": _option(
        _HOW,
        "NAME",
        "Transformers' implementation of attention: sdpa, eager, flash_attention_2 and others, if they are installed; "
        "what the model takes by itself by default.",
    ),
    "compile": _option(
        _HOW,
        None,
        "Compile the model's blocks with torch.compile. It takes a minute or so at the start, and needs a compiler.",
        "--compile",
        kind=bool,
    ),
    "unit_micro_batches": _option(
        _HOW,
        "N",
        "Run the rows of a micro-batch through each block in N pieces, so that its weights come once for all of them. "
        "The result is that of accumulation over N micro-batches, each an N-th as large.",
    ),
    "seed": _option(_HOW, "N", "Seed of new weights, data order and dropout; 42 by default."),
    "device_memory": _option(
        _WHERE, "SIZE", "The most to take on the device, such as 20GiB or 500MB; most of what is free by default."
    ),
    "host_memory": _option(
        _WHERE, "SIZE", "The most to take in host memory; most of what is free here, or in the container."
    ),
    "disk": _option(
        _WHERE,
        "DIR",
        "Folder on a fast drive for what memory cannot hold; repeat it for several drives. Without it nothing goes to "
        "disk.",
        kind=list[str],
    ),
    "plan": _option(_WHERE, "FILE", "A plan.json to follow, from another run or edited."),
    "activations": _option(
        _WHERE,
        "TIER",
        "host or disk: what forward saves rests there until backward, instead of being recomputed. Kept on the device "
        "by default, as far as it fits.",
    ),
    "hardware": _option(
        _WHERE,
        "FILE",
        "What outcore probe wrote, or names of parts: the machine that times are predicted for. This one by default, "
        "measured once; none: plans are made without times.",
    ),
    "nproc": _option(
        _WHERE,
        "R",
        "Train with R processes on this machine, each on a GPU of its own, as torchrun --nproc-per-node R -m outcore "
        "does. A step has R times the rows. Memory on host and disk is for all of them.",
    ),
    "device": _option(_WHERE, "NAME", "cpu or cuda; the accelerator if there is one."),
    "out": _option(_OUTPUT, "DIR", "Folder to write to; new or empty, unless --resume."),
    "save_every": _option(_OUTPUT, "N", "Save a checkpoint every N steps and at the end; none by default."),
    "save_every_minutes": _option(
        _OUTPUT,
        "M",
        "Save a checkpoint when the last one is M minutes old, and at the end; may stand beside --save-every.",
    ),
    "grace": _option(
        _OUTPUT,
        "S",
        "Seconds from SIGTERM or SIGUSR1 to the end of the run, 30 by default: it finishes its step, with an "
        "evaluation that is due, and saves a checkpoint. When the time is over, it stops at once.",
    ),
    "keep": _option(_OUTPUT, "N", "Keep the newest N checkpoints; all by default."),
    "resume": _option(
        _OUTPUT,
        "[auto]",
        "Go on from the newest complete checkpoint in --out, as if the run had not stopped. Give the same settings "
        "again, or more --steps. With auto a run that has saved nothing yet begins anew.",
    ),
    "on_nonfinite": _option(
        _OUTPUT,
        "WORD",
        "What to do when the loss or the gradient's norm is nan or infinite. stop: end the run before the update, the "
        "default. skip: leave the update out. go: update all the same.",
    ),
    "report_to": _option(
        _OUTPUT, "NAME", "A tracker that is installed, such as tensorboard; repeat it for more.", kind=list[str]
    ),
    "trace": _option(
        _OUTPUT,
        "FILE",
        "Record what every lane does, and what the run waits for, in three steps after the first two (of a short run "
        "the last ones), for ui.perfetto.dev or chrome://tracing. An older trace is replaced, no other file.",
    ),
    "dry_run": _option(_OUTPUT, None, "Check everything, print settings and plan, and stop.", "--dry-run", kind=bool),
    "assignments": Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting that the YAML file may hold; repeat it for more. VALUE is YAML.",
        ),
    ],
}
TRAIN: Mapping[str, Any] = {
    **_SHARED,
    "packing": _option(
        _HOW,
        None,
        "Fill rows up to --seq-len with several texts. On for plain text, else off.",
        "--packing/--no-packing",
        kind=bool,
    ),
}
"""Options of ``outcore train``: name -> annotation."""
DPO: Mapping[str, Any] = {
    **_SHARED,
    "beta": _option(_HOW, "X", "How close to stay to the reference; 0.1 by default, more is closer."),
}
"""Options of ``outcore dpo``."""
