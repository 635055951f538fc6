"""The house: packages import only from lower floors, no circles of files, pure rooms, and quick commands without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PURE = (
    "phalanx/fleet/core",
    "phalanx/launch/placing.py",
    "phalanx_plan/placing.py",
    "phalanx/data/order",
    "phalanx/model/facts",
    "phalanx_plan/workload",
    "phalanx_plan/serving",
    "phalanx_plan/step_cost",
    "phalanx_plan/whole_run",
    "phalanx_plan/report",
    *(f"phalanx_plan/scaling/{name}.py" for name in ("laws", "optimum", "fit")),
    "phalanx_plan/simulate/hostile",
    "phalanx_serve/traffic",
    "phalanx/checkpoint/format/boxes.py",
    "phalanx/checkpoint/format/image.py",
    "phalanx/parallel/pipeline_schedules.py",
    "phalanx/process/restarts.py",
    "phalanx/run/pieces.py",
    "phalanx/run/kinds",
    "phalanx/run/layout.py",
    *(f"phalanx/observe/logs/{name}.py" for name in ("assemble", "line", "masking")),
    *(f"phalanx/observe/metrics/{name}.py" for name in ("samples", "run_metrics")),
    "phalanx/train/profile/choose.py",
    "phalanx/train/step/learning_rate.py",
    "phalanx/train/step/spikes.py",
    *(
        f"phalanx_watch/why/{name}.py"
        for name in [
            "observed",
            "changes",
            "checkpoints",
            "fleet",
            "layers",
            "numbers",
            "progress",
            "skipped",
            "speed",
            "surroundings",
            "unusual",
        ]
    ),
    *(
        f"phalanx_watch/profile/{name}.py"
        for name in ("partition", "waits", "operations", "summary", "chrome")
    ),
    "phalanx_watch/series/table.py",
)
"""Rooms that decide on values alone: no I/O, no clock, no torch."""

IMPURE = frozenset(
    [
        "asyncio",
        "datetime",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "torch",
        "uuid",
    ]
)
QUICK = (
    *(f"phalanx.checkpoint.format.{name}" for name in ("boxes", "image", "manifest", "blocks")),
    *(f"phalanx.checkpoint.snapshot.{name}" for name in ("data_port", "segments")),
    *(f"phalanx.checkpoint.tiers.{name}" for name in ("tier", "disk")),
    *(f"phalanx.checkpoint.committed.{name}" for name in ("copying", "digest")),
    "phalanx.checkpoint.save.save_schedule",
    "phalanx.cli.weights",
    *(f"phalanx.store.{name}" for name in ("store", "open_store")),
    "phalanx.cli.main",
    "phalanx.cli.launch.submit",
    "phalanx.cli.launch.logs_command",
    *(f"phalanx.launch.engines.{name}" for name in ("slurm", "slurm_script", "submission", "hosts", "bare")),
    "phalanx.cli.launch.joining_hosts",
    "phalanx.cli.train.show_command",
    "phalanx.cli.train.run_file",
    "phalanx.cli.data.data_command",
    "phalanx.cli.train.train_command",
    *(
        f"phalanx_watch.{name}"
        for name in ("cli", "lookout", "page", "profile", "ranks", "runs", "series", "why")
    ),
    *(
        f"phalanx.observe.{name}"
        for name in ("logs", "metrics", "rank_file", "rank_stream", "rank_writer", "record")
    ),
    "phalanx.fleet.control.coordinator",
    "phalanx.fleet.node.agent",
    "phalanx.launch.local",
    "phalanx.launch.topology_files",
    "phalanx.parallel.pipeline_schedules",
    "phalanx_plan",
    "phalanx.train.start.prepare",
    "phalanx.fleet.core",
    "phalanx.model.facts",
)
"""Commands and agents that must start in a blink, without torch and obstore. A package stands for every module in it."""


def module_name(file: Path) -> str:
    """The dotted name under which a source file is imported."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


@dataclass(frozen=True)
class Facts:
    """What a source file names."""

    imports: set[str]
    """Modules, wherever in the file."""
    calls: set[str]
    """Functions that are called by a name without a dot."""
    pickling: set[str]
    """Ways of pickling."""
    inexact: set[str]
    """Calls and powers of numbers whose last bit is the C library's."""


@pytest.fixture(scope="module")
def house() -> Mapping[str, Facts]:
    """Every module's facts. Their syntax trees are a million objects, so that each goes before the next is made."""
    return {name: facts(ast.parse(file.read_text())) for name, file in MODULES.items()}


def facts(tree: ast.Module) -> Facts:
    """What a source file names."""
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return Facts(imports(tree), calls, pickling(tree), inexact(tree))


