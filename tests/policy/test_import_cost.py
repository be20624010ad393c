"""``import tensordict`` adds little to ``import torch``: counted in modules, not in seconds.

`benchmarks/first_light.py` measures the seconds.
"""

from __future__ import annotations

import json
import sys

import pytest

from ._project import copy_of_package, python

# Slow to import, or with effects of their own; each is imported where it is used.
HEAVY = {
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributions",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing",
    "multiprocessing.pool",
    "numpy.random",
    "sympy",
    "h5py",
    "zarr",
    "safetensors",
    "pandas",
    "pyarrow",
    "rich",
    "tqdm",
    "psutil",
}

CODE = """
import json, sys, threading
import torch
before, threads = set(sys.modules), threading.active_count()
import tensordict
print(json.dumps([sorted(set(sys.modules) - before), threading.active_count() - threads]))
"""


def added(path=None):
    out = python(CODE, path=path)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def complaints(modules, threads):
    out = [name for name in modules if name in HEAVY]
    # What is neither ours, torch's nor the standard library's is an extra.
    known = {"tensordict", "torch", "numpy"} | set(sys.stdlib_module_names)
    out += [name for name in modules if name.split(".")[0] not in known]
    others = [name for name in modules if name.split(".")[0] != "tensordict"]
    if len(others) > 30:
        out.append(f"{len(others)} modules that are not of this package")
    if threads:
        out.append(f"{threads} threads")
    return out


def test_nothing_heavy_at_import():
    assert complaints(*added()) == []


@pytest.mark.parametrize("line", ["import torch._dynamo", "import h5py", "import rich"])
def test_a_heavy_import_is_found(tmp_path, line):
    pytest.importorskip(line.removeprefix("import "), reason="the module to be found")
    path = copy_of_package(tmp_path)
    with open(path / "tensordict/__init__.py", "a") as file:
        file.write(f"\n{line}\n")
    assert line.removeprefix("import ") in complaints(*added(path))


def test_a_thread_at_import_is_found(tmp_path):
    path = copy_of_package(tmp_path)
    with open(path / "tensordict/__init__.py", "a") as file:
        file.write("\nimport threading, time\n")
        file.write("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    modules, threads = json.loads(python(CODE, path=path).stdout)
    assert "1 threads" in complaints(modules, threads)
