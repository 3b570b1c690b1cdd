"""The page of a plan: self-contained, true to the answer, and interactive in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from outcore.command.plan.answer import Answer, answer
from outcore.command.plan.page import facts_of, page
from outcore.command.plan.question import Question
from outcore.command.plan.recipes import Gain, gains
from outcore.command.plan.text import to_text

from .browser import Page, browsing, find_browser
from .conftest import CONFIG, Run, write_json

PICTURES = ["#units", "#timeline", "#tiers svg", "#curves svg"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    """Homes on all three tiers, so that every lane and every kind of home appears. The folder's name is hostile."""
    folder = tmp_path_factory.mktemp("page") / "<b>&model<"
    folder.mkdir()
    return answer(
        Question(
            model=str(write_json(folder / "config.json", CONFIG)),
            hardware="rtx-4090",
            batch_size=2,
            seq_len=64,
            grad_accum=1,
            precision="bf16",
            clipping=True,
            device_memory="400KiB",
            host_memory="500KiB",
            disk_size=None,
        )
    )


@pytest.fixture(scope="module")
def helping(answered: Answer) -> tuple[Gain, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a name of Transformers that will go
        return gains(answered)


@pytest.fixture(scope="module")
def facts(answered: Answer, helping: tuple[Gain, ...]) -> dict[str, Any]:
    return facts_of(answered, helping)


def test_says_the_order_of_the_updates(answered: Answer):
    names = tuple(unit.name for unit in answered.found.plan.units)
    plan = dataclasses.replace(answered.found.plan, updated_first=names[:-5:-1], kept_updated_first=False)
    turned = dataclasses.replace(answered, found=dataclasses.replace(answered.found, plan=plan))
    usual = dataclasses.replace(plan, updated_first=(), kept_updated_first=True)
    said = [
        f"Updates begin with {', '.join(names[:-4:-1])} and 1 more in the plan's order",
        "still in slots are updated in their turn, not first.",
    ]
    assert all(text in facts_of(turned, ())["time_text"] for text in said)
    assert all(text[1:].rstrip(".") in to_text(turned, ()) for text in said)
    quiet = dataclasses.replace(answered, found=dataclasses.replace(answered.found, plan=usual))
    assert not any(text[1:] in facts_of(quiet, ())["time_text"] for text in said)


def test_of_several_ranks(config_json: Path, command: Run, tmp_path: Path):
    given = ("--model", config_json, "--hardware", "a100-80gb", "--batch-size", 1, "--seq-len", 64)
    many = ("--gpus-per-node", 2, "--nodes", 2, "--host-memory", "1GiB")
    assert command("plan", *given, *many, "--html", tmp_path / "page.html").status == 0
    data = json.dumps(data_of((tmp_path / "page.html").read_text()))
    assert "received by each per step" in data
    assert "Between ranks" in data


@pytest.fixture(scope="module")
def text(facts: dict[str, Any]) -> str:
    return page(facts)


class Seen(HTMLParser):
    """The tags of a page, and everything that could lead elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if given.get("id") else []
        self.links += [value for name in ("src", "href", "srcset", "action") if (value := given.get(name))]


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(found[1])


def test_one_file_without_network(text: str):
    seen = Seen()
    seen.feed(text)
    assert seen.links == ["data:,"]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text
    assert "{{" not in text
    assert len(set(seen.ids)) == len(seen.ids)
    script = (files("outcore.command.plan") / "page.js").read_text()
    assert set(re.findall(r'byId\("([\w-]+)"\)', script)) <= set(seen.ids)
    assert {"main", "h1", "h2", "h3", "svg", "canvas", "details", "noscript"} <= set(seen.tags)


def test_nothing_in_a_name_becomes_markup(text: str):
    assert "<b>" not in text
    assert data_of(text)["model"] == "<b>&model<"


def test_the_data_is_the_answer(answered: Answer, helping: tuple[Gain, ...], facts: dict[str, Any], text: str):
    data, found = data_of(text), answered.found
    assert data == json.loads(json.dumps(facts))
    assert [unit["name"] for unit in data["units"]] == [unit.name for unit in found.plan.units]
    for unit, planned in zip(data["units"], found.plan.units, strict=True):
        assert (unit["weights"][0], unit["states"][0]) == (planned.weights, planned.states)
    time = data["timeline"]
    assert len(time["spans"]) == len(found.simulation.timeline.spans)
    assert {"compute", "d2h", "update"} <= set(time["lanes"])
    assert max(start + lasts for _, _, _, start, lasts, _ in time["spans"]) == pytest.approx(time["wall_s"], rel=1e-4)
    reserved = {tier["tier"]: sum(part["bytes"] for part in tier["parts"]) for tier in data["tiers"]}
    assert reserved["host"] == found.plan.tier_bytes["host"]
    assert reserved["device"] == found.plan.tier_bytes["device"] + found.plan.kept_bytes
    for curve in data["curves"]:
        today = [point for point in curve["points"] if point["is_today"]]
        assert [point["step_s"] for point in today] == [found.simulation.step_s]
    assert [recipe["options"] for recipe in data["recipes"]] == [gain.recipe.options for gain in helping]
    assert data["verdict"].startswith("Fits. ")
    assert len(data["sources"]) > 10
    assert all(value or source for *_, value, source in data["sources"])  # what is not known is left out


def test_the_command_writes_it(command: Run, config_json: Path, tmp_path: Path):
    small = ("--device-memory", "40MiB", "--seq-len", 64)
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *small, "--html", tmp_path / "plan.html")
    assert done.status == 0, done.err
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    lost = tmp_path / "none" / "plan.html"
    done = command("plan", "--model", config_json, "--hardware", "rtx-4090", *small, "--html", lost)
    assert (done.status, done.out) == (2, "")
    assert "--html: expected a file in a folder that is there" in done.err


# In a browser.


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium on PATH, and OUTCORE_TEST_BROWSER names none")
    with browsing(browser, tmp_path_factory.mktemp("browser")) as opened:
        opened.ask("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)
        yield opened


@pytest.fixture
def shown(tab: Page, text: str, tmp_path: Path) -> Page:
    path = tmp_path / "plan.html"
    path.write_text(text, encoding="utf-8")
    tab.said.clear()
    tab.requested.clear()
    tab.open(path, width=900)
    return tab


def window(tab: Page) -> tuple[float, float]:
    """The part of time that the timeline shows."""
    return tuple(tab.evaluate("[...['from', 'to'].map((n) => +document.getElementById('timeline').dataset[n])]"))


def middle(tab: Page) -> tuple[float, float]:
    """The middle of the timeline's first row, scrolled into view."""
    tab.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    tab.settle()
    box = tab.evaluate("(({x, y, width}) => [x + width / 2, y + 44])(timeline.getBoundingClientRect())")
    return box[0], box[1]


@pytest.mark.parametrize("width", [360, 900, 1800])
@pytest.mark.parametrize("is_dark", [False, True])
def test_pictures_are_there_and_nothing_sticks_out(shown: Page, tmp_path: Path, width: int, is_dark: bool):
    shown.open(tmp_path / "plan.html", width=width, is_dark=is_dark)
    for picture in PICTURES:
        sizes = shown.evaluate(
            f"[...document.querySelectorAll('{picture}')].map((e) => [e.clientWidth, e.clientHeight])"
        )
        assert sizes, picture
        assert all(wide > 150 and high > 20 for wide, high in sizes), picture
    assert shown.evaluate("document.querySelectorAll('#units rect').length") >= 12  # 3 rows of 4 units
    assert shown.evaluate("document.querySelectorAll('#curves circle.today').length") == 3
    colors = shown.evaluate(
        "(() => { const c = document.getElementById('timeline'); const seen = new Set(); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; for (let i = 0; i < d.length; i += 4) seen.add(d[i] * 65536 + "
        "d[i + 1] * 256 + d[i + 2]); return seen.size; })()"
    )
    assert colors > 20
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.said == []
    assert {url.split(":")[0] for url in shown.requested} == {"file"}
    assert all(url.endswith("/plan.html") for url in shown.requested)


def test_wheel_drag_pinch_keys_and_buttons_zoom(shown: Page):
    x, y = middle(shown)
    start, stop = window(shown)
    shown.turn(x, y, -300)
    near = window(shown)
    assert near[1] - near[0] < 0.8 * (stop - start)
    assert sum(near) == pytest.approx(start + stop, rel=0.05)  # the middle stays in place
    shown.drag(x, y, 60)
    assert window(shown)[0] < near[0]
    assert window(shown)[1] - window(shown)[0] == pytest.approx(near[1] - near[0])
    before = window(shown)
    shown.pinch(x, y, before=80, after=240)
    assert window(shown)[1] - window(shown)[0] < 0.8 * (before[1] - before[0])
    shown.evaluate("timeline.focus()")
    before = window(shown)
    shown.press("+", "+")
    assert window(shown)[1] - window(shown)[0] == pytest.approx(0.6 * (before[1] - before[0]))
    shown.press("ArrowRight")
    assert window(shown)[0] > before[0]
    shown.press("0", "0")
    assert window(shown) == pytest.approx((start, stop))
    shown.evaluate("document.getElementById('zoom-all').click()")
    shown.settle()
    assert window(shown)[1] == pytest.approx(2 * stop, rel=0.01)
    assert shown.said == []


def test_pointing_says_what_it_is(shown: Page):
    _, y = middle(shown)
    x = shown.evaluate(
        "(() => { const t = JSON.parse(data.textContent).timeline, box = timeline.getBoundingClientRect();"
        "const [, , , start, lasts] = t.spans.filter((s) => s[0] === 0).sort((a, b) => b[4] - a[4])[0];"
        "return box.x + box.width * ((start + lasts / 2) % t.step_s) / t.step_s; })()"
    )
    shown.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    shown.settle()
    assert re.search(r"compute: \w+ .*, \d", shown.evaluate("document.getElementById('span-said').textContent"))
    shown.evaluate("document.getElementById('units').focus()")
    shown.press("ArrowRight")
    assert "weights" in shown.evaluate("document.getElementById('unit-said').textContent")


def test_everything_is_said_in_words_too(shown: Page):
    named = shown.evaluate(
        "[...document.querySelectorAll('[role=img]')].map((e) => (e.getAttribute('aria-label') || '').length)"
    )
    assert len(named) >= 7
    assert min(named) > 10
    rows = shown.evaluate("[...document.querySelectorAll('table')].map((t) => t.tBodies[0].rows.length)")
    assert len(rows) == 6
    assert min(rows) >= 1
    # WCAG 2.2, 1.4.3: contrast of text against its background.
    for theme in ("light", "dark"):
        shown.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        colors = shown.evaluate(
            "['ink', 'soft', 'surface', 'card', 'good', 'alarm'].map((n) => getComputedStyle(document.documentElement)"
            ".getPropertyValue('--' + n).trim())"
        )
        ink, soft, surface, card, good, alarm = map(luminance, colors)
        for text in (ink, soft):
            assert contrast(text, surface) >= 4.5
            assert contrast(text, card) >= 4.5
        assert contrast(good, card) >= 4.5
        assert min(contrast(alarm, card), contrast(alarm, surface)) >= 4.5
    # A field takes the number of tokens.
    shown.evaluate("tokens.value = 0; tokens.oninput()")
    assert shown.evaluate("takes.textContent").startswith("0 seconds")


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
