"""The documentation site: it builds without a warning, and has what it promises."""

from __future__ import annotations

import pkgutil
import re
import zlib

import pytest
from conftest import ROOT
from support.every import every
from support.programs import program

import capture
import gradstats

DOCS = ROOT / "docs"
MADE = {"reference/cli.md", "assets/explore.html"}  # by tools/site/hooks.py
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_and_exists():
    nav = set(re.findall(r"[\w/]+\.md", CONFIG))
    assert nav - MADE == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


PROSE = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
PROSE += sorted(DOCS.rglob("*.md"))
each = every("page", PROSE, ids=lambda p: p.stem)


FILE = re.compile(r"\b(?:tests|tools|benchmarks|docs/results)/[\w/]+\.\w+")
NAME = re.compile(r"`(gradstats(?:\.\w+)+)`")


def test_the_pages_name_files_and_what_is_in_the_library():
    """What the next two tests look for is found: over 200 of each."""
    texts = [page.read_text(encoding="utf-8") for page in PROSE]
    for pattern in (FILE, NAME):
        assert sum(len(pattern.findall(text)) for text in texts) > 150, pattern


@each
def test_every_file_named_is_there(page):
    text = page.read_text(encoding="utf-8")
    for name in FILE.findall(text):
        assert (ROOT / name).exists(), name


@every("page", [*PROSE, ROOT / "CHANGELOG.md"], ids=lambda p: p.stem)
def test_every_link_leads_somewhere(page):
    """Without building the site, which takes a minute and is left to the slow tests."""
    made = {DOCS / name for name in MADE}
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert targets or page.stem not in ("README", "CONTRIBUTING", "CHANGELOG")
    for target in targets:
        file = page.parent / target
        assert target.startswith("http") or file.exists() or file.resolve() in made, target


@each
def test_every_name_of_the_library_exists(page):
    text = page.read_text(encoding="utf-8")
    for name in NAME.findall(text):
        if name not in ("gradstats.commands", "gradstats.estimators"):  # entry points
            pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", ["index.md", "concepts/cost.md", "howto/results.md"])
def test_the_example_runs(page):
    code = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    program("-c", "\n".join(code), cwd=ROOT)


