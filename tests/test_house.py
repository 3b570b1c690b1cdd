"""House rules that no linter has: sizes, words, which modules may open, print or name an accelerator, honest pages."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import outcore

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outcore"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if not path.is_symlink())
CODE = sorted(
    path for folder in ("src", "tests", "research", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)

FILE_LINES, CLASS_LINES, ATTRIBUTES, FUNCTION_LINES = 400, 250, 14, 60  # more attributes are several ideas
README_LINES, PUBLIC_NAMES = 150, 18
# What is above these limits, and how much. A number here may only fall, until it is gone.
LONGER = {
    "api.py: prepare": 73,  # names each argument three times: in the signature, with what it means, in what is asked
    "checkpoint/save_and_load.py": 407,
    "device/device.py: Device": 258,
    "engine/streamed_weights.py: StreamedWeights": 256,
    "integrations/transformers.py: __init__": 69,
    "order/activations.py: ActivationOrder": 255,
    "planner/forward/saved_bytes.py: footprint_of": 64,
    "planner/paper/paper_schedule.py": 410,
    "planner/timing/profile.py: rates_for": 62,
    "planner/timing/simulate.py": 403,
}
MORE_ATTRIBUTES = {"Ledger": 15, "MemoryWatch": 15, "Options": 16, "Player": 15, "Save": 15}
ROOM = 13  # files in a folder: about as many as a reader keeps in mind
# Lines of a folder of the package; "" has the files beside them. A room may only shrink: whoever raises a number says
# behind it what a user gets for the lines.
ROOM_LINES = {
    "": 1_031,  # outcore.plan
    "checkpoint": 4_399,  # a Trainer that writes weights in a form of its own keeps its checkpoints
    "command": 10_221,  # any model is planned, from Python too; four ways to train in --fit; recipes and a verdict
    "core": 284,
    "device": 2_599,
    "engine": 11_510,
    "integrations": 1_662,
    "memory": 3_224,
    "model": 1_507,  # models whose calls differ in strides are planned right
    "optim": 2_628,
    "order": 2_456,
    "planner": 6_382,  # models whose forward checks values, such as vision-language ones, are followed
    "preparation": 967,
    "probe": 1_571,
    "ranks": 889,  # refuses what other libraries replicate, which was in "engine"
    "spec": 2_406,  # cards without bf16, and figures of a user in place of known ones
}
FORBIDDEN_MODULES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
# Entry points of the package; the command and the integrations are imported on demand.
ENTRIES = ("outcore", "outcore.__main__", "outcore.command.main", "outcore.integrations.transformers")
# Users call the first two, tests and benchmarks the third, a Trainer behind the mixin the others; the race checker runs
# in tests alone.
FOR_OTHERS = {
    *("chunked", "explained_s", "num_accesses", "num_pieces", "to_html"),
    *("create_accelerator_and_postprocess", "call_model_init", "compute_ref_log_probs"),
    *("create_model_card", "_move_model_to_device", "_wrap_model", "_load_from_checkpoint", "_load_best_model"),
}
KINDS = {"cpu", "cuda", "mps", "xpu"}
OPENERS = {"open", "fdopen", "safe_open", "read_text", "write_text", "read_bytes", "write_bytes"}
# memory/ opens files. A plan and a machine save and load themselves; the command line reads files that its user names.
MAY_OPEN = ("memory/", "command/", "spec/text_file.py")


def relative(path: Path) -> str:
    return path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT).as_posix()


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(), filename=str(path))))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Return calls, each with the text of its callee."""
    return ((node, ast.unparse(node.func)) for node in nodes(path) if isinstance(node, ast.Call))


def imported(path: Path) -> set[str]:
    names = {alias.name for n in nodes(path) if isinstance(n, ast.Import) for alias in n.names}
    return names | {n.module for n in nodes(path) if isinstance(n, ast.ImportFrom) and n.module}


def modules(*, but: tuple[str, ...] = ()) -> Iterator[tuple[str, Path]]:
    """Return names and files of the package's modules, except names that begin with ``but``."""
    return ((relative(path), path) for path in MODULES if not (but and relative(path).startswith(but)))


def test_sizes():
    too_long = []
    limits = {ast.FunctionDef: FUNCTION_LINES, ast.AsyncFunctionDef: FUNCTION_LINES, ast.ClassDef: CLASS_LINES}
    for name, path in modules():
        found = [(name, len(path.read_text().splitlines()), FILE_LINES)]
        for node in (node for node in nodes(path) if type(node) in limits):
            found.append((f"{name}: {node.name}", node.end_lineno - node.lineno + 1, limits[type(node)]))
        too_long += [each for each in found if each[1] > LONGER.get(each[0], each[2])]
    assert not too_long


