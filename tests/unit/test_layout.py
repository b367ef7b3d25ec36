"""The five parts stand at the root, have one import name, and reach the wheel whole."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("actor", "broker", "kernels", "learner", "sandbox")
SOURCE_SUFFIXES = (".py", ".c", ".toml", ".cfg", ".json", ".html", ".css", ".js", ".typed")


def package_files():
    """Every file that belongs to the package, by its path in the wheel."""
    found = set()
    for folder, _, names in os.walk(ROOT / "src/headrace", followlinks=True):
        for name in names:
            path = Path(folder, name).relative_to(ROOT / "src")
            if "__pycache__" not in path.parts and path.suffix in SOURCE_SUFFIXES:
                found.add(path.as_posix())
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of the tree, and the wheel built from that sdist."""
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *PARTS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    subprocess.run(
        [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", work / "dist", tree],
        check=True,
        capture_output=True,
    )
    return work / "dist"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_a_folder_at_the_root_and_a_relative_link_in_the_package(part):
    link = ROOT / "src/headrace" / part
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{part}"
    assert link.resolve() == ROOT / part
    assert (ROOT / part / "__init__.py").is_file()


def test_there_are_links_to_the_parts_and_to_nothing_else():
    links = {path.name for path in (ROOT / "src/headrace").iterdir() if path.is_symlink()}
    assert links == set(PARTS)


def test_every_folder_with_modules_is_a_package():
    missing = [
        str(path)
        for path in map(Path, package_files())
        if path.suffix == ".py" and not (ROOT / "src" / path.parent / "__init__.py").is_file()
    ]
    assert missing == []


def test_the_wheel_built_from_the_sdist_holds_every_file_of_every_part(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("headrace/")}
    assert names == package_files()
    for part in PARTS:
        assert f"headrace/{part}/__init__.py" in names


def test_the_wheel_has_one_package_the_licence_and_the_command(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
        (entry_points,) = [name for name in names if name.endswith("entry_points.txt")]
        declared = wheel.read(entry_points).decode()
    tops = {name.partition("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"headrace"}
    assert any(name.endswith("LICENSE") for name in names)
    assert "headrace = headrace.cli.main:main" in declared


def test_the_sdist_holds_no_links(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        assert not [member.name for member in sdist if member.issym() or member.islnk()]


def test_the_installed_wheel_runs_from_another_folder_without_the_sources(built, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); import headrace.cli.main as shell; "
        "assert shell.__file__.startswith(sys.path[0]); sys.exit(shell.main(['--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.startswith("usage: headrace COMMAND")


def test_a_foreign_package_called_kernels_stays_importable_from_the_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("def get_kernel():\n    return 'foreign'\n")
    program = (
        "import sys; sys.path.append(sys.argv[1]); import kernels, headrace.kernels; "
        "print(kernels.get_kernel(), headrace.kernels.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["foreign", "headrace.kernels"]


@pytest.mark.parametrize("part", PARTS)
def test_ruff_refuses_the_bare_name_of_a_part(part):
    text = f'"""A module."""\n\nfrom {part}.x import y\n\n__all__ = ["y"]\n'
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "learner/probe.py", "-"],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "TID251" in done.stdout
    assert f"headrace.{part}" in done.stdout


def test_ruff_refuses_relative_imports():
    text = '"""A module."""\n\nfrom .x import y\n\n__all__ = ["y"]\n'
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "learner/probe.py", "-"],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert "TID252" in done.stdout


def test_no_file_of_the_package_is_longer_than_500_lines():
    lengths = {
        name: len((ROOT / "src" / name).read_text().splitlines())
        for name in package_files()
        if name.endswith(".py")
    }
    assert {name: length for name, length in lengths.items() if length >= 500} == {}


def test_the_lock_pins_every_package_once_and_leaves_out_what_breaks_transformers():
    lines = (ROOT / "requirements/cpu.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(set(names)) == len(names)
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
