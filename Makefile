# Everything here works on a fresh clone with Python >= 3.10 and make: the first target that needs the virtual
# environment makes it.  Another interpreter:  make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Without compiled code each program that a test starts compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv style check quick-tests test all-tests demo charts docs docs-serve bench clean

# The site needs neither torch nor the rest of $(VENV): docstrings are read, not imported.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

# The inner loop: what starts ranks, kills processes or tries thousands of examples is left to `make test`.
LEFT_OUT := core/laws core/chaos extras/energon/compat house trainer/parallel

help:
	@echo "make venv    make the virtual environment in $(VENV) and install everything into it"
	@echo "make style   style, types, import contracts: seconds"
	@echo "make check   style, and the tests that are quick: some 7 minutes on two cores; run it before each commit"
	@echo "make test    style, and all tests; run it before a merge"
	@echo "make demo    the whole way on real data, some 3 minutes; writes demo-output/"
	@echo "make charts  a model learns to answer questions about charts, under half an hour; writes charts-output/"
	@echo "make docs    the site, from docs/ and the docstrings, into build/site; links and anchors are checked"
	@echo "make docs-serve  the site at http://127.0.0.1:8000, which follows what you write"
	@echo "make bench   list the benchmark scripts"
	@echo "make clean   remove what the other targets made (but not $(VENV))"

venv: $(STAMP)

# torch first and alone: with the version given exactly, pip takes a local CPU build if the machine offers one, and
# the other packages then find it installed instead of resolving it again. Compiled on all processors, where pip takes
# one; some packages bring files that are no Python, which is no error.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; set PYTHON=...")'
	@test -x $(BIN)/python || { echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing into $(VENV) (some minutes the first time)"
	@$(PIP) install -qq --no-compile -c constraints.txt torch==2.13.0
	@$(PIP) install -qq --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true
	@touch $@

style: venv
	@echo "== ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "== ruff format"
	@$(BIN)/ruff format --quiet --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import contract"
	@$(BIN)/lint-imports --no-logo

# Tests wait a sixth of their time: style is checked beside them. If one fails, the other still runs to its end.
check: venv
	@$(MAKE) --no-print-directory -j 2 style quick-tests

test: venv
	@$(MAKE) --no-print-directory -j 2 style all-tests

quick-tests: venv
	@echo "== pytest, without $(LEFT_OUT) and what is marked as slow"
	@HYPOTHESIS_PROFILE=check $(BIN)/python -m pytest -n 2 -q -m "not slow and not nightly" \
		$(addprefix --ignore=tests/,$(LEFT_OUT))

all-tests: venv
	@echo "== pytest"
	@$(BIN)/python -m pytest -n 2 -q
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		echo "== pytest on the GPU"; $(BIN)/python -m pytest -q -m gpu; fi

demo: venv
	@$(BIN)/python -m examples.demo

charts: venv
	@$(BIN)/python -m examples.charts

$(DOCS_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed for the site; set PYTHON=...")'
	@test -x $(DOCS_VENV)/bin/python || { echo "== making $(DOCS_VENV)"; $(PYTHON) -m venv $(DOCS_VENV); }
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r $(DOCS_VENV)/requirements.txt
	@touch $@

# NO_MKDOCS_2_WARNING: without an advertisement for another program.
docs: $(DOCS_STAMP)
	@echo "== mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html (to search in it, serve it: make docs-serve)"

docs-serve: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs serve --watch energon_lite --watch tools/site

bench: venv
	@echo "Benchmark scripts (run one with $(BIN)/python <script>):"
	@find tools/bench -name '*.py' | sort

clean:
	rm -rf demo-output charts-output build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
