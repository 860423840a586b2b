"""What pyproject.toml promises: ranges, extras, one version."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import metadata, packages_distributions

import matrix
import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import block

import gradstats
from gradstats.errors import GradstatsError

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# zarr needs the first two itself, torch's CUDA builds bring the third; the last is named in types alone.
BROUGHT = {"google_crc32c", "numcodecs", "triton", "typing_extensions"}


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def imported(package):
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module.split(".")[0]


def test_everything_imported_is_declared():
    optional = {
        name_of(r) for extra in EXTRAS if extra not in ("dev", "docs") for r in EXTRAS[extra]
    }
    declared = {name_of(r) for r in PROJECT["dependencies"]} | optional
    homes = packages_distributions()
    names = {*imported("gradstats"), *imported("capture")}
    names -= {*sys.stdlib_module_names, *BROUGHT, "gradstats", "capture"}
    missing = {n for n in names if not {d.lower() for d in homes.get(n, [n])} & declared}
    assert not missing - {"distributed"}  # dask's


def test_users_get_ranges_and_the_make_targets_one_torch():
    assert not [r for r in PROJECT["dependencies"] if "==" in r]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==", constraints, re.MULTILINE)
    assert "constraints.txt" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", gradstats.__version__)


@pytest.mark.parametrize(
    ("blocked", "extra", "call"),
    [
        ("sklearn.datasets", "workloads", "capture.workloads.images.load_digits()"),
        ("distributed", "cluster", "gradstats.analysis.pieces.connect('tcp://127.0.0.1:1')"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, blocked, extra, call):
    import capture.workloads.images
    import gradstats.analysis.pieces

    assert extra in EXTRAS
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(GradstatsError, match=rf"pip install 'gradstats\[{extra}\]'$"):
        eval(call, {"capture": capture, "gradstats": gradstats})


def test_without_any_extra_the_program_answers():
    blocked = ("sklearn", "distributed", "transformers", "accelerate", "lightning", "tensorboard")
    code = (
        "import sys, runpy\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import gradstats, capture, gradstats.report, gradstats.network.plan, capture.workloads.images\n"
        "sys.argv = ['gradstats', '--help']\n"
        "runpy.run_module('gradstats', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "capture" in done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What is published: a wheel and an sdist; and the wheel that the sdist gives."""
    pytest.importorskip("hatchling", reason="make .venv installs what builds the wheel")
    folder = tmp_path_factory.mktemp("built")

    def build(project, out):
        command = [sys.executable, "-m", "hatchling", "build", "--directory", out]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return sorted(out.iterdir())

    wheel, sdist = build(ROOT, folder / "here")
    shutil.unpack_archive(sdist, folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    again, _ = build(unpacked, folder / "again")
    return wheel, unpacked, again


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_programs_and_their_data_alone(built):
    wheel, _, again = built
    content = members(wheel)
    assert content == members(again)
    tops = {name.partition("/")[0] for name in content}
    assert tops == {"gradstats", "capture", f"gradstats-{gradstats.__version__}.dist-info"}
    tracked = subprocess.run(
        ["git", "ls-files", "gradstats", "capture"], cwd=ROOT, capture_output=True, text=True
    ).stdout.splitlines()
    wanted = {n for n in tracked if not n.startswith("gradstats/explorer/js/")}
    assert {n for n in content if ".dist-info/" not in n} == wanted
    types = {"capture/py.typed", "gradstats/py.typed"}
    assert types < wanted
    assert {n.partition("licenses/")[2] for n in content if "/licenses/" in n} == {
        "LICENSE",
        "gradstats/explorer/explorer.LICENSES.txt",
    }


def test_what_an_index_shows_of_the_readme_leads_to_nothing_that_is_not_there(built):
    """An address may stand there; a file of the repository cannot be opened from an index's page."""
    wheel, *_ = built
    (text,) = (t for name, t in members(wheel).items() if name.endswith("/METADATA"))
    described = Parser().parsestr(text.decode())
    page, readme = described.get_payload(), (ROOT / "README.md").read_text(encoding="utf-8")
    assert described["Description-Content-Type"] == "text/markdown"
    assert not re.findall(r"\]\((?!\w+:)[^)]*\)", page)
    assert "](docs/tutorial.md)" in readme
    assert "Overview, install, tutorial, notebooks" in page
    for command in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL):
        assert command in page
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", readme):
        assert f"`{picture}` in the source distribution" in page


def test_the_sdist_has_what_the_tests_and_the_page_of_the_explorer_are_made_of(built):
    _, unpacked, _ = built
    for name in (
        "LICENSE",
        "CITATION.cff",
        "tests/conftest.py",
        "tests/pins/data",
        "hatch_build.py",
        "docs/img/tails.png",
    ):
        assert (unpacked / name).exists(), name
    assert (unpacked / "gradstats/explorer/js/package.json").exists()
    assert not (unpacked / "data").exists()


