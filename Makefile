# Everything runs inside .venv; the first target that needs it makes it.
PYTHON ?= python3
BIN := .venv/bin
# Three at a time, on two cores: much of it is processes that wait for each other. A file's tests stay
# together, and share what they set up; the files with slow tests come first (tests/conftest.py), so that all end together.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: .venv clean corners coverage demo docs docs-serve figures lab licences lint lock matrix mutants notebooks quick sbom \
  tables test tutorial types

demo: .venv/.base
	$(BIN)/gradstats demo --out demo

test: .venv
	$(PYTEST)

# Before a commit: the tests without the slow ones.
quick: .venv
	$(PYTEST) -m "not slow"

# Which lines and branches the tests run; slower than the tests alone.
coverage: .venv
	$(PYTEST) --cov --cov-report term-missing

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m numpydoc lint $$(git ls-files 'gradstats/*.py' 'capture/*.py')

types: .venv
	$(BIN)/mypy

lab: .venv/.base
	$(BIN)/jupyter lab notebooks

# What the program needs, and what its developers need besides.
.venv: .venv/.dev

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.venv/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gradstats needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) '.[demo]'
	touch $@

.venv/.dev: .venv/.base
	$(PIP) '.[dev]'
	touch $@

# What looks at environments from outside. Nothing of it is needed to develop.
.tools/.made: Makefile
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check cyclonedx-bom==7.5.0 pip-licenses==5.5.5 uv==0.13.9
	touch $@

clean:
	rm -rf .venv .tools demo site build .coverage*

# Tests, benchmarks and tools share what is in these folders.
figures licences matrix tables tutorial: export PYTHONPATH := benchmarks:tests

# The quick tests with other versions of Python and packages: tools/matrix.py. MATRIX has options for it.
matrix: .tools/.made
	PATH="$$PWD/.tools/bin:$$PATH" .tools/bin/python tools/matrix.py $(MATRIX)

# What CI installs, with the hash of each file, for Python 3.11 on Linux. WHEELS may have a folder with torch for CPUs.
lock: .tools/.made
	.tools/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu --generate-hashes \
	  --no-annotate --no-header --no-emit-find-links $(if $(WHEELS),--find-links $(WHEELS)) --extra dev \
	  --constraint constraints.txt --output-file requirements-ci.lock pyproject.toml

# Licences of what gradstats needs, into docs/install.md.
licences: .venv .tools/.made
	.tools/bin/python tools/licences.py --python $(BIN)/python --write

# What is installed, as a bill of materials (CycloneDX), into build/sbom.json.
sbom: .venv .tools/.made
	mkdir -p build
	.tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.json $(BIN)/python

# With AVX-512, or more threads, sums are taken in another order, and a training's digits differ.
notebooks tutorial: export OMP_NUM_THREADS := 1
notebooks tutorial: export ATEN_CPU_CAPABILITY := avx2
notebooks tutorial: export MKL_CBWR := AVX2
notebooks tutorial: export ONEDNN_MAX_CPU_ISA := AVX2

# Everything that is held against an aim, into docs/measurements.md: half an hour on a quiet machine. CIFAR is the folder of CIFAR-10.
corners: .venv
	$(BIN)/python benchmarks/hook_overhead.py --rounds 9 --write
	$(BIN)/python benchmarks/capture_cost.py --workload resnet20-cifar10 --data-dir $(CIFAR) --write
	$(BIN)/python benchmarks/corners.py --write

# Execute the notebooks in place, so that the outputs committed are current; nothing volatile is kept.
notebooks: .venv
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb \
	  --ExecutePreprocessor.record_timing=False --ClearMetadataPreprocessor.enabled=True \
	  --ClearMetadataPreprocessor.preserve_cell_metadata_mask=tags \
	  --ClearMetadataPreprocessor.preserve_nb_metadata_mask=kernelspec

# The documentation, in site/; a warning is an error.
docs: .venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The same at http://127.0.0.1:8000, anew whenever a page changes.
docs-serve: .venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

# The pictures of the report and the explorer need chromium; without it, the others are made.
figures: .venv
	$(BIN)/python tools/figures.py
	if command -v chromium >/dev/null; then $(BIN)/python tools/screenshot.py; fi

# Ten faults at random, and whether the tests notice them: others every day. Some minutes of tests a fault.
mutants: .venv
	$(BIN)/python -m pip install --quiet cosmic-ray
	$(BIN)/python benchmarks/mutations.py --draw "$$(date +%F)"

# Rewrite the README's table of estimation quality.
tables: .venv
	$(BIN)/python tools/tables.py --write

# Run the tutorial's scripts and commands, and put what they print into the page.
tutorial: .venv
	$(BIN)/python tests/docs/test_tutorial.py --write
