"""Make what the README shows of ``outcore plan``: the table of predicted speeds, and two pictures of one plan.

    python docs/make_readme.py

The pictures show where the bytes of ``PICTURE`` live, and what its step does when. Takes about three minutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from outcore.command.plan.answer import Answer, Question, answer
from outcore.command.plan.text import drive_life
from outcore.core.quantities import format_bytes
from outcore.spec.budget import reservations
from outcore.spec.plan import TIERS
from outcore.spec.timeline import COMPUTE, Span

DOCS = Path(__file__).resolve().parent
README, PICTURES = DOCS.parent / "README.md", DOCS / "pictures"
BEGIN, END = "<!-- made by docs/make_readme.py -->\n", "<!-- end of what is made -->"
DESKTOP = "rtx-4090+pcie4+desktop-ddr5+desktop-nvme"
LLAMA, QWEN = "meta-llama/Llama-3.1-", "Qwen/Qwen3-"
PICTURE = {"model": f"{QWEN}8B", "hardware": DESKTOP, "host_memory": "112GiB"}
LORA, QLORA = {"lora": 16}, {"lora": 16, "load_in_4bit": True}
COMPACT = {"master_format": "compact"}
RTX = {64: "RTX 4090, 64 GB", 128: "RTX 4090, 128 GB"}
EIGHT, FOURTEEN, THIRTY_TWO, SEVENTY = "8B (Llama 3.1)", "14B (Qwen 3)", "32B (Qwen 3)", "70B (Llama 3.1)"
IN_64, IN_128, STATES = {"host_memory": "56GiB"}, {"host_memory": "112GiB"}, {"optim": "adamw_8bit"}
ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (EIGHT, RTX[64], "full", IN_64),
    (EIGHT, RTX[64], "full, pure bf16, 8-bit states", {**IN_64, **STATES, "precision": "pure_bf16"}),
    (EIGHT, RTX[64], "LoRA", {**IN_64, **LORA}),
    (EIGHT, RTX[128], "full", IN_128),
    (EIGHT, RTX[128], "full, compact masters (same bits)", {**IN_128, **COMPACT}),
    (EIGHT, RTX[128], "full, compact masters, 8-bit states", {**IN_128, **COMPACT, **STATES}),
    (FOURTEEN, RTX[128], "full", {**IN_128, "model": f"{QWEN}14B"}),
    (THIRTY_TWO, RTX[64], "QLoRA", {**IN_64, **QLORA, "model": f"{QWEN}32B"}),
    (THIRTY_TWO, "H100, 1 TB", "full", {"model": f"{QWEN}32B", "hardware": "h100"}),
    (SEVENTY, RTX[64], "QLoRA", {**IN_64, **QLORA, "model": f"{LLAMA}70B"}),
    (SEVENTY, "H100, 1 TB", "full", {"model": f"{LLAMA}70B", "hardware": "h100"}),
)
"""Model, machine, method, and what is asked beside ``ask``'s defaults."""
LIMITS = {COMPUTE: "GPU", "disk_write": "drive", "disk_read": "drive", "h2d": "bus", "d2h": "bus", "update": "CPU"}
TIER_NAMES = {"device": "GPU", "host": "RAM", "disk": "NVMe drive"}
KINDS = {
    "weights": ("weights (bf16)", "#4d9a57"),
    "gradients": ("gradients (fp32)", "#2a9d9a"),
    "states": ("optimizer states and fp32 masters", "#d98326"),
    "activations": ("activations", "#7a55a6"),
    "slot": ("buffers for bytes on their way", "#9b9b9b"),
}
SAME = {"next_weights": "weights", "next_states": "states", "workspace": "activations", "buffers": "weights"}
LANES = (
    ("GPU computes", (COMPUTE,)),
    ("RAM to GPU", ("h2d", "write_back", "states_h2d")),
    ("GPU to RAM", ("d2h", "states_d2h")),
    ("CPU", ("update",)),
    ("drive reads", ("weights_read", "states_read")),
    ("drive writes", ("disk_write", "states_write")),
)
COLOURS = {
    "forward": "#3b78b8",
    "backward": "#7a55a6",
    "moves": "#9b9b9b",
    "sum": "#2a9d9a",
    "update": "#d98326",
    "waits": "#c92a2a",
}
WORDS = {
    "forward": "forward",
    "backward": "backward, recompute included",
    "moves": "bytes move",
    "sum": "gradients are added",
    "update": "AdamW",
    "waits": "GPU waits",
}
WIDTH, LEFT, RIGHT = 880, 124, 26
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14" fill="#222222">\n'
    '<rect width="100%" height="100%" rx="8" fill="#ffffff"/>'
)


