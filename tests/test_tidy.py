"""The habits that make the tree readable, as tests: sizes, names, words, packaging."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from danube_fast.broker.partition import Partition
from danube_fast.broker.subscription.subscription import Subscription
from danube_fast.client.consume.attachment import Attachment
from danube_fast.client.produce.lane import Lane
from danube_fast.client.produce.publisher import Publisher

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("danube_fast", "workers", "spark", "bench", "pyspark_danube")
SUITES = Path("bench/suites")  # tests, for all that they stand beside the harness
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 40


def tracked_files() -> list[Path]:
    """Every file that git knows, or, outside a clone, every file that it would not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=60
    )
    if listing.returncode == 0:
        found = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        found = [
            path
            for path in ROOT.rglob("*")
            if not any(
                part in (".venv", "__pycache__") or part.startswith(".") for part in path.parts
            )
        ]
    return [path for path in found if path.is_file() and not path.is_symlink()]


def product_files() -> list[Path]:
    return [
        path
        for path in tracked_files()
        if path.suffix == ".py"
        and path.relative_to(ROOT).parts[0] in PRODUCT
        and not path.relative_to(ROOT).is_relative_to(SUITES)
    ]


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def parsed(paths: list[Path]) -> Iterator[tuple[str, ast.Module]]:
    for path in paths:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {
        call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        for call in function.decorator_list
        if isinstance(call, ast.Call)
    }
    return bool(names & {"kernel", "njit"})


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES_MAX}
    assert not too_long, f"over {FILE_LINES_MAX} lines; split them: {too_long}"


def test_functions_and_kernels_stay_short() -> None:
    faults = []
    for name, tree in parsed(product_files()):
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            limit = KERNEL_LINES_MAX if is_kernel(function) else FUNCTION_LINES_MAX
            if lines > limit:
                faults.append(
                    f"{name}:{function.lineno} {function.name}: {lines} lines, cap {limit}"
                )
    assert not faults, "\n".join(faults)


def test_public_names_have_docstrings() -> None:
    faults = []
    for name, tree in parsed(product_files()):
        if ast.get_docstring(tree) is None:
            faults.append(f"{name}: no docstring that says why the file exists")
        holders: list[tuple[str, ast.AST]] = [("", tree)]
        while holders:
            prefix, holder = holders.pop()
            for node in ast.iter_child_nodes(holder):
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
                if not isinstance(node, kinds) or node.name.startswith("_"):
                    continue
                repeats = any(
                    (isinstance(mark, ast.Name) and mark.id in ("overload", "override"))
                    or (isinstance(mark, ast.Attribute) and mark.attr == "setter")
                    for mark in node.decorator_list
                )
                if ast.get_docstring(node) is None and not repeats:
                    faults.append(f"{name}:{node.lineno} {prefix}{node.name}: no docstring")
                if isinstance(node, ast.ClassDef):
                    holders.append((f"{prefix}{node.name}.", node))
    assert not faults, "\n".join(faults)