def imports(tree: ast.Module) -> set[str]:
    """Modules, ours and others', that a source file imports, wherever in the file, for types too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                names.add(member if member in MODULES else node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_packages_import_only_what_the_contracts_allow() -> None:
    # The contracts stand in .importlinter.
    checked = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=SOURCE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_no_files_import_each_other_in_a_circle(house: Mapping[str, Facts]) -> None:
    # Whatever stays after files without an import among the rest are taken away, again and again, lies on a circle
    # or leads to one.
    left = {module: named.imports & MODULES.keys() - {module} for module, named in house.items()}
    while free := [module for module, names in left.items() if not names & left.keys()]:
        for module in free:
            del left[module]
    assert sorted(left) == []


def test_processes_that_stay_are_started_by_the_kit_alone() -> None:
    # Only there is a process id reaped last. A fault that is played on purpose leaves a program behind.
    starts = re.compile(r"\bPopen\(|create_subprocess_|posix_spawn|os\.fork\(")
    assert {
        str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if starts.search(file.read_text())
    } == {"phalanx/process/child.py", "phalanx/fleet/saboteur.py"}


def test_folders_are_walked_only_in_ways_that_bear_their_removal_meanwhile() -> None:
    # pathlib raises FileNotFoundError for a folder that another process removes while it is walked.
    walks = re.compile(r"\.rglob\(|\.glob\([^)]*\*\*")
    assert [
        f"{file.relative_to(SOURCE)}:{number}"
        for file in SOURCE.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if walks.search(line)
    ] == []


def test_pure_rooms_touch_neither_clock_nor_disk_nor_network_nor_torch(house: Mapping[str, Facts]) -> None:
    assert all((SOURCE / room).exists() for room in PURE)
    pure = {
        module_name(file)
        for room in PURE
        for file in ([SOURCE / room] if room.endswith(".py") else (SOURCE / room).rglob("*.py"))
    }
    assert [
        f"{module} imports {name}"
        for module in sorted(pure)
        for name in house[module].imports
        if name.split(".")[0] in IMPURE
    ] == []
    assert [
        f"{module} calls {name}"
        for module in sorted(pure)
        for name in house[module].calls & {"open", "print"}
    ] == []


PICKLING_MODULES = (
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "multiprocessing",
)
PICKLING_CALLS = frozenset(
    [
        *(f"{way}_object" for way in ("all_gather", "gather", "send", "recv", "broadcast", "scatter")),
        *(f"{way}_object_list" for way in ("broadcast", "scatter", "send", "recv", "gather")),
        *("torch.load", "torch.save", "torch.multiprocessing", "ProcessPoolExecutor", "check_tensor_meta"),
    ]
)
"""Names, bare or after a dot, under which Python and PyTorch unpickle what another process or a file holds."""


def pickling(tree: ast.Module) -> set[str]:
    """The ways of pickling that a source file names."""
    found = {
        name
        for name in imports(tree)
        if name.split(".")[0] in PICKLING_MODULES or name.startswith("torch.multiprocessing")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {node.attr, f"{ast.unparse(node.value)}.{node.attr}"} & PICKLING_CALLS
        elif isinstance(node, ast.Name):
            found |= {node.id} & PICKLING_CALLS
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            found |= (names | {f"{node.module}.{name}" for name in names}) & PICKLING_CALLS
        elif isinstance(node, ast.keyword) and node.arg in ("run_check", "allow_pickle", "weights_only"):
            found.add(f"{node.arg}=")
    return found


OTHERS_PICKLES = {
    "phalanx.checkpoint.interop.dcp_metadata": {"pickle"},
    "phalanx.checkpoint.interop.dcp": {"torch.load", "weights_only="},
}
"""What reads PyTorch's distributed checkpoints, which are pickles: by a list of what these may name (``test_dcp_import.py``)."""


def test_nothing_pickles(house: Mapping[str, Facts]) -> None:
    # Whoever can send a rank bytes that it unpickles runs code in it.
    assert {name: named.pickling for name, named in house.items() if named.pickling} == OTHERS_PICKLES


def test_ways_of_pickling_are_found_in_all_their_spellings() -> None:
    for line in (
        "import pickle as p",
        "from torch.distributed import all_gather_object as gather",
        "dist.broadcast_object_list([1])",
        "torch.load('file')",
        "from torch import load",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch.multiprocessing as mp",
        "from multiprocessing import Queue",
        "DTensor.from_local(x, mesh, run_check=True)",
    ):
        assert pickling(ast.parse(line)), line


