"""What the documentation says is true: its commands run and its generated pages are up to date."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from packaging.utils import canonicalize_name

from tests.forked_commands import run_command, run_forked, run_in_shell

ROOT = Path(__file__).resolve().parent.parent
LESSONS = [
    pytest.param(page, id=str(page.relative_to(ROOT)))
    for folder in ("howto", "tutorials")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a user's model and data, as the README supposes them."""
    generator = np.random.default_rng(0)
    weights = {
        "fc.weight": generator.normal(0, 0.1, (64, 10)).astype(np.float32),
        "fc.bias": np.zeros(10, np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", ["images"], ["flat"]),
            helper.make_node("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"]),
        ],
        "digits",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    images = generator.random((96, 1, 8, 8), dtype=np.float32)
    labels = generator.integers(0, 10, 96)
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    text = next(block for block in blocks(ROOT / "README.md", "yaml") if "model_path" in block)
    assert "num_train_steps: 2000" in text
    text = text.replace("num_train_steps: 2000", "num_train_steps: 8").replace("warmup_steps: 100", "warmup_steps: 2")
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path


def test_the_commands_of_the_readme(workplace: Path) -> None:
    lines = [line for block in blocks(ROOT / "README.md", "console") for line in block.splitlines()]
    commands = [line[2:].split("  #")[0] for line in lines if line.startswith("$ ")]
    assert len(commands) == 8
    for command in commands:
        run_in_shell(command, workplace)
    assert (workplace / "out" / "model_trained.onnx").is_file()
    assert (workplace / "small.onnx").is_file()
    assert (workplace / "bundle" / "step.onnx").is_file()


def test_the_python_of_the_readme(workplace: Path) -> None:
    (block,) = [block for block in blocks(ROOT / "README.md", "python") if "to_torch" in block]
    run_in_shell(f"{shlex.quote(sys.executable)} -c {shlex.quote(block)}", workplace)
    onnx.checker.check_model(str(workplace / "trained.onnx"))


@pytest.mark.parametrize(
    ("page", "begins"),
    [
        (
            "memory",
            ["onward plan run.yaml", "onward train run.yaml", "LD_PRELOAD=libtcmalloc_minimal.so.4 onward train"],
        ),
        ("speed", ["onward train run.yaml"] * 2),
    ],
)
def test_the_commands_of_an_explanation(page: str, begins: list[str], workplace: Path) -> None:
    found = blocks(ROOT / "docs/explanation" / f"{page}.md", "bash")
    commands = [line for block in found for line in block.splitlines()]
    assert [" ".join(command.split()[:3]) for command in commands] == begins
    for command in commands:
        run_in_shell(command, workplace)


@pytest.mark.parametrize("page", LESSONS)
def test_everything_on_a_page_that_teaches_runs(page: Path, request: pytest.FixtureRequest) -> None:
    """In the order of the page: `console` lines after `$ `, `python` blocks, each its own process; a block whose
    first line is `# NAME.yaml` or `# NAME.py` is written to that file first."""
    # How-to pages begin with the model, data and RUN.yaml of the README, tutorials with nothing.
    workplace: Path = request.getfixturevalue("tmp_path" if page.parent.name == "tutorials" else "workplace")
    steps = re.findall(r"^```(console|python|yaml)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for language, block in steps:
        name = re.match(r"# (\S+\.(?:py|yaml))\n", block)
        if name is not None:
            (workplace / name[1]).write_text(block)
        elif language == "console":
            for line in block.splitlines():
                if line.startswith("$ "):
                    run_command(line[2:].split("  #")[0], workplace)
        elif language == "python":
            run_forked(["python", "-c", block], workplace)


@pytest.mark.parametrize("page", [*LESSONS, pytest.param(ROOT / "README.md", id="README.md")])
def test_a_page_says_what_else_its_code_imports(page: Path) -> None:
    """Beside what README's command installs: a newcomer has nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = [*project["dependencies"], *extras["pack"], *extras["export"], "onward"]
    said = " ".join(re.findall(r"`pip install ([^`]*)`", page.read_text()))
    distributions = distributions_by_module()
    known = {canonicalize_name(name) for name in re.findall(r"[\w-]+", " ".join([*installed, said]))}
    for block in blocks(page, "python"):
        for module in imported(block) - sys.stdlib_module_names:
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            assert known & names, f"{module} is imported, and no `pip install` on the page names it"


distributions_by_module = functools.cache(packages_distributions)


def imported(code: str) -> set[str]:
    """The packages that a program imports, by their first names."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_a_small_text_makes_a_shard_for_every_replica(tmp_path: Path) -> None:
    (command,) = blocks(ROOT / "docs/howto/distributed.md", "bash")
    (tmp_path / "corpus.txt").write_text("All for one, and one for all. " * 300)
    run_in_shell(command, tmp_path)
    assert len(list((tmp_path / "data" / "train").glob("*.pb"))) == 5  # 9,000 bytes are 70 samples of 128


@pytest.mark.parametrize("tool", ["tree", "parameters_page", "reference_pages", "data_flow"])
def test_generated_pages_are_up_to_date(tool: str) -> None:
    run_in_shell(f"{shlex.quote(sys.executable)} {ROOT / 'dev' / tool} --check", ROOT)


def test_the_architecture_names_what_exists() -> None:
    """Functions, classes, fields, files and folders that the page names in backticks are in the project."""
    page = (ROOT / "docs/explanation/architecture.md").read_text().partition("<!-- tree")[0]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    named = [name for name in re.findall(r"`([\w./-]+)`", page) if not name.startswith("-")]
    assert len(named) > 40
    for name in named:
        is_path = "/" in name or name.endswith(".py")
        exists = any((base / name).exists() for base in (ROOT, ROOT / "src/onward", ROOT / "src/onward/engine"))
        is_format = name in ("metrics.jsonl", "torch.fx", "torch.nn.Module", "torch.autograd")
        assert exists if is_path else is_format or words.issuperset(name.split(".")), f"{name} does not exist"


def test_names_of_the_package_in_pages_can_be_imported() -> None:
    """`onward.module.name` in prose, and `from onward... import ...` in any block, whether or not it is run."""
    prose = re.compile(r"`(onward(?:\.[A-Za-z_]\w*)+)[`(]")
    imported = re.compile(r"^\s*from (onward[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    faults = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        if page.name == "log.md":
            continue
        text = page.read_text()
        names = set(prose.findall(text)) - {"onward.fused", "onward.parallel", "onward.plan", "onward.classical"}
        names |= {f"{module}.{one.strip()}" for module, ones in imported.findall(text) for one in ones.split(",")}
        faults += [f"{page.relative_to(ROOT)} names {name}" for name in sorted(names) if not can_be_imported(name)]
    assert not faults


def can_be_imported(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of the machine it was written on, in no file."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".txt", "") and path.is_file() and path != Path(__file__):
            text = path.read_text(errors="ignore")
            for word in ("/work/", "/root/", "/tmp/"):
                assert word not in text, f"{name} names {word}"
