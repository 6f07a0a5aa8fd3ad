"""The invariants of the source tree, read from the source: who may import whom, and what no file may be called."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from onward.graph.operators import OPERATORS, Fact, operators_with
from onward.losses.registry import LOSSES
from onward.schedules.learning_rate.registry import DECAYS
from onward.schedules.pipeline.registry import PIPELINES
from tests.conftest import LONGEST_FILES

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "onward"

ORDER = (
    "errors", "untrusted_files", "onnx_files", "tables", "operating_system", "spelling", "deadline", "retries",
    "remote", "exclusive", "losses", "optimizers", "schedules", "parameters", "environment", "graph", "plan",
    "lowering", "parallel", "optim", "data", "engine", "checkpoint", "report", "artifacts", "models", "proposal", "run",
    "training_round", "runner", "fitting", "diagnosis", "device", "commands",
    "cli", "__main__",
)  # fmt: skip
"""Folder order is the way data flows, and the order of dependencies: a part imports only from parts before it."""

FORBIDDEN_NAMES = {"utils", "helpers", "misc", "common", "base", "core", "manager"}
WITHOUT_TORCH = {*ORDER[: ORDER.index("environment")], "graph", "plan"}
MAY_NAME_DISTRIBUTED = {"parallel", "checkpoint"}
LARGEST_FILE_LINES = 400
LARGEST_FUNCTION_LINES = 60
"""Without the docstring, which lists arguments and errors."""
MOST_POSITIONAL_FIELDS = 4
"""Of a dataclass; one with more is built by keyword."""


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all laws."""
    return ast.parse(path.read_text())