EXACT = frozenset(
    [
        *("inf", "nan", "pi", "isfinite", "isinf", "isnan", "floor", "ceil", "prod", "gcd", "lcm", "isqrt"),
        *("sqrt", "fsum", "ldexp", "frexp"),
    ]
)
"""Names of ``math`` whose results IEEE 754 or CPython itself states."""
OF_THE_LIBRARY = frozenset(
    ["cos", "sin", "tan", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power"]
)
"""Functions of NumPy that vary between machines."""


def inexact(tree: ast.Module) -> set[str]:
    """Expressions whose last bit the C library decides: its functions, and powers unless the base is a whole number that is written down."""
    expressions: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="math"), attr=name) if name not in EXACT:
                expressions.add(ast.unparse(node))
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=name) if name in OF_THE_LIBRARY:
                expressions.add(ast.unparse(node))
            case ast.ImportFrom(module="math" | "cmath") | ast.Call(func=ast.Name(id="pow")):
                expressions.add(ast.unparse(node))
            case ast.BinOp(op=ast.Pow(), left=ast.Constant(value=int())):
                pass
            case ast.BinOp(op=ast.Pow()) | ast.AugAssign(op=ast.Pow()):
                expressions.add(ast.unparse(node))
    return expressions


DECIDE_BITS = (
    *("phalanx.data", "phalanx.model", "phalanx.parallel", "phalanx.train"),
    *("phalanx_serve.engine", "phalanx_serve.kv_cache"),
)
"""Packages whose numbers enter weights, losses or tokens."""
INEXACT = {
    # Tensors, whose powers are a portable kernel's.
    "phalanx.model.layers.attention.rotary": {
        "spec.rope_theta ** exponents",
        "spec.window_rope_theta ** exponents",
    },
    # Tables in whole numbers; tests show that no library would round an entry differently.
    "phalanx.model.init": {"math.exp"},
    "phalanx_serve.engine.sampler": {"math.log", "math.log1p"},
    # Figures for people.
    "phalanx.model.facts.optimizer_state": {"short ** 2", "short ** 3", "height ** 3", "width ** 3"},
    "phalanx.train.compare.spike": {"math.log"},
    "phalanx.train.evaluation.scoring": {"math.log"},
    "phalanx.train.evaluation.tasks": {"math.log"},
    "phalanx.train.measure.calibrate": {"(length * scale) ** 2", "scale ** 3"},
    "phalanx.train.statistics": {"math.log", "first ** 2", "(second / first ** 2) ** 2"},
}


def test_numbers_that_decide_bits_come_from_no_c_library(house: Mapping[str, Facts]) -> None:
    # Libraries differ in the last bit; phalanx.hardware.portable.correctly_rounded does not.
    assert {
        name: named.inexact
        for name, named in house.items()
        if named.inexact and any(f"{name}.".startswith(f"{package}.") for package in DECIDE_BITS)
    } == INEXACT


def test_calls_of_the_c_library_are_found_in_all_their_spellings() -> None:
    for line in (
        "math.cos(x)",
        "values = map(math.log, numbers)",
        "from math import exp",
        "pow(beta, number)",
        "beta**number",
        "10.0**-decade",
        "beta **= 2",
        "np.log(values)",
    ):
        assert inexact(ast.parse(line)), line
    assert not inexact(ast.parse("math.sqrt(dim) + 2 ** decade + math.ldexp(1.0, -30)"))


def test_quick_commands_import_neither_torch_nor_the_client_of_object_stores() -> None:
    quick = sorted(name for name in MODULES if any(f"{name}.".startswith(f"{start}.") for start in QUICK))
    code = (
        "import importlib, sys\n"
        f"for name in {quick}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch', 'obstore'):\n"
        "        if heavy in sys.modules: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_runs_a_model_imports_no_compiler() -> None:
    # It takes a second and more of every process, and is needed where blocks are compiled alone.
    starts = (
        "phalanx.fleet.node.rank.worker_main",
        "phalanx.train.lifecycle.loop",
        "phalanx_serve.workers.worker_process",
        "phalanx_serve.workers.serving_worker",
        "phalanx_serve.served.of_run",
        "phalanx_serve.cli.generate_command",
        "phalanx_serve.generate",
    )
    code = (
        "import importlib, sys\n"
        f"for name in {starts}:\n"
        "    importlib.import_module(name)\n"
        "    for heavy in ('torch._dynamo', 'torch._inductor'):\n"
        "        if heavy in sys.modules: sys.exit(f'{name} imports {heavy}')\n"
        "import torch\n"
        "from phalanx.model.transformer import Transformer\n"
        "from phalanx.run.kinds.whole_model import resolve\n"
        "from phalanx.run.spec import ModelSpec, MoeSpec\n"
        "with torch.device('meta'):\n"
        "    Transformer(resolve(ModelSpec(layers=1, dim=32, heads=2, vocab_size=64, moe=MoeSpec(experts=4))))\n"
        "if 'torch._dynamo' in sys.modules: sys.exit('a model that is built imports torch._dynamo')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
