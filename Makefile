# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for contributors.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# One worker per core; a worker that is done takes over tests of another. `-n 0` runs them in one process.
FAST := -n logical --maxprocesses 8 --dist worksteal -m "not slow and not vllm and not llamacpp"

.PHONY: demo test slow check style types docs images matrix test-with wheels clean

demo: $(VENV)/demo
	$(BIN)/python examples/demo.py

test: $(VENV)/test
	$(BIN)/python -m pytest $(FAST)

slow: $(VENV)/test $(VENV)/demo
	$(BIN)/python -m pytest -m slow

check: style test

style: $(VENV)/test types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# mypy and pyright do not follow setuptools' package-dir: show them the packages under their import names.
types:
	mkdir -p build/types/foredraft
	for entry in core/* adapters plugins; do ln -sfn ../../../$$entry build/types/foredraft/$$(basename $$entry); done

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade setuptools wheel -c constraints.txt

$(VENV)/demo $(VENV)/test $(VENV)/docs: $(VENV)/%: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -c constraints.txt --editable ".[$*]"
	touch $@

# The site, in site/; warnings are errors.
docs: $(VENV)/docs types images
	$(BIN)/foredraft plugins --write docs/reference/keys.md
	$(BIN)/mkdocs build --quiet

# Who sees whom, drawn from the patterns that training uses.
images: $(VENV)/test
	$(BIN)/foredraft draw eagle3 ttt_steps=3 --out docs/images/mask_eagle3.png
	$(BIN)/foredraft draw peagle num_depths=3 --out docs/images/mask_peagle.png
	$(BIN)/foredraft draw dflash block_size=5 anchors=3 num_layers=1 --out docs/images/mask_dflash.png

# Runs every adapter × algorithm and writes the README's table.
matrix: $(VENV)/test
	$(BIN)/python benchmarks/matrix.py --write README.md

# The ends of the supported range: make test-with TRANSFORMERS=5.18.0
test-with:
	$(PYTHON) -m venv .venv-$(TRANSFORMERS)
	.venv-$(TRANSFORMERS)/bin/pip install --quiet -c constraints.txt setuptools wheel
	grep -vE "^(transformers|tokenizers|huggingface_hub)==" constraints.txt > .venv-$(TRANSFORMERS)/constraints.txt
	.venv-$(TRANSFORMERS)/bin/pip install -c .venv-$(TRANSFORMERS)/constraints.txt --editable ".[test]" transformers==$(TRANSFORMERS)
	.venv-$(TRANSFORMERS)/bin/python -m pytest $(FAST)

# For a machine that has torch and reaches no index: wheels of what it may lack, in build/wheels (PYTHON_VERSION: the one there).
#   there: python -m pip install --no-index --no-deps build/wheels/*.whl, then pip install --no-deps --no-build-isolation -e .
PYTHON_VERSION ?= 3.12
CARRIED := transformers accelerate pydantic pydantic_core typing-inspection annotated-types datasets dill multiprocess pluggy typer filelock
wheels: $(VENV)/bin/python
	rm -rf build/wheels
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version $(PYTHON_VERSION) -c constraints.txt -d build/wheels $(CARRIED)
	du -sh build/wheels

clean:
	rm -rf build dist .cache runs *.egg-info