def test_the_loop_captures_what_its_optimizer_applies(tmp_path):
    page = (DOCS / "howto/updates.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program("-c", script, cwd=tmp_path)
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert (trace.steps(), trace.kinds(0)) == ([0, 10, 20, 30], ["gradient", "update", "weight"])
    assert 0 < abs(trace.read(30, 0, "update")).max() < 0.002  # AdamW's rate is 0.001


def test_the_plain_loop_captures(tmp_path):
    page = (DOCS / "howto/plain_loop.md").read_text(encoding="utf-8")
    script, read = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program("-c", script + read, cwd=tmp_path)
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert trace.steps()[:5] == [0, 1, 2, 3, 4]
    assert trace.steps()[-1] < 200


def torchrun(folder, options, script):
    """Run a script in as many processes as torchrun would with these options; return what it printed."""
    (ranks,) = re.findall(r"--nproc-per-node (\d+)", options)
    return program(script, cwd=folder, ranks=int(ranks)).stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_the_sharded_scripts_run_as_printed(tmp_path):
    page = (DOCS / "howto/sharded.md").read_text(encoding="utf-8")
    names = re.findall(r"Save as `(\w+\.py)` and run `torchrun (.*?) \w+\.py`", page)
    train, read, compress = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for (name, options), script in zip(names, (train, compress), strict=True):
        assert len(script.splitlines()) <= 60
        (tmp_path / name).write_text(script, encoding="utf-8")
        printed = torchrun(tmp_path, options, name)
    sent, whole = map(int, re.findall(r"(\d+) bytes sent of (\d+)", printed)[0])
    assert sent < whole / 50
    trace = gradstats.open_trace(tmp_path / "fsdp.zarr")
    program("-c", read, cwd=tmp_path)
    for step in (0, 10, 20, 30, 40):
        mean = (trace.read(step, 0, "local") + trace.read(step, 1, "local")) / 2
        assert abs(trace.read(step) - mean).max() < 1e-6
    trace = gradstats.open_trace(tmp_path / "hsdp.zarr")
    assert trace.ranks == [0, 2]
    assert list(trace.kinds(2)) == ["gradient", "corrected"]


@pytest.mark.distributed
@pytest.mark.parametrize("layerwise", [False, True])
def test_the_ddp_script_with_its_compressor_captures_every_rank(tmp_path, layerwise):
    page = (DOCS / "howto/ddp.md").read_text(encoding="utf-8")
    script, compress, layers = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    before, after = re.split(r"(?m)^ddp\.register_comm_hook.*\n", script)
    if layerwise:
        *_, register = compress.splitlines(keepends=True)
        compress = compress.removesuffix(register) + layers + register
    (tmp_path / "train.py").write_text(before + compress + after, encoding="utf-8")
    torchrun(tmp_path, "--standalone --nproc-per-node 2", "train.py")
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert trace.ranks == [0, 1]
    assert trace.steps(1) == [0, 10, 20, 30, 40]
    assert list(trace.kinds(1)) == ["gradient", "corrected"]


@pytest.mark.distributed
def test_the_trial_runs_as_printed(tmp_path):
    page = (DOCS / "howto/trial.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "trial.py").write_text(script, encoding="utf-8")
    printed = torchrun(tmp_path, "--standalone --nproc-per-node 2", "trial.py")
    assert re.search(
        r"^(Confirmed|Refused|Undecided)\b.*\d pairs of 100 steps", printed, re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_the_script_with_local_steps_of_sharded_sites_runs_as_said(tmp_path):
    page = (DOCS / "howto/local_steps.md").read_text(encoding="utf-8")
    script, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shard = next(s for s in others if "fully_shard" in s)
    group = re.search(r"`(process_group=mesh.*)`", page)[1]
    before, after = re.split(r"(?m)^(?=optimizer = )", script)
    script = before + shard + after.replace("steps=10", f"steps=10, {group}")
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    printed = torchrun(tmp_path, "--standalone --nproc-per-node 4", "train.py")
    assert re.search(r"after 20 exchanges, \d+ bytes each", printed)
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert [r for r in trace.ranks if trace.has_gradients(r)] == [0, 2]
    assert trace.kinds(2) == ["gradient", "corrected", "pseudogradient"]


@pytest.mark.distributed
def test_the_script_with_local_steps_prints_and_captures_its_exchanges(tmp_path):
    page = (DOCS / "howto/local_steps.md").read_text(encoding="utf-8")
    script, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(script.splitlines()) <= 60
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    printed = torchrun(tmp_path, "--standalone --nproc-per-node 2", "train.py")
    assert re.search(r"loss 0\.\d\d after 20 exchanges, \d+ bytes each", printed)
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert trace.steps(1) == list(range(20))
    assert trace.kinds(1) == ["gradient", "corrected", "pseudogradient"]


@pytest.mark.distributed
def test_the_script_with_a_loss_scaler_captures_unscaled_gradients(tmp_path):
    page = (DOCS / "howto/mixed_precision.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    torchrun(tmp_path, "--standalone --nproc-per-node 2", "train.py")
    trace = gradstats.open_trace(tmp_path / "run.zarr")
    assert trace.steps(1) == [0, 5, 10, 15]
    assert 0 < abs(trace.read(15, 1)).max() < 10  # the scale is 65,536 and more


@pytest.mark.slow
def test_it_builds_without_a_warning_and_documents_every_public_name(tmp_path):
    build = ["-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    program(*build, cwd=ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    # Sphinx's inventory: four lines of header, then one line a name, compressed
    inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)[4]
    names = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    for package in (gradstats, capture):
        for name in package.__all__:
            assert f"{package.__name__}.{name}" in names, name
    commands = (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")
    for command in ("info", "fit", "capture", "demo"):
        assert f'id="gradstats-{command}"' in commands
    assert "var __index = " in (tmp_path / "search" / "search_index.js").read_text("utf-8")[:20]
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'src="assets/iframe-worker.js"' in index
    assert f"gradstats {gradstats.__version__}" in index
    linked = re.findall(r'href="reference/cli.html#([\w-]+)"', index)
    assert linked
    for name in linked:
        assert f'id="{name}"' in commands, name
    pictures = 0
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f'href="notebooks/{notebook.stem}.html"' in (tmp_path / "notebooks.html").read_text()
        page = (tmp_path / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        for picture in re.findall(r'<img[^>]*src="([^"]+)"', page):
            assert (tmp_path / "notebooks" / picture).is_file(), (notebook, picture)
            pictures += 1
    assert pictures > 5
    for page in tmp_path.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert "arithmatex" not in html, page
        assert not re.search(r'<(?:script|link)[^>]*(?:src|href)="https?:', html), page
