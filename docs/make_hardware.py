"""Write the tables of ``hardware.md``: models on machines that people have, as ``outcore plan`` predicts them.

    python docs/make_hardware.py

What is found is kept in ``hardware.json``, under a digest of what was asked. Only what is new, or asked otherwise, is
planned for again: all of it takes about 25 minutes of one core.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outcore.command.plan.answer import Answer, answer_for, source_of
from outcore.command.plan.known_models import known_models
from outcore.command.plan.question import Question
from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_rate
from outcore.planner.timing.known_hardware import known_hardware

PAGE = Path(__file__).resolve().with_name("hardware.md")
KEPT = PAGE.with_suffix(".json")
BEGIN, END = "<!-- made by make_hardware.py -->", "<!-- end of what is made -->"
DAY_S, YEAR_DAYS, ENOUGH = 86400, 365, 100
"""``ENOUGH``: tokens per second from which the first line of a machine names a model."""

MODELS = {
    "4B": "Qwen/Qwen3-4B",
    "8B": "meta-llama/Llama-3.1-8B",
    "14B": "Qwen/Qwen3-14B",
    "30B-A3B": "Qwen/Qwen3-30B-A3B",
    "32B": "Qwen/Qwen3-32B",
    "70B": "meta-llama/Llama-3.1-70B",
}
LORA = {"lora": 16}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "compact masters": {"master_format": "compact"},
    "8-bit states": {"optim": "adamw_8bit"},
    "pure bf16": {"precision": "pure_bf16"},
    "LoRA": LORA,
    "QLoRA": {**LORA, "load_in_4bit": True},
}
USUAL = ("full", "8-bit states", "LoRA", "QLoRA")
LIMITS = {
    "compute": "GPU",
    **dict.fromkeys(("disk_read", "disk_write"), "drive"),
    **dict.fromkeys(("h2d", "d2h"), "bus"),
    "update": "processor",
    "host": "processor",
}


class Table(NamedTuple):
    """A machine with one size of host memory."""

    title: str
    hardware: str
    models: tuple[str, ...]
    methods: tuple[str, ...] = USUAL
    gpus: int = 1


SMALL, LARGE = ("8B", "14B", "32B"), ("8B", "32B", "70B")
THREE = ("full", "LoRA", "QLoRA")
MACHINES: Mapping[str, tuple[Table, ...]] = {
    "RTX 3060 (12 GB)": (Table("64 GB of DDR4", "rtx-3060+64GiB", ("4B", "8B", "14B")),),
    "RTX 3090 (24 GB)": (Table("64 GB of DDR4", "rtx-3090+64GiB", SMALL),),
    "RTX 4090 (24 GB)": (
        Table("64 GB of DDR5", "rtx-4090+64GiB", ("4B", "8B", "14B", "30B-A3B", "32B"), tuple(METHODS)),
        Table("128 GB of DDR5", "rtx-4090+128GiB", ("8B", "14B", "30B-A3B", "32B")),
    ),
    "RTX 5090 (32 GB)": (
        Table("128 GB of DDR5", "rtx-5090+128GiB", (*SMALL, "70B")),
        Table("256 GB of DDR5 in four modules", "rtx-5090+desktop-ddr5-4dimms+256GiB", SMALL, USUAL[:2]),
    ),
    "Two RTX 3090": (Table("128 GB of DDR4", "rtx-3090+128GiB", ("8B", "14B"), THREE, gpus=2),),
    "Two RTX 4090": (Table("128 GB of DDR5", "rtx-4090+128GiB", ("8B", "14B"), THREE, gpus=2),),
    "RTX A6000 (48 GB)": (Table("256 GB, 8 channels of DDR4", "rtx-a6000", LARGE),),
    "L40S (48 GB)": (Table("512 GB, 12 channels of DDR5", "l40s+512GiB", LARGE),),
    "A100 (80 GB)": (Table("512 GB, 8 channels of DDR4", "a100-80gb", LARGE),),
    "H100 (80 GB)": (Table("1 TB, 12 channels of DDR5", "h100", ("8B", "30B-A3B", "32B", "70B")),),
    "H200 (141 GB)": (Table("1 TB, 12 channels of DDR5", "h200", ("32B", "70B")),),
    "B200 (180 GB)": (Table("2 TB, 16 channels of DDR5", "b200", ("32B", "70B")),),
    "MI300X (192 GB)": (Table("1 TB, 12 channels of DDR5", "mi300x", ("32B", "70B")),),
}


class Cell(NamedTuple):
    """One question."""

    table: Table
    model: str
    method: str

    @property
    def name(self) -> str:
        """Return its name in the file of what is kept."""
        return f"{self.table.gpus} x {self.table.hardware}, {self.model}, {self.method}"

    @property
    def asked(self) -> dict[str, Any]:
        """Return what is asked beside model and machine."""
        batch: dict[str, Any] = {"batch_size": 2, "seq_len": 2048, "grad_accum": 4, "precision": "bf16"}
        return {**batch, "clipping": True, "gpus_per_node": self.table.gpus, **METHODS[self.method]}

    @property
    def digest(self) -> str:
        """Return a digest of all that is asked: the shapes of the model and every figure of the machine among it."""
        model = next(known for known in known_models() if known.name == MODELS[self.model])
        machine = dataclasses.asdict(known_hardware(self.table.hardware))
        figures = {kind: {**part, "sources": None} for kind, part in machine.items() if isinstance(part, dict)}
        text = json.dumps([self.asked, dict(model.config), figures], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def found(self) -> dict[str, Any]:
        """Plan. Returns: tokens/s, what limits them, and days until the drive is worn out, if it is written to."""
        sizes = dict.fromkeys(("device_memory", "host_memory", "disk_size"))
        question = Question(model=MODELS[self.model], hardware=self.table.hardware, **sizes, **self.asked)
        try:
            answer = answer_for(question, source_of(question.model), known_hardware(self.table.hardware))
        except PlanInfeasibleError:
            return {"tokens_per_s": None}
        binding = answer.found.simulation.binding
        return {
            "tokens_per_s": answer.tokens_per_s,
            "limit": max(binding, key=binding.__getitem__, default="compute"),
            "drive_days": _drive_days(answer),
        }


def _drive_days(answer: Answer) -> float | None:
    disk = answer.hardware.disk
    if disk is None or not answer.written_bytes:
        return None
    return disk.endurance_bytes / answer.written_bytes * answer.found.simulation.step_s / DAY_S


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for table in (table for tables in MACHINES.values() for table in tables):
        yield from (Cell(table, model, method) for model in table.models for method in table.methods)


def kept() -> dict[str, Any]:
    """Return what was found before."""
    return dict(json.loads(KEPT.read_text())) if KEPT.exists() else {}


def find() -> dict[str, Any]:
    """Plan for each cell that is not kept, and keep it."""
    found = kept()
    for cell in cells():
        if found.get(cell.name, {}).get("asked") != cell.digest:
            found[cell.name] = {"asked": cell.digest, **cell.found()}
            KEPT.write_text(json.dumps(found, indent=0) + "\n")
    return {cell.name: found[cell.name] for cell in cells()}


def text_of(cell: Mapping[str, Any]) -> str:
    """Say what was found of a cell."""
    if cell["tokens_per_s"] is None:
        return "does not fit"
    days = cell["drive_days"]
    limit = LIMITS.get(cell["limit"], "links between GPUs")
    worn = f", **drive lasts {_span(days)}**" if days is not None and days < YEAR_DAYS else ""
    return f"{format_rate(cell['tokens_per_s'])} ({limit}{worn})"


def _span(days: float) -> str:
    return f"{days:.0f} days" if days >= 1.5 else f"{24 * days:.0f} hours"


def best(table: Table, found: Mapping[str, Any]) -> str:
    """Say what a person with the machine should do: the largest models that are fast, and what spares the drive."""

    def fastest(*methods: str, spares: bool = True) -> tuple[str, float, float | None] | None:
        """Return the largest model that one of these methods trains fast enough: how, tokens/s, days of the drive."""
        for model in reversed(table.models):
            of_model = {method: found[Cell(table, model, method).name] for method in methods if method in table.methods}
            fast = [
                (each["tokens_per_s"], f"{model} with {method}", each["drive_days"])
                for method, each in of_model.items()
                if (each["tokens_per_s"] or 0) >= ENOUGH
                and spares == (each["drive_days"] is None or each["drive_days"] >= YEAR_DAYS)
            ]
            if fast:
                rate, how, days = max(fast)
                return how, rate, days
        return None

    exact, rounded = fastest("full", "compact masters"), fastest("8-bit states", "pure bf16")
    if exact and rounded and _model(exact) == _model(rounded):
        rounded = None
    largest = [each for each in (exact, rounded, fastest("LoRA"), fastest("QLoRA")) if each]
    said = "; ".join(f"{how} ({format_rate(rate)} tokens/s)" for how, rate, _ in largest) or "nothing that is fast"
    worn = fastest("full", spares=False)
    if worn and worn[2] is not None and (exact is None or _model(worn) != _model(exact)):
        said += f". If you accept a drive worn out in {_span(worn[2])}: {worn[0]} ({format_rate(worn[1])} tokens/s)"
    return f"With {table.title}: {said.replace('with full', 'in full')}."


def _model(of: tuple[str, float, float | None]) -> str:
    return of[0].split()[0]


def tables(found: Mapping[str, Any]) -> str:
    """Return a section for each machine."""
    lines: list[str] = []
    for machine, of_machine in MACHINES.items():
        lines += [f"## {machine}", "", *(f"- {best(table, found)}" for table in of_machine)]
        for table in of_machine:
            lines += ["", f"| {table.title} | {' | '.join(table.methods)} |", "|---" * (1 + len(table.methods)) + "|"]
            for model in table.models:
                row = (text_of(found[Cell(table, model, method).name]) for method in table.methods)
                lines.append(f"| {model} | {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def page(found: Mapping[str, Any]) -> str:
    """Return the page with today's tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(found)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(find()))