def reading_order(name: str) -> tuple[object, ...]:
    """CONSTANTS, then Classes, then functions, numbers inside names by value; as ruff sorts."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def test_dunder_all_is_sorted_and_true() -> None:
    faults = []
    for name, tree in parsed(product_files()):
        for node in tree.body:
            if not (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "__all__"
            ):
                continue
            names = ast.literal_eval(node.value)
            if names != sorted(names, key=reading_order):
                faults.append(f"{name}: __all__ is not sorted")
            if len(set(names)) != len(names):
                faults.append(f"{name}: __all__ repeats a name")
    assert not faults, "\n".join(faults)


def test_package_doors_only_reexport() -> None:
    """An `__init__.py` imports names and defines nothing but dunder names and `__getattr__`."""
    faults = []
    for path in product_files():
        if path.name != "__init__.py":
            continue
        for node in ast.parse(path.read_text()).body:
            fine = isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.If) or (
                isinstance(node, ast.Assign | ast.AnnAssign)
                and ast.unparse(
                    node.targets[0] if isinstance(node, ast.Assign) else node.target
                ).startswith("_")
            )
            if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"):
                fine = True
            if not fine:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno} defines something")
    assert not faults, "\n".join(faults)


def test_product_code_never_asserts() -> None:
    """`python -O` drops asserts; product code raises."""
    faults = [
        f"{name}:{node.lineno}"
        for name, tree in parsed(product_files())
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not faults, faults


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    faults = []
    for name, tree in parsed(python_files()):
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            faults += [
                f"{name}:{node.lineno} imports {module}"
                for module in modules
                if module.split(".")[0] in ("workers", "spark", "bench")
            ]
    assert not faults, faults


def test_importing_the_product_loads_no_folder_twice() -> None:
    code = (
        "import pkgutil, sys, danube_fast, danube_fast.workers, danube_fast.spark\n"
        "import danube_fast.bench.command\n"
        "for x in pkgutil.walk_packages(danube_fast.workers.__path__, 'danube_fast.workers.'):\n"
        "    __import__(x.name)\n"
        "print(sorted({'workers', 'spark', 'bench'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=280
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


# Words that have no place in a product: unfinished work, hosts of package indexes, homes of machines.
# Written in pieces, so that this file does not find itself.
BANNED = {
    "unfinished work": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "an index host": re.compile("pythonhosted" + r"\.org|pypi" + r"\.org|registry\.npm" + "js"),
    "a home folder": re.compile(
        r"(?<![\w.~$])/(?:home|root|Users)" + r"/[a-z]|(?<![\w.])/work" + "/"
    ),
}


def module_name(path: Path) -> str:
    """What a product file is imported as; a package by its own name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] not in ("danube_fast", "pyspark_danube"):
        parts = ("danube_fast", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Those modules that a file names in imports, those for types alone and the lazy ones included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def test_no_modules_import_each_other() -> None:
    """The linter of the layers looks between packages; this looks at every module, symlinked folders too."""
    modules = {module_name(path): path for path in product_files()}
    assert len(modules) > 250
    graph = {name: imports_of(path, set(modules)) - {name} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as fault:
        pytest.fail(" -> ".join(fault.args[1]))


WORKER_LAYERS: tuple[tuple[str, ...], ...] = (
    ("process",),
    ("shard.job", "shard.catalog", "shard.ring_out", "shard.routed_peers", "shard.transports", "shard.publish.journal", "shard.publish.group",
     "shard.publish.runs", "shard.publish.record_queue", "shard.publish.siblings", "shard.keep.pins"),
    ("shard.state",),
    ("shard.publish", "shard.deliver", "shard.read", "shard.keep", "shard.history", "shard.logs",
     "reports.quota"),
    ("shard.move",),
    ("shard.access_checks", "shard.assignments", "shard.commands", "shard.move.log_changes", "shard.operations", "shard.rollback",
     "shard.session_checks", "shard.upkeep", "reports"),
    ("shard.worker", "coordinator", "uploader", "sign_on"),
    ("supervisor",),
)  # fmt: skip
"""Inside workers, from the bottom: a module imports its own layer and those below. The longest name decides."""


def worker_layer(name: str) -> int:
    """The layer of a module of workers."""
    names = [(part, i) for i, layer in enumerate(WORKER_LAYERS) for part in layer]
    found = [(len(part), i) for part, i in names if f"{name}.".startswith(f"{part}.")]
    assert found, f"danube_fast.workers.{name} is in no layer: add it to WORKER_LAYERS"
    return max(found)[1]


def test_imports_inside_workers_go_down_only() -> None:
    prefix = "danube_fast.workers."
    modules = {module_name(path): path for path in product_files()}
    faults = [
        f"{name} -> {other}"
        for name, path in modules.items()
        if name.startswith(prefix) and path.name != "__init__.py"
        for other in imports_of(path, set(modules))
        if other.startswith(prefix) and modules[other].name != "__init__.py"
        if worker_layer(name[len(prefix) :]) < worker_layer(other[len(prefix) :])
    ]
    assert not faults, "\n".join(sorted(faults))


OWNERS = ("Tail", "Partition", "Returns", "Subscription")
"""Classes whose attributes nothing assigns but the files that define them."""
OWN = (
    "danube_fast/broker/partition.py",
    "danube_fast/broker/tail.py",
    "danube_fast/broker/subscription/",
)


def assigned_by_itself(kind: ast.ClassDef) -> set[str]:
    """Attributes that a class gives its objects."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    } | {
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def owners_in(tree: ast.AST) -> set[str]:
    """What parameters are called that take a Partition or a Subscription."""
    return {
        node.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.arg)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id in OWNERS
    }


def test_partitions_and_subscriptions_are_assigned_by_their_own_files_alone() -> None:
    """Whoever wants something of them calls what names it (`partition.begin_move()`)."""
    trees = {
        name: tree
        for name, tree in parsed(product_files())
        if name.startswith(("workers/", "danube_fast/broker/", "danube_fast/testing/"))
    }
    owned: set[str] = set()
    others: set[str] = set()
    for name, tree in trees.items():
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            if kind.name in OWNERS:
                owned |= assigned_by_itself(kind)
            elif not name.startswith("danube_fast/testing/"):  # its models know nothing of these
                others |= assigned_by_itself(kind)
    assert {"visible", "safe_until", "poisoned", "recorded"} <= owned - others
    called = {"partition", "sub"}.union(*map(owners_in, trees.values()))
    faults = []
    for name, tree in trees.items():
        if name.startswith(OWN):
            continue
        knows = not name.startswith("danube_fast/testing/")
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            path = ast.unparse(node.value).replace("._", ".").split(".")
            if path == ["self"] or path == ["cls"]:
                continue
            if node.attr in owned - others or (knows and called & set(path)):
                faults.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("whole", "places"),
    [
        ("danube_fast.workers.shard.worker", {"danube_fast/testing/host.py"}),
        (
            "danube_fast.client.core",
            {
                "danube_fast/client/async_client.py",
                "danube_fast/client/client.py",
                "danube_fast/testing/applications.py",
                "danube_fast/testing/shipped.py",
            },
        ),
    ],
)
def test_the_whole_is_imported_where_it_is_composed(whole: str, places: set[str]) -> None:
    """Its parts get the state, and the parts that they need."""
    naming = {str(path.relative_to(ROOT)) for path in product_files() if imports_of(path, {whole})}
    assert naming == places


def test_the_admission_word_of_a_partition_has_one_writer() -> None:
    """The table makes the row; from then on only the gate opens and closes it."""
    writers = set()
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Store):
                continue
            if ast.unparse(node.slice).endswith(("PartitionWord.MODE", "PartitionWord.REFUSAL")):
                writers.add(str(path.relative_to(ROOT / "danube_fast" / "broker" / "admission")))
    assert writers == {"gate.py", "tables.py"}


VAGUE = re.compile(
    r"\b(somebody|nobody|whoever|anybody|everybody|door|dock|roster|keeper|sleeper|foresight)s?\b",
    re.IGNORECASE,
)


def test_the_product_speaks_plainly() -> None:
    """A docstring begins with the duty; the actor has a name; no words of our own where the field has one."""
    faults = []
    for path in product_files():
        name = str(path.relative_to(ROOT))
        if not name.startswith(("danube_fast/", "workers/")):
            continue
        text = path.read_text().replace("nobody known", "known")  # in traces that are on record
        faults += [f"{name}: {match[0]}" for match in VAGUE.finditer(text)]
        for node in ast.walk(ast.parse(text)):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
            first = (ast.get_docstring(node) or "-").split()[0] if isinstance(node, kinds) else "-"
            if first in ("It", "They", "What", "Who"):
                faults.append(f"{name}: a docstring begins with {first}")
    assert not faults, "\n".join(faults)


def test_no_file_holds_words_that_do_not_belong() -> None:
    faults = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for why, pattern in BANNED.items():
            faults += [
                f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1} {why}: {match[0]}"
                for match in pattern.finditer(text)
            ]
    assert not faults, "\n".join(faults)


def test_a_wheel_built_from_the_sdist_holds_two_packages(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(build, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"danube_fast", "pyspark_danube"}
    for folder in ("workers", "spark", "bench"):
        sources = {
            path.relative_to(ROOT).as_posix()
            for path in product_files()
            if path.relative_to(ROOT).parts[0] == folder
        }
        packaged = {name.removeprefix("danube_fast/") for name in names}
        assert sources <= packaged, f"not in the wheel: {sources - packaged}"
    assert not any("/suites/" in name for name in names)
    assert "danube_fast/py.typed" in names
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/pyspark_danube/__init__.py") for name in archive.getnames())


def test_what_there_are_thousands_of_has_slots() -> None:
    """Above 30 attributes each object would have a dict of its own: 1,000 topics in one client ran at 0.7 of the rate."""
    kinds = (Partition, Subscription, Attachment, Lane, Publisher)
    assert not [kind.__name__ for kind in kinds if kind.__dictoffset__]


def test_the_coordinator_imports_no_shard() -> None:
    """Every start of a broker waits for it, and the modules of a shard take 0.15 s."""
    script = (
        "import sys, danube_fast.workers.coordinator.coordinator\n"
        "print([name for name in sys.modules if name.startswith('danube_fast.workers.shard.')"
        " or name in ('danube_fast.wal.log', 'danube_fast.broker.partition', 'importlib.metadata')])"
    )
    command = [sys.executable, "-P", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "['danube_fast.workers.shard.job']"
