"""A timeline as a picture: a self-contained SVG with a row per lane.

Spans are coloured by what they do. What compute waits for is red and hatched, in a row of its own under the name of the
lane. On the right of each row are its busy time and the speed at which it moved bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from outcore.spec.timeline import COMPUTE, Span, Timeline

LEFT, RIGHT, TOP, WIDTH = 112, 190, 64, 1480
ROW, GAP, AXIS, LEGEND = 30, 8, 34, 26
CHARACTER = 6.2
"""Width of a letter 10 pixels high."""
WAIT = "waits"
OUTER = {"forward": "#dbe7f5", "backward": "#e4dcf1", "step": "#d9d9d9"}
"""Colours of the whole model's spans, around those of units."""
COLOURS = {
    "forward": "#3b78b8",
    "backward": "#7a55a6",
    "step()": "#d9d9d9",
    "update": "#d98326",
    "fetch, read": "#4d9a57",
    "gradients": "#2a9d9a",
    "write": "#a56b3f",
    "other": "#9b9b9b",
    "compute waits": "url(#wait)",
}
_WAIT = "compute waits"
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12" fill="#222222">
<defs><pattern id="wait" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#f6c4be"/><rect width="2.4" height="6" fill="#c92a2a"/></pattern></defs>
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="{left}" y="26" font-size="17" font-weight="bold">{title}</text>
<text x="{left}" y="46" fill="#555555">{subtitle}</text>
"""


def svg(timeline: Timeline, title: str) -> str:
    """Draw a timeline, such as that of one step.

    Args:
        timeline: A timeline with at least one span.
        title: What ran, and where.

    Returns:
        The file's text.
    """
    rows = list(_rows(timeline))
    height = TOP + len(rows) * (ROW + GAP) + AXIS + LEGEND
    busy_s, exposed_s = timeline.busy_s(), timeline.exposed_s()
    waits = ", ".join(f"{lane} {_seconds(s)}" for lane, s in exposed_s.items() if s > 0) or "nothing"
    subtitle = f"{_seconds(timeline.wall_s)}; compute busy {_seconds(busy_s[COMPUTE])}; waits for {waits}"
    parts = [_HEAD.format(width=WIDTH, height=height, left=LEFT, title=escape(title), subtitle=escape(subtitle))]
    scale = (WIDTH - LEFT - RIGHT) / max(timeline.wall_s, 1e-9)
    for i, _ in enumerate(rows):
        y = TOP + i * (ROW + GAP)
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" fill="#f5f5f5"/>')
    parts += _axis(timeline.wall_s, scale, TOP, height - AXIS - LEGEND)
    for i, (name, spans, note) in enumerate(rows):
        y = TOP + i * (ROW + GAP)
        parts.append(_text(LEFT - 10, y + ROW * 0.66, name, anchor="end"))
        parts.append(_text(WIDTH - RIGHT + 10, y + ROW * 0.66, note, colour="#555555"))
        parts += [_box(span, y, timeline.start_s, scale, is_wait=name == WAIT) for span in spans]
    parts += _legend(height - LEGEND + 4, timeline)
    return "\n".join(parts) + "\n</svg>\n"


def last_step(timeline: Timeline) -> Timeline:
    """The last recorded step: from the end of one ``step()`` to that of the next."""
    ends = [s.end_s for s in timeline.spans if (s.lane, s.name) == (COMPUTE, "step")]
    start_s = ends[-2] if len(ends) > 1 else timeline.start_s
    return timeline.between(start_s, ends[-1])


def kind_of(name: str) -> str:
    """What an operation does, by its name: a key of ``COLOURS``."""
    first = name.split()[0] if name else ""
    if first in ("fetch", "read", "bring"):
        return "fetch, read"
    if first in ("write", "send"):
        return "write"
    if first == "step":
        return "step()"
    return first if first in COLOURS else "other"


def _rows(timeline: Timeline) -> Iterator[tuple[str, Sequence[Span], str]]:
    """Yield each row's name, its spans, and the text on its right."""
    busy_s, moved = timeline.busy_s(), timeline.moved_bytes()
    wall_s = max(timeline.wall_s, 1e-9)
    for lane in timeline.lanes():
        spans = [s for s in timeline.spans if s.lane == lane]
        if not spans and lane != COMPUTE:
            continue
        note = f"{busy_s[lane] / wall_s:.0%} busy"
        if moved[lane] and busy_s[lane] > 0:
            rate = moved[lane] / busy_s[lane]
            note += f", {rate / 1e9:.3g} GB/s" if rate >= 1e9 else f", {rate / 1e6:.3g} MB/s"
        yield lane, sorted(spans, key=lambda s: (s.start_s, -s.end_s)), note
        if lane == COMPUTE and timeline.waits:
            yield WAIT, timeline.waits, f"{sum(timeline.exposed_s().values()) / wall_s:.0%} exposed"


