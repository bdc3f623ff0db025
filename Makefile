# Two commands for a newcomer: `make run` and `make test`. Each sets up .venv on its first call.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-full test-random check docs pages messages format stubs setup clean

run: setup  ## train the main recipe, after some steps of it without techniques, and print what they did
	before=outputs/baseline/$$(date +%Y-%m-%d_%H-%M-%S); \
	$(BIN)/lightning-eff train baseline trainer.max_steps=24 '~monitors.text_sample' hydra.run.dir=$$before && \
	$(BIN)/lightning-eff train lm monitors.efficiency_report.baseline=$$before

test: setup  ## the tests that every change must pass
	$(BIN)/python -m pytest -m "not slow"

test-full: setup .venv/triton-3.6 .venv/ray.stamp  ## all tests, and more generated examples of each property; not under nohup, which makes child processes ignore signals
	$(BIN)/python -m pytest --hypothesis-profile=full

test-random: setup  ## the tests in another order each time: none depends on what another left
	$(BIN)/python -m pytest -m "not slow" -p randomly --randomly-dont-reset-seed

check: setup .venv/check.stamp  ## format, lint, types, import directions, links of the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	$(BIN)/zensical build --strict
	$(BIN)/python -m pytest -n 0 tests/test_docs.py -k "menu or links"

docs: setup .venv/check.stamp  ## the site, in site/; python -m http.server -d site
	$(BIN)/zensical build --strict

format: setup .venv/check.stamp  ## what `check` would complain about and can be mended by a machine
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stubs: setup  ## lightning_eff/__init__.pyi, after a public name has come or gone
	$(BIN)/python -m tests.support.stubs

pages: setup  ## frames and tables of docs/, after a technique, its YAML or a measurement has changed
	$(BIN)/python -m tests.support.pages

messages: setup  ## tests/messages.md, after a message or a rule has changed
	$(BIN)/python -m tests.test_messages

setup: .venv/setup.stamp  ## .venv with the tested versions; does nothing when they are there

.venv/setup.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[test]'
	@touch $@

# The Triton of the torch before: the kernels are compiled with it too.
.venv/triton-3.6: | .venv/setup.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

# Half a gigabyte with what it needs: only for the tests that start jobs of Ray, and sweeps by plugins of Hydra.
.venv/ray.stamp: .venv/setup.stamp
	$(PIP) --editable '.[test,ray,slurm,joblib,optuna]'
	@touch $@

.venv/check.stamp: .venv/setup.stamp
	$(PIP) --editable '.[test,check,docs]'
	@touch $@

# Debian ships python3 without ensurepip: then the pip outside fills the venv.
.venv/bin/python:
	$(PYTHON) -m venv .venv || ( rm -rf .venv && $(PYTHON) -m venv --without-pip .venv \
		&& $(PYTHON) -m pip --python .venv/bin/python install --quiet pip )

clean:  ## everything that the other targets made, runs included
	rm -rf .venv outputs build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
