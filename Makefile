# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes the virtual environment first, once.

VENV := .venv
PYTHON := $(VENV)/bin/python
# A CPU build of torch is enough here, and small; a GPU machine may bring its own: see CONTRIBUTING.
TORCH := torch==2.13.0

# What `make compile-matrix` uses: TRITON=3.9.0 another Triton, in an environment without torch.
TRITON :=
RECORD :=
MATRIX := $(if $(TRITON),.venv-triton-$(TRITON),$(VENV))

.PHONY: demo test compile-matrix lint format clean

demo: $(VENV)/ready
	$(PYTHON) -m limelight demo --question "Why should we protect the forests?"

test: $(VENV)/ready
	$(PYTHON) -m pytest -n auto
	TRITON_INTERPRET=1 $(PYTHON) -m pytest -n auto tests/kernels/test_interpreter.py \
		tests/kernels/test_jax_steps.py

compile-matrix: $(MATRIX)/ready
	PYTHONPATH=tests/kernels $(MATRIX)/bin/python -m compile_matrix $(if $(RECORD),--record)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(PYTHON)

format: $(VENV)/ready
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(TORCH) -c constraints.txt
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e ".[demo,dev]" -c constraints.txt
	touch $@

.venv-triton-%/ready: pyproject.toml constraints.txt
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -e . triton==$* -c constraints.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-triton-*