def _box(span: Span, y: float, start_s: float, scale: float, *, is_wait: bool) -> str:
    x, width = LEFT + (span.start_s - start_s) * scale, max(span.duration_s * scale, 0.4)
    kind = _WAIT if is_wait else kind_of(span.name)
    is_outer = span.lane == COMPUTE and not is_wait and span.name in OUTER
    inset = 0 if is_outer else 3
    colour = OUTER[span.name] if is_outer else COLOURS[kind]
    about = f"{span.lane}: {span.name}, {_seconds(span.duration_s)} from {_seconds(span.start_s - start_s)}"
    about += f", {span.nbytes / 1e6:.4g} MB" if span.nbytes else ""
    box = (
        f'<rect x="{x:.2f}" y="{y + inset:.1f}" width="{width:.2f}" height="{ROW - 2 * inset:.1f}" fill="{colour}"'
        + (' stroke="#ffffff" stroke-width="0.5"' if not is_outer and width > 3 else "")
        + f"><title>{escape(about)}</title></rect>"
    )
    label = "" if is_outer else _label(span, is_wait=is_wait)
    if label and width > CHARACTER * len(label) + 4:
        colour = "#7a1010" if is_wait else "#ffffff"
        box += _text(x + width / 2, y + ROW * 0.62, label, anchor="middle", colour=colour, size=10, halo=is_wait)
    return box


def _label(span: Span, *, is_wait: bool) -> str:
    """Return the number of the unit, or the end of its name; for a wait, what it is for."""
    unit = span.name.rsplit(" ", 1)[-1].rsplit(".", 1)[-1]
    return f"{span.lane} {unit}" if is_wait else unit


def _axis(wall_s: float, scale: float, top: float, bottom: float) -> Iterator[str]:
    """Draw lines at round times, in seconds."""
    step_s = _round_step(wall_s / 8) if wall_s > 0 else 1.0
    digits = max(0, -math.floor(math.log10(step_s)))
    for i in range(int(wall_s / step_s + 1e-6) + 1):
        x = LEFT + i * step_s * scale
        yield f'<path d="M{x:.2f} {top - 6}V{bottom + 4}" stroke="#cccccc" stroke-width="1" fill="none"/>'
        yield _text(x, bottom + 18, f"{i * step_s:.{digits}f} s", anchor="middle", colour="#555555")


def _round_step(least: float) -> float:
    """Return the next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least)


def _legend(y: float, timeline: Timeline) -> Iterator[str]:
    kinds = {kind_of(s.name) for s in timeline.spans} | ({_WAIT} if timeline.waits else set())
    x = float(LEFT)
    for kind in (k for k in COLOURS if k in kinds):
        yield f'<rect x="{x:.1f}" y="{y}" width="14" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(x + 19, y + 10, kind, colour="#555555")
        x += 19 + 7 * len(kind) + 22


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "#222222",
    size: int = 12,
    halo: bool = False,
) -> str:
    around = ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{around}>'
        f"{escape(text)}</text>"
    )