def homes(found: Answer) -> str:
    """Return a picture with a bar per tier, as long as its bytes."""
    sums = {tier: dict.fromkeys(KINDS, 0) for tier in TIERS}
    for each in reservations(found.spec, found.found.plan):
        sums[each.tier][SAME.get(each.kind, each.kind)] += each.nbytes
    sums["device"]["activations"] += found.found.plan.kept_bytes
    scale = (WIDTH - LEFT - RIGHT - 96) / max(sum(kinds.values()) for kinds in sums.values())
    lines = [text(18, 28, title(found, "where its bytes live"), size=15, weight="bold")]
    for i, (tier, kinds) in enumerate(sums.items()):
        x, y = float(LEFT), 50 + i * 62
        lines.append(text(LEFT - 12, y + 27, TIER_NAMES[tier], anchor="end", weight="bold"))
        for kind, nbytes in kinds.items():
            words, colour = KINDS[kind]
            about = f"{words}: {format_bytes(nbytes)}"
            lines += [box(x, y, nbytes * scale, 42, colour, about)] if nbytes else []
            if nbytes * scale > 58:
                lines.append(text(x + nbytes * scale / 2, y + 27, gib(nbytes), anchor="middle", colour="#ffffff"))
            x += nbytes * scale
        lines.append(text(x + 8, y + 27, gib(sum(kinds.values())), colour="#555555"))
    lines += legend(262, [KINDS[kind] for kind in KINDS])
    return picture(lines, 280)


def step(found: Answer) -> str:
    """Return a picture with a row per kind of work over one step."""
    timeline, steps = found.found.simulation.timeline, found.found.simulation.num_steps
    end_s = timeline.start_s + timeline.wall_s
    start_s = end_s - timeline.wall_s / steps
    scale = (WIDTH - LEFT - RIGHT) / (end_s - start_s)
    tokens = found.question.grad_accum * found.question.batch_size * found.question.seq_len
    lines = [text(18, 28, title(found, f"a step of {tokens:,} tokens"), size=15, weight="bold")]
    bottom = 48 + len(LANES) * 36
    for i in range(int((end_s - start_s) / 5) + 1):
        x = LEFT + 5 * i * scale
        lines.append(f'<path d="M{x:.1f} 44V{bottom + 2}" stroke="#dddddd"/>')
        lines.append(text(x, bottom + 18, f"{5 * i} s", anchor="middle", colour="#555555", size=12))
    for i, (name, lanes) in enumerate(LANES):
        y = 48 + i * 36
        lines.append(text(LEFT - 12, y + 19, name, anchor="end"))
        spans = [span for span in timeline.spans if span.lane in lanes and span.end_s > start_s]
        if lanes == (COMPUTE,):
            spans = [span for span in spans if span.name.split()[0] in COLOURS]
        for kind, begin, end in joined(spans, 1.2 / scale):
            begin = max(begin, start_s)
            lines.append(box(LEFT + (begin - start_s) * scale, y, (end - begin) * scale, 28, COLOURS[kind], kind))
        for wait in timeline.waits if lanes == (COMPUTE,) else ():
            begin = max(wait.start_s, start_s)
            if wait.end_s > begin:
                width = (wait.end_s - begin) * scale
                lines.append(box(LEFT + (begin - start_s) * scale, y, width, 28, COLOURS["waits"], "GPU waits"))
    lines += legend(bottom + 42, [(WORDS[kind], COLOURS[kind]) for kind in COLOURS])
    return picture(lines, bottom + 58)


