# headrace from a fresh clone: `make train` and `make test` set everything up first.

VENV := .venv
BIN := $(VENV)/bin
MODEL := models/smollm2-135m-instruct
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# the first Python on the path that headrace runs on; set PYTHON to choose another
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)

# two at a time: on two cores one worker left half of them idle; a file's tests stay together
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

HAS_BROWSER := { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1

.PHONY: setup train test browser check clean

setup: $(VENV)/.project $(MODEL)/config.json

train: setup
	$(BIN)/headrace train examples/quickstart.toml

test: setup browser
	@if $(HAS_BROWSER); then set -x; $(PYTEST); else \
	echo "test: no Chromium here, so its tests are left out (docs/install.md)" >&2; \
	set -x; $(PYTEST) -m "not gpu and not browser"; fi

# the page of `headrace report` is tested in Chromium
browser:
	@$(HAS_BROWSER) && exit; \
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0; \
	echo "setup: installing chromium for the browser tests"; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ timeout 120 apt-get -qq update && timeout 600 apt-get -qq install --yes --no-install-recommends chromium; } \
	    </dev/null >/dev/null 2>&1 || true

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist src/headrace.egg-info .pytest_cache .mypy_cache .ruff_cache

# each stamp is touched last, so that a set-up that was interrupted is done again
$(VENV)/.locked: requirements/cpu.lock
	@test -n "$(PYTHON)" || { echo "setup: no Python 3.11 to 3.13 found; set PYTHON=..." >&2; exit 1; }
	@echo "setup: environment in $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing $$(grep -c == $<) locked packages (a few minutes at most)"
	@$(PIP) install --no-deps -r $<
	@$(BIN)/python -c "import torch" 2>/dev/null || { echo "setup: torch does not import: pip took a" \
	    "build for GPUs; configure it for torch's CPU build (docs/install.md)" >&2; exit 1; }
	@touch $@

$(VENV)/.project: $(VENV)/.locked pyproject.toml
	@echo "setup: installing headrace"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(MODEL)/config.json: | $(VENV)/.project
	@echo "setup: making the model $(MODEL)"
	@TQDM_DISABLE=1 $(BIN)/headrace model make smollm2-135m-instruct $(MODEL)