def attributes(kind: ast.ClassDef) -> set[str]:
    """Return the attributes that methods set on ``self``, and fields of dataclasses and named tuples."""
    targets = [
        each
        for node in ast.walk(kind)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for each in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    found = {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "self"}
    is_dataclass = any("dataclass" in ast.unparse(d) for d in kind.decorator_list)
    has_fields = is_dataclass or "NamedTuple" in map(last, kind.bases)
    fields = [node for node in kind.body if has_fields and isinstance(node, ast.AnnAssign)]
    return found | {ast.unparse(f.target) for f in fields if "ClassVar" not in ast.unparse(f.annotation)}


def test_attributes():
    kinds = [node for _, path in modules() for node in nodes(path) if isinstance(node, ast.ClassDef)]
    assert not {
        kind.name: len(attributes(kind))
        for kind in kinds
        if len(attributes(kind)) > MORE_ATTRIBUTES.get(kind.name, ATTRIBUTES)
    }


def test_rooms_do_not_grow():
    lines: Counter[str] = Counter()
    for name, path in modules():
        lines[name.partition("/")[0] if "/" in name else ""] += len(path.read_text().splitlines())
    assert not {room: count for room, count in lines.items() if count > ROOM_LINES.get(room, 0)}


def test_no_files_import_one_another():
    """Files that need one another are one file to a reader. Imports for annotations, and in functions, count."""
    files = {"outcore." + name.removesuffix(".py").replace("/", "."): path for name, path in modules()}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    needs = {name: {n for n in mentioned_imports(path) if n in files and n != name} for name, path in files.items()}
    reached = {name: reached_from(name, needs) for name in needs}
    circles = {frozenset(n for n in there if name in reached[n]) for name, there in reached.items() if name in there}
    assert not [sorted(circle) for circle in circles]


def mentioned_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports, with names that may be modules."""
    yield from imported(path)
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached_from(name: str, needs: dict[str, set[str]]) -> set[str]:
    """Return what a file needs, directly or through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = needs[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_rooms():
    files = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert not {relative(folder): count for folder, count in files.items() if count > ROOM}


def test_every_folder_is_a_package():
    """The checker of imports does not see others."""
    assert not [relative(path) for path in MODULES if not (path.parent / "__init__.py").is_file()]


def test_nothing_lies_about_in_the_root():
    """A file without an ending may come from a redirection, for example."""
    assert [path.name for path in ROOT.iterdir() if path.is_file() and "." not in path.name] == ["LICENSE"]


def test_names_of_modules_say_what_they_are():
    assert not [name for name, _ in modules() if FORBIDDEN_MODULES & set(name.removesuffix(".py").split("/"))]


def test_a_name_stands_for_one_thing():
    """No two classes have one name, a leading underscore aside, and no two files."""
    names = Counter(n.name.lstrip("_") for path in MODULES for n in nodes(path) if isinstance(n, ast.ClassDef))
    names += Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_every_module_is_reached():
    files = {"outcore." + name.removesuffix(".py").replace("/", "."): path for name, path in modules()}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    seen: set[str] = set()
    waiting = list(ENTRIES)
    while waiting:
        name = waiting.pop()
        if name in files and name not in seen:
            seen.add(name)
            waiting += mentioned(files[name])
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    assert not files.keys() - seen - packages


def test_no_function_is_for_tests_alone():
    """Compare by name. Methods of a class with a base from another package may be called from there."""
    trees = [node for path in MODULES for node in nodes(path)]
    own = {node.name for node in trees if isinstance(node, ast.ClassDef)} | {"Protocol", "Generic", "ABC", "NamedTuple"}
    said = {node.id for node in trees if isinstance(node, ast.Name)}
    said |= {node.attr for node in trees if isinstance(node, ast.Attribute)}
    said |= {node.value for node in trees if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    foreign = [kind for kind in trees if isinstance(kind, ast.ClassDef) and {last(base) for base in kind.bases} - own]
    theirs = {id(node) for kind in foreign for node in kind.body}
    functions = [node for node in trees if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]
    ours = [f for f in functions if id(f) not in theirs and not any(isinstance(d, ast.Call) for d in f.decorator_list)]
    assert {f.name for f in ours} - said <= FOR_OTHERS


def test_no_constant_is_for_tests_alone():
    trees = [node for path in MODULES for node in nodes(path)]
    read = {node.id for node in trees if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    read |= {node.attr for node in trees if isinstance(node, ast.Attribute)}
    bodies = [node for path in MODULES for node in nodes(path)[0].body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = [t for node in bodies for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    named = {t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("__")}
    assert not named - read


def last(base: ast.expr) -> str:
    """Return the name of a class, without its module and type arguments."""
    return ast.unparse(base).split("[")[0].rpartition(".")[2]


def mentioned(path: Path) -> Iterator[str]:
    """Yield modules that a file imports, and strings that may name a later import."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_prints_only_in_the_command():
    found = [f"{n}:{call.lineno}" for n, p in modules(but=("command/",)) for call, name in calls(p) if name == "print"]
    assert not found


def test_opens_files_only_where_it_may():
    found = [f"{n}:{call.lineno}: {name}" for n, p in modules(but=MAY_OPEN) for call, name in calls(p) if _opens(name)]
    assert not found


def _opens(called: str) -> bool:
    owner, _, name = called.rpartition(".")
    is_constructor = owner.isidentifier() and owner[0].isupper()  # DiskStore.open: memory/ opens, not the caller
    return name in OPENERS and not is_constructor


def test_names_an_accelerator_only_in_the_device():
    found = []
    for name, path in modules():
        if not re.fullmatch(r"device/\w+\.py", name):
            attributes = [n for n in nodes(path) if isinstance(n, ast.Attribute)]
            found += [f"{name}:{n.lineno}" for n in attributes if ast.unparse(n) == "torch.cuda"]
            found += [name] * ("torch.cuda" in imported(path))
    assert not found


def test_private_names_of_torch_stand_in_one_file():
    """Two files are exempt: update kernels have a check of their own, and the accelerator has the sleep for tests."""
    found = []
    for name, path in modules(but=("torch_private.py", "optim/kernels.py", "device/cuda.py")):
        hidden = [n for n in nodes(path) if isinstance(n, ast.Attribute) and re.match("_[a-zA-Z]", n.attr)]
        found += [f"{name}:{n.lineno}" for n in hidden if re.match(r"(torch|nn|distributed)\.", ast.unparse(n))]
        sources = [n for n in nodes(path) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("torch")]
        said = {f"{n.module}.{alias.name}" for n in sources for alias in n.names} | imported(path)
        found += [f"{name}: {each}" for each in said if each.startswith("torch") and "._" in each]
    assert not found


def test_asks_the_device_instead_of_its_name():
    """Whatever depends on the kind of device is a property of ``Device``; the command takes names from its user."""
    asked = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, path in modules(but=("device/", "command/"))
        for node in nodes(path)
        if isinstance(node, ast.Compare) and KINDS & {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    ]
    assert not asked


def test_every_new_tensor_says_where_it_is():
    """Without a device a tensor lands on the default device, which users set for themselves."""
    made = re.compile(r"torch\.(empty|empty_strided|zeros|ones|full|tensor|as_tensor|arange|scalar_tensor)")
    silent = [
        f"{name}:{call.lineno}: {ast.unparse(call)}"
        for name, path in modules()
        for call, called in calls(path)
        if made.fullmatch(called)
        and "device" not in {keyword.arg for keyword in call.keywords}
        and ast.unparse(call) != "torch.empty(0)"  # asks for the default device
    ]
    assert not silent


def test_core_knows_no_torch():
    found = [n for n, p in modules() if n.startswith("core/") and {i.split(".")[0] for i in imported(p)} & {"torch"}]
    assert not found


def test_a_todo_names_an_issue():
    bare = re.compile(r"\bTO" + r"DO\b(?!\(#\d+\))")
    assert not [relative(path) for path in CODE if bare.search(path.read_text())]


def test_public_names():
    assert len(outcore.__all__) <= PUBLIC_NAMES
    assert sorted(outcore.__all__) == list(outcore.__all__)
    assert [name for name in outcore.__all__ if not hasattr(outcore, name)] == []
    assert [name for name in outcore.__all__ if not getattr(outcore, name).__doc__] == []


def test_package_is_typed():
    assert (SOURCE / "py.typed").exists()


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def readme_examples() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)


def test_readme_has_an_example():
    assert readme_examples()


@pytest.mark.parametrize("code", readme_examples())
def test_readme_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    assert list(tmp_path.iterdir()) == []