USE = """
import sys
from pathlib import Path
import capture, gradstats
from gradstats.explorer.page import page as explorer
from gradstats.report.html import page as report
from gradstats.registry import entries, load
assert all(Path(m.__file__).is_relative_to(sys.prefix) for m in (capture, gradstats))
for group in ("commands", "layouts"):
    (entry,) = entries(f"gradstats.{group}")
    assert callable(load(entry)) and Path(str(entry.dist.locate_file(""))).is_relative_to(sys.prefix)
assert load(entry)("resnet20-cifar10")
for page in (report("Title", "<p>body"), explorer("Title", "{}")):
    assert page.startswith("<!doctype html>") and "</html>" in page, page[:80]
"""


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """Its packages are those of this environment, by a path: nothing is downloaded, and this checkout isn't seen."""
    wheel, _, _ = built
    env = tmp_path / "env"
    venv.create(env, symlinks=True)
    python = env / "bin" / "python"
    (site,) = env.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*words):
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "install", "--no-index"]
    run(*pip, "--no-deps", "--ignore-installed", wheel)
    assert run(env / "bin" / "gradstats", "--version").split()[-1] == gradstats.__version__
    assert "resnet20-cifar10" in run(env / "bin" / "gradstats", "workloads")
    run(python, "-c", USE)


def pip_lines():
    """Return the page and the words of every `pip install` on the pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for page in sorted(pages):
        for line in re.findall(r"pip3? install ([^`\n]*)", page.read_text(encoding="utf-8")):
            words = shlex.split(line, comments=True)
            yield page.relative_to(ROOT), [w for w in words if not w.startswith("-")]


def test_every_pip_line_installs_this_checkout():
    lines = [*pip_lines()]
    assert len(lines) >= 3
    asked = set()
    for page, words in lines:
        for word in words:
            extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", word)
            assert extras, f"{page}: pip install {word}: '.[extra]' is this checkout"
            asked |= {*filter(None, (extras[1] or "").split(","))}
    assert asked <= EXTRAS.keys()


def pins(file):
    return dict(re.findall(r"(?m)^([\w.-]+)==([^\s#]+)", (ROOT / file).read_text(encoding="utf-8")))


def test_the_lock_of_ci_has_everything_that_it_installs_with_hashes():
    lock = pins("requirements-ci.lock")
    text = (ROOT / "requirements-ci.lock").read_text(encoding="utf-8")
    assert text.count("==") == len(lock)
    assert not re.search(r"==\S+$", text, re.MULTILINE)  # a hash follows each
    for name, version in pins("constraints.txt").items():
        assert lock[name].partition("+")[0] == version, name
    named = {r for extra in EXTRAS if extra != "wandb" for r in EXTRAS[extra]}
    for requirement in map(Requirement, [*PROJECT["dependencies"], *named]):
        name = canonicalize_name(requirement.name)
        if name != "gradstats":
            assert requirement.specifier.contains(lock[name]), f"{requirement}: make lock"


def families(licence):
    """Return the kinds of licences that a text names: packages write them in many ways."""
    words = {"apache": "Apache", "bsd": "BSD", "mit": "MIT", "psf": "PSF", "python software": "PSF"}
    return {family for word, family in words.items() if word in licence.lower()}


def test_the_table_of_licences_has_every_package():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- licences -->(.*?)<!-- /licences -->", page, re.DOTALL)[1]
    rows = re.findall(r"(?m)^\| ([a-z].*) \| (.*) \|$", block)[1:]
    listed = {name: licence for names, licence in rows for name in names.split("; ")}
    wanted = {canonicalize_name(Requirement(r).name) for r in PROJECT["dependencies"]}
    for extra in EXTRAS.keys() - {"dev", "docs", "wandb"}:
        wanted |= {canonicalize_name(Requirement(r).name) for r in EXTRAS[extra]}
    assert listed.keys() == wanted - {"gradstats"}, "run make licences"
    for name, licence in listed.items():
        about = metadata(name)
        said = about.get("License-Expression") or " ".join(
            [
                *(c for c in about.get_all("Classifier", ()) if "License" in c),
                about.get("License") or "",
            ]
        )
        assert families(licence) & families(said), f"{name}: {said[:80]}; run make licences"


def test_the_table_of_versions_is_that_of_the_results():
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert block("matrix", matrix.table(matrix.results())) in page, "run make matrix"


def test_the_workflow_names_its_actions_by_commit():
    workflows = [*(ROOT / ".github" / "workflows").glob("*.yml")]
    assert workflows
    for workflow in workflows:
        used = re.findall(r"uses: (\S+)", workflow.read_text(encoding="utf-8"))
        assert used
        assert [u for u in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", u)] == []


def test_the_citation_has_what_its_format_needs():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    fields = dict(re.findall(r"(?m)^([\w-]+): *(.*)$", text))
    assert {"cff-version", "title", "message", "authors"} <= fields.keys()
    assert fields["license"] == PROJECT["license"]