def joined(spans: Sequence[Span], gap_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield (kind, start, end) of work, that of one kind in one piece where what lies between is too short to see."""
    last: tuple[str, float, float] | None = None
    for span in sorted(spans, key=lambda each: each.start_s):
        first = span.name.split()[0]
        kind = first if first in COLOURS else "sum" if span.lane == "update" else "moves"
        if last is not None and last[0] == kind and span.start_s - last[2] <= gap_s:
            last = (kind, last[1], max(last[2], span.end_s))
        else:
            if last is not None:
                yield last
            last = (kind, span.start_s, span.end_s)
    if last is not None:
        yield last


def title(found: Answer, what: str) -> str:
    """Return a title that names model, method and machine."""
    name = found.question.model.rsplit("/", 1)[-1]
    return f"{name} trained in full on an RTX 4090 with 128 GB of RAM: {what}"


def gib(nbytes: float) -> str:
    """Return bytes in few characters."""
    return f"{nbytes / 2**30:.0f} GiB"


def legend(y: float, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield what each colour means."""
    x = 18.0
    for words, colour in rows:
        yield box(x, y - 11, 13, 13, colour, words)
        yield text(x + 19, y, words, size=12, colour="#555555")
        x += 19 + 6.6 * len(words) + 20


def box(x: float, y: float, width: float, height: float, colour: str, about: str) -> str:
    """Return a bar."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height}" fill="{colour}">'
        f"<title>{escape(about)}</title></rect>"
    )


def text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 14, colour: str = "#222222", weight: str = ""
) -> str:
    """Return a line of text."""
    bold = f' font-weight="{weight}"' if weight else ""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{bold}'
    return f"<text {where}>{escape(words)}</text>"


def picture(lines: Sequence[str], height: int) -> str:
    """Return a whole file."""
    return "\n".join([HEAD.format(width=WIDTH, height=height), *lines, "</svg>\n"])


def ask(**changed: Any) -> Answer:
    """Ask as ``outcore plan`` does: by default for 8 micro-batches of 4 x 2048 tokens with clipping."""
    usual = {"model": f"{LLAMA}8B", "hardware": DESKTOP, "batch_size": 4, "seq_len": 2048, "grad_accum": 8}
    sizes = {"device_memory": None, "host_memory": None, "disk_size": None}
    return answer(Question(**{"precision": "bf16", "clipping": True, **usual, **sizes, **changed}))


def table() -> Iterator[str]:
    """Yield the lines of the README's table of predicted speeds."""
    yield "| model | machine | method | tokens/s | GiB of GPU, RAM, drive | limited by | drive lasts |"
    yield "|---|---|---|---|---|---|---|"
    for model, machine, method, changed in ROWS:
        found = ask(**changed)
        binding = found.found.simulation.binding
        link = max(binding, key=binding.__getitem__, default=COMPUTE)
        days = drive_life(found).rpartition(", ")[2] or "-"
        sizes = ", ".join(f"{nbytes / 2**30:.0f}" for nbytes in found.peak_bytes().values())
        limit = LIMITS.get(link, link)
        yield f"| {model} | {machine} | {method} | {found.tokens_per_s:,.0f} | {sizes} | {limit} | {days} |"


def main() -> None:
    """Make the table and both pictures."""
    page = README.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    README.write_text(before + BEGIN + "\n".join([*table(), END]) + after, encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    found = ask(**PICTURE)
    (PICTURES / "homes.svg").write_text(homes(found), encoding="utf-8")
    (PICTURES / "step.svg").write_text(step(found), encoding="utf-8")


if __name__ == "__main__":
    main()