@functools.cache
def nodes_in(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, walked once for all laws."""
    return tuple(ast.walk(tree))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def imports(path: Path) -> tuple[tuple[str, int, bool], ...]:
    """(module, line, only for type checkers) of every import in a file, lazy ones included."""
    found = []
    nodes = nodes_in(tree_of(path))
    typing_only = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            found += [(name, node.lineno, id(node) in typing_only) for name in names]
    return tuple(found)


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {part_of(path) for path in source_files()} - {"__init__"}
    assert parts <= set(ORDER), f"parts without a place in the order: {sorted(parts - set(ORDER))}"


def test_no_import_goes_upward() -> None:
    for path in source_files():
        part = part_of(path)
        if part == "__init__":
            continue
        for module, line, typing_only in imports(path):
            if not module.startswith("onward.") or typing_only:
                continue
            other = module.split(".")[1]
            if other in ORDER:
                assert ORDER.index(other) <= ORDER.index(part), (
                    f"{path}:{line} imports {module}, which comes after {part}"
                )


def test_rooms_of_a_folder_import_each_other_one_way() -> None:
    """Files and sub-folders of a folder can be put into an order in which each imports only from those before it."""
    for folder in {folder for path in source_files() for folder in path.relative_to(SOURCE.parent).parents}:
        try:
            graphlib.TopologicalSorter(_needs_of_rooms(SOURCE.parent / folder)).prepare()
        except graphlib.CycleError as error:
            pytest.fail(f"{folder}/: rooms import each other in a circle: {' -> '.join(error.args[1])}")


def _needs_of_rooms(folder: Path) -> dict[str, set[str]]:
    """Files and sub-folders of a folder -> those that they import from."""
    room_of = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path.relative_to(folder).parts[0]
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }
    needs: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0]
        used = {room_of[module] for module, _, typing_only in imports(path) if module in room_of and not typing_only}
        needs.setdefault(room, set()).update(used - {room})
    return needs


def test_torch_stays_where_it_belongs() -> None:
    for path in source_files():
        part = part_of(path)
        for module, line, typing_only in imports(path):
            if typing_only:
                continue
            top = module.split(".")[0]
            assert not (part in WITHOUT_TORCH and top == "torch"), f"{path}:{line} imports torch"
            if module.startswith("torch.distributed"):
                is_allowed = part in MAY_NAME_DISTRIBUTED or path == SOURCE / "lowering/process_groups.py"
                assert is_allowed, f"{path}:{line} names torch.distributed"


def test_no_file_is_a_drawer() -> None:
    for folder in (SOURCE, ROOT / "tests", ROOT / "benchmarks"):
        for path in folder.rglob("*.py"):
            assert path.stem not in FORBIDDEN_NAMES, f"{path} has a name without a subject"


def test_files_and_functions_are_short() -> None:
    for path in source_files():
        text = path.read_text()
        largest = LARGEST_FILE_LINES
        assert text.count("\n") <= largest, f"{path} has {text.count(chr(10))} lines"
        for node in nodes_in(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                documented = node.body[0] if ast.get_docstring(node) else None
                docstring = 0 if documented is None else (documented.end_lineno or 0) - documented.lineno + 1
                length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
                assert length <= LARGEST_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


TABLES_OF_OPERATORS = {
    "graph/operators.py",  # the table
}


def _operators_named(node: ast.expr) -> set[str]:
    names = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return names & set(OPERATORS)


def test_facts_of_operators_stand_in_their_table() -> None:
    """No module keeps a list that names most of the operators of which a fact of the table is true."""
    sets = {fact: operators_with(fact) for fact in Fact if len(operators_with(fact)) > 2}
    for path in source_files():
        if str(path.relative_to(SOURCE)) in TABLES_OF_OPERATORS or "ops" in path.parts:
            continue
        for node in tree_of(path).body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            named = set() if value is None else _operators_named(value)
            for fact, operators in sets.items():
                known = len(named & operators)
                is_copy = known > 2 and known > 0.7 * len(operators) and known > 0.7 * len(named)
                assert not is_copy, f"{path}:{node.lineno} lists {fact}: ask graph/operators.py"


def test_values_with_many_fields_are_built_by_keyword() -> None:
    for path in source_files():
        for node in nodes_in(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            makers = [ast.unparse(one) for one in (*node.decorator_list, *node.bases)]
            if any(("dataclass" in one and "kw_only=True" not in one) or "NamedTuple" in one for one in makers):
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                assert len(fields) <= MOST_POSITIONAL_FIELDS, f"{path}:{node.lineno} {node.name}: set kw_only=True"


MODULE_STATE = {
    "lowering/registry.py": {
        "_on_device": "lowerings, registered by decorators at import",
        "_on_host": "lowerings, registered by decorators at import",
        "_load_operators": "imports those modules, once",
    },
    "lowering/simplification.py": {"_simplifiers": "registered by decorators at import"},
    "plan/horizontal/rules.py": {"_rules": "registered by decorators at import"},
    "lowering/passes.py": {"_recomputing": "set around a call and reset after it, for its thread alone"},
    "lowering/kernels/rematerialize.py": dict.fromkeys(
        ("_on", "_remade"), "set around a call and reset after it, for its thread alone"
    ),
    "untrusted_files.py": {"_adapter": "a function of a type, built when it is first needed"},
    "lowering/kernels/matmuls.py": {"prefers_onednn": "a fact about the processor and the installed torch"},
    "data/shard_format.py": {"_feature_header": "bytes, a function of names and numbers"},
    "graph/nodes/provenance.py": {"_kinds": "a function of a text"},
    "engine/forecast/allocations.py": {"torch": "the resizing of storages is observed while a forecast is made"},
    "parallel/watch/waiting.py": {"dist": "waiting for collectives is timed while a stretch is measured"},
    "cli.py": {"warnings": "those of renamed fields are notes around a command, and warnings again after it"},
    "environment.py": {"os": "environment variables, which torch and CUDA read once for a process"},
    "parallel/rendezvous/rendezvous.py": {"os": "environment variables, which Gloo and NCCL read once for a process"},
    "report/profiler.py": {"os": "an environment variable that Kineto reads, removed afterwards"},
}
"""Module-level names that change while a program runs, or remember results -> why two runs do not meet in them."""
_CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "set", "setdefault", "update",
}  # fmt: skip
_CONTAINERS = {
    "ContextVar", "Counter", "OrderedDict", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "count",
    "defaultdict", "deque", "dict", "list", "local", "set",
}  # fmt: skip


def _root(node: ast.expr) -> ast.expr:
    """`table` of `table[key].field`."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node


def _remembers(node: ast.expr) -> bool:
    """An empty container, which is there to be filled, or a call that makes one."""
    if isinstance(node, ast.Call):
        is_empty = not node.args or ast.unparse(node.func).rpartition(".")[2] in ("ContextVar", "count")
        return is_empty and ast.unparse(node.func).partition("[")[0].rpartition(".")[2] in _CONTAINERS
    return isinstance(node, ast.List | ast.Dict | ast.Set) and not ast.unparse(node).strip("[]{}")


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def _local_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Arguments of a function of these nodes and names that it assigns, which hide those of the module."""
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | {n.arg for n in nodes if isinstance(n, ast.arg)}


def _changed_in(function: ast.AST, names: set[str]) -> set[str]:
    """Those of a module's names whose value a function changes, and all that it declares `global`."""
    nodes = list(ast.walk(function))
    changed = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    seen = names - _local_names(nodes)
    for node in nodes:
        roots = [_root(target) for target in _targets(node) if not isinstance(target, ast.Name)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            roots.append(node.func.value)
        changed |= {root.id for root in roots if isinstance(root, ast.Name) and root.id in seen}
    return changed


def module_state(tree: ast.Module) -> set[str]:
    """Names of a module, its own and imported ones, that hold state: what the invariant forbids."""
    names: set[str] = set()
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            own = {target.id for target in _targets(node) if isinstance(target, ast.Name)}
            names |= own
            found |= own if node.value is not None and _remembers(node.value) else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    for node in nodes_in(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            found |= _changed_in(node, names)
        if isinstance(node, ast.FunctionDef):
            caches = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]
            found |= {node.name} if {"cache", "lru_cache"} & set(caches) else set()
        if isinstance(node, ast.ClassDef):
            shared = [one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None]
            found |= {f"{node.name}.{ast.unparse(_targets(one)[0])}" for one in shared if _remembers(one.value)}
    return found


def test_no_module_holds_state() -> None:
    """Two runs in one process share nothing: what changes is a value that somebody holds."""
    for path in source_files():
        allowed = MODULE_STATE.get(str(path.relative_to(SOURCE)), {})
        assert module_state(tree_of(path)) == set(allowed), f"{path}: hand the value to those who need it"


def test_what_the_law_on_state_sees() -> None:
    seen = {
        "x": "x = None\ndef f():\n  global x\n  x = 1",
        "table": "table = {'a': 1}\ndef f():\n  table['b'] = 2",
        "names": "names = ['a']\ndef f():\n  names.append('b')",
        "total": "total = [0]\ndef f():\n  total[0] += 1",
        "config": "from torch import config\ndef f():\n  config.debug = True",
        "live": "live: WeakSet[int] = weakref.WeakSet()",
        "next_number": "next_number = itertools.count()",
        "Run.counts": "class Run:\n  counts: dict[str, int] = {}",
        "f": "@functools.lru_cache(maxsize=2)\ndef f(device):\n  return torch.zeros(1, device=device)",
        "g": "def g():\n  g.calls += 1",
    }
    unseen = [
        "NAMES = frozenset(['a'])", "def f(table):\n  table['a'] = 1", "ROWS = [1, 2]",
        "x = 1\ndef f():\n  x = []\n  x.append(1)", "class A:\n  def f(self):\n    self.a = 1",
    ]  # fmt: skip
    for name, text in seen.items():
        assert module_state(ast.parse(text)) == {name}, text
    for text in unseen:
        assert not module_state(ast.parse(text)), text


REGISTERED = {
    "losses": {kind.name for kind in LOSSES},
    "schedules": {kind.name for kind in (*DECAYS, *PIPELINES)},
}
"""Folder with a file for each of them -> the names that RUN.yaml knows them by."""
NAMES_OF_OTHERS = {"bert", "graph", "output", "function", "none", "constant", "linear"}
"""Registered names that objectives, nodes of torch.fx and modes of operators have as well: those are compared with."""
_ASKS_FOR_ONE = re.compile(r"loss|spec\b|\btype\b|warmup|schedule|decay")


def _decides_by(node: ast.AST) -> tuple[set[str], str]:
    """The texts by which a piece of code decides, and what it compares them with."""
    deciding: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        deciding = [node.left, *node.comparators]
    elif isinstance(node, ast.Dict):
        deciding = [key for key in node.keys if key is not None]
    elif isinstance(node, ast.MatchValue):
        deciding = [node.value]
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        deciding = [node.slice]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
        deciding = node.args
    elif isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) > 1:
        deciding = node.elts if all(isinstance(one, ast.Constant) for one in node.elts) else []
    texts = [one.value for part in deciding for one in ast.walk(part) if isinstance(one, ast.Constant)]
    others = [ast.unparse(part) for part in deciding if not isinstance(part, ast.Constant | ast.Tuple | ast.Set)]
    return {text for text in texts if isinstance(text, str) and text}, " ".join(others)


@functools.cache
def _decisions(tree: ast.Module) -> tuple[tuple[ast.AST, set[str], str], ...]:
    """The nodes of a tree that decide by texts, with `_decides_by` of each."""
    found = ((node, *_decides_by(node)) for node in nodes_in(tree))
    return tuple(one for one in found if one[1])


def _compared_with_registered(tree: ast.Module, names: set[str]) -> list[str]:
    found = []
    for node, texts, other in _decisions(tree):
        is_prefix = isinstance(node, ast.Call) and any(name.startswith(t) for name in names for t in texts if t[3:])
        shared = texts & NAMES_OF_OTHERS & names if _ASKS_FOR_ONE.search(other) else set()
        if texts & (names - NAMES_OF_OTHERS) or shared or is_prefix or len(texts & names) > 2:
            found.append(f"{getattr(node, 'lineno', 0)}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("folder", REGISTERED)
def test_facts_of_losses_and_schedules_stand_in_their_files(folder: str) -> None:
    """No other module decides by the name of one, so that a new one is one file and one line."""
    for path in source_files():
        if path.relative_to(SOURCE).parts[0] != folder:
            assert _compared_with_registered(tree_of(path), REGISTERED[folder]) == [], f"{path}: ask the {folder}"


def test_what_the_law_on_registered_names_sees() -> None:
    losses, schedules = REGISTERED["losses"], REGISTERED["schedules"]
    for text in (
        "loss.type == 'ctc'", "spec.type in ('graph', 'bert')", "{'l1': 1}", "loss.type != 'output'", "rules['ctc']",
        "('l1', 'ctc')", "{'output': 1, 'graph': 2, 'function': 3}",
    ):  # fmt: skip
        assert _compared_with_registered(ast.parse(text), losses), text
    for text in ("schedule == '1F1B'", "schedule.startswith('Interleaved')", "rate.warmup_mode == 'none'"):
        assert _compared_with_registered(ast.parse(text), schedules), text
    for text in ("node.op == 'output'", "options.objective == 'bert'", "mode == 'constant'", "name.startswith('o')"):
        assert not _compared_with_registered(ast.parse(text), losses | schedules), text


LEAST_MIRRORED_SHARE = 0.9
"""Of the modules with logic, how many have tests at their own place; it may only rise, and 0.9 is the goal."""


def _has_logic(path: Path) -> bool:
    """Whether one of the functions has more than three statements."""
    for function in nodes_in(tree_of(path)):
        if isinstance(function, ast.FunctionDef):
            statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
            documented = ast.get_docstring(function) is not None
            if len(statements) - 1 - documented > 3:
                return True
    return False


def test_modules_with_logic_have_tests_at_their_own_place() -> None:
    """`graph/cuts.py` is tested by `tests/graph/test_cuts.py`, or `test_cuts_*.py` where it takes several files."""
    missing, count = [], 0
    for path in source_files():
        if path.stem in ("__init__", "__main__") or not _has_logic(path):
            continue
        place = ROOT / "tests" / path.relative_to(SOURCE).parent
        is_tested = (place / f"test_{path.stem}.py").is_file() or any(place.glob(f"test_{path.stem}_*.py"))
        missing += [] if is_tested else [str(path.relative_to(SOURCE))]
        count += 1
    share = 1 - len(missing) / count
    assert share >= LEAST_MIRRORED_SHARE, f"{share:.3f} of {count} modules have mirrored tests; without: {missing}"


def _module_file(name: str) -> Path | None:
    """The file of a module of onward or of its tests."""
    path = (ROOT / "src" if name.startswith("onward") else ROOT) / name.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def names_of_module(path: Path) -> frozenset[str]:
    """What the statements of a module bind, those under `if` and `try` included, those of functions and classes not."""
    found, statements = set[str](), list[ast.AST](tree_of(path).body)
    while statements:
        node = statements.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            found |= {node.id} if isinstance(node.ctx, ast.Store) else set()
        else:
            statements += ast.iter_child_nodes(node)
    return frozenset(found)


def missing_imports(path: Path) -> list[str]:
    """Names that a file imports from onward or its tests, and that are not there."""
    missing = []
    for node in nodes_in(tree_of(path)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ("onward", "tests"):
            continue
        assert node.module is not None
        file = _module_file(node.module)
        bound = frozenset[str]() if file is None else names_of_module(file)
        if "__getattr__" in bound:  # imports what it offers when it is asked for
            continue
        missing += [
            f"{path}:{node.lineno} imports {alias.name} from {node.module}"
            for alias in node.names
            if alias.name not in bound and _module_file(f"{node.module}.{alias.name}") is None
        ]
    return missing


def test_what_tests_import_is_there() -> None:
    """Types are not checked in test modules, and the suite meets a renamed function at its end."""
    missing = [one for path in sorted((ROOT / "tests").rglob("*.py")) for one in missing_imports(path)]
    assert not missing, "\n".join(missing)


def test_what_the_law_on_imports_sees(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(
        "from onward.errors import UserError, Usererror\nfrom onward.graph import fusion, nothing\n"
        "from onward.gone import x\n"
    )
    assert [one.partition(" imports ")[2] for one in missing_imports(path)] == [
        "Usererror from onward.errors",
        "nothing from onward.graph",
        "x from onward.gone",
    ]


def test_nothing_loads_pickle() -> None:
    for path in source_files():
        for module, line, _ in imports(path):
            assert module.split(".")[0] not in ("pickle", "dill", "cloudpickle", "joblib"), f"{path}:{line}"
        assert "torch.load(" not in path.read_text(), f"{path} calls torch.load"


def test_no_object_of_another_rank_is_unpickled() -> None:
    """torch's collectives of objects, its `save`, which uses them, and its elastic launcher unpickle what arrives."""
    unpickling = re.compile(
        r"(gather|broadcast|scatter|send|recv)_object|state_dict_saver|torch\.distributed\.(elastic|launcher)"
    )
    for path in source_files():
        for node in nodes_in(tree_of(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert not unpickling.search(name), f"{path}:{getattr(node, 'lineno', 0)} uses {name}"
        for module, line, _ in imports(path):
            assert not unpickling.search(module), f"{path}:{line} imports {module}"


def test_one_file_asks_the_operating_system() -> None:
    for path in source_files():
        if part_of(path) == "operating_system":
            continue
        for module, line, _ in imports(path):
            assert module not in ("fcntl", "resource", "psutil", "pwd"), f"{path}:{line} imports {module}"
        for name in ("/proc/", "sched_getaffinity", "O_DIRECTORY", "getsid("):
            assert name not in path.read_text(), f"{path} uses {name}, which only some systems have"


READS_THE_WALL_CLOCK = {
    "report/metrics_file.py": "stamps records",
    "report/event_file.py": "stamps events, and names their file by the time for TensorBoard to order",
    "report/run_record.py": "stamps a run's record",
    "report/trackers/mlflow_run.py": "stamps what MLflow shows",
    "report/page/run_record.py": "of several profiles of a run, shows the one written last",
    "parallel/watch/flight_recorder.py": "stamps the record of a hang, and the age of collectives that torch stamped",
    "checkpoint/run_files.py": "compares a file's time with itself: was it written since it was uploaded",
    "exclusive/lock.py": "shows since when a folder is locked",
    "exclusive/lock_file.py": "compares a lock's time with that of a file made just now, by the same file system",
    "exclusive/temporary.py": "leaves temporary files of other hosts alone until they are a day old",
    "commands/initialization.py": "compares times of files with each other: are shards older than their source",
}
"""Files that may look at the wall clock or at times of files, and for what; none of them measures or waits by it."""
_WALL_CLOCK = re.compile(
    r"\btime\.(time|time_ns|strftime|localtime|gmtime|ctime|asctime)\b|\bdatetime\.\w|\bst_[amc]time|\bget[amc]time\b"
    r"|from datetime import (?!timedelta$)",
    re.MULTILINE,
)


def test_nothing_decides_by_the_wall_clock() -> None:
    """A clock that jumps by hours, forwards or backwards, changes time stamps and nothing else."""
    for path in source_files():
        found = _WALL_CLOCK.search(path.read_text())
        if found is not None:
            assert str(path.relative_to(SOURCE)) in READS_THE_WALL_CLOCK, f"{path}: {found[0]}; use time.monotonic"
        for module, line, _ in imports(path):
            assert not module.startswith("time."), f"{path}:{line}: import time, so that its use can be found"


MAY_OPEN = {
    "untrusted_files.py": "opens files for all others",
    "operating_system.py": "reads /proc",
    "data/packing/arrays.py": "a source that the user names; numpy maps it, and unpacks archives member by member",
    "data/packing/documents.py": "a source that the user names",
    "data/packing/images.py": "a source that the user names, found as a regular file",
    "data/packing/rows.py": "a source that the user names",
    "data/packing/tokenizer_files.py": "a tokenizer that the user names, read by its own library",
    "proposal/data_reading.py": "a source that the user names",
    "report/event_file.py": "a file that it made, to write over what an attempt that failed has left",
    "artifacts/quantization.py": "files that it wrote into a temporary folder",
    "parallel/watch/flight_recorder.py": "stacks that this process had written into a file of its own",
    "diagnosis/communication.py": "files that it wrote into a temporary folder",
    "commands/reporting.py": "files that it wrote into a temporary folder",
    "report/page/page.py": "files of this package",
}
"""Files that open other files themselves -> which, and why that needs no check."""


def opens_a_file_for_reading(node: ast.Call) -> bool:
    """`open(path)`, `path.open()`, `path.read_text()`, `onnx.load(path)` and what else takes a path to read."""
    strings = [
        one.value for one in (*node.args[:2], *(k.value for k in node.keywords)) if isinstance(one, ast.Constant)
    ]
    writes = any(isinstance(mode, str) and set(mode) <= set("rwxab+t") and set(mode) & set("wxa") for mode in strings)
    called = ast.unparse(node.func)
    name = called.rpartition(".")[2]
    if called == "open":
        return not writes
    if name == "open":
        modes = [mode for mode in strings if isinstance(mode, str) and set(mode) <= set("rwxab+t")]
        return not writes and (bool(modes) or (not node.args and not node.keywords))
    if name in ("read_text", "read_bytes"):
        return "." in called and not called.startswith("untrusted_files.")
    return called in (
        "np.load", "np.fromfile", "np.memmap", "onnx.load", "onnx.load_model", "ir.load", "safe_open",
        "zipfile.ZipFile", "parquet.ParquetFile", "pil.open", "torch.load", "tokenizers.Tokenizer.from_file",
    )  # fmt: skip


def test_files_are_opened_in_one_place() -> None:
    """So that no reader waits for a pipe, reads a device, or follows a name in a file out of its folder."""
    for path in source_files():
        if str(path.relative_to(SOURCE)) in MAY_OPEN:
            continue
        for node in nodes_in(tree_of(path)):
            if isinstance(node, ast.Call) and opens_a_file_for_reading(node):
                on_a_stream = ast.unparse(node.func) == "np.memmap" and ast.unparse(node.args[0]) == "stream"
                assert on_a_stream, (
                    f"{path}:{node.lineno} opens a file: use onward.untrusted_files, `{ast.unparse(node)}`"
                )


def test_what_the_law_on_opening_sees() -> None:
    seen = ["open(p)", "open(p, 'rb')", "p.open()", "p.open('rb')", "p.read_text()", "p.read_bytes()", "np.load(p)"]
    unseen = ["open(p, 'wb')", "p.open('w')", "read_text(p)", "open_regular(p)", "parameters.open(data, False)"]
    for text, expected in [*((one, True) for one in seen), *((one, False) for one in unseen)]:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert opens_a_file_for_reading(call) is expected, text


def _takers_of_limits() -> dict[tuple[str, str], int | None]:
    """(module, function) -> the position of its parameter `limits` (None: by keyword alone)."""
    found: dict[tuple[str, str], int | None] = {}
    for path in source_files():
        module = ".".join(("onward", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef):
                names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
                if "limits" in names or "limits" in [one.arg for one in node.args.kwonlyargs]:
                    found[module, node.name] = names.index("limits") if "limits" in names else None
    return found


def _calls_without_limits(path: Path, takers: dict[tuple[str, str], int | None]) -> list[str]:
    module = ".".join(("onward", *path.relative_to(SOURCE).with_suffix("").parts))
    known = {name: at for (home, name), at in takers.items() if home == module}
    for node in nodes_in(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (node.module, alias.name) in takers:
                    known[alias.asname or alias.name] = takers[node.module, alias.name]
    wrong = []
    for node in nodes_in(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        called = (
            [node.func, *node.args[:1]] if ast.unparse(node.func) in ("partial", "functools.partial") else [node.func]
        )
        name = ast.unparse(called[-1])
        if name not in known or any(keyword.arg in ("limits", None) for keyword in node.keywords):
            continue
        at, given = known[name], node.args[len(called) - 1 :]
        if at is None or (len(given) <= at and not any(isinstance(one, ast.Starred) for one in given)):
            wrong.append(f"{path.relative_to(SOURCE)}:{node.lineno} {name}")
    return wrong


def test_limits_reach_whatever_reads_a_file() -> None:
    """A call that leaves `limits` to their default would ignore what RUN.yaml or the command line says."""
    takers = _takers_of_limits()
    assert ("onward.graph.reading.model_file", "read_model") in takers
    assert [call for path in source_files() for call in _calls_without_limits(path, takers)] == []


def test_the_public_names() -> None:
    import onward

    assert set(onward.__all__) == {
        "Callback", "DataLoader", "Environment", "Parameters", "TrainingRunner", "__version__", "export", "fit",
        "to_torch",
        "add_adapter",
    }  # fmt: skip
    for name in onward.__all__:
        assert getattr(onward, name) is not None


def test_files_of_tests_that_begin_first_exist() -> None:
    assert [name for name in LONGEST_FILES if not (ROOT / name).is_file()] == []
