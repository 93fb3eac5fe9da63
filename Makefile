# `make demo` and `make test` work on a clean clone: the environment is made on first use (about 3.5 GB).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint venv clean

venv:
	@$(PYTHON) scripts/setup_venv.py $(VENV)

# The loop on real vLLM, stock against Gimbal. ARGS="--all-modes" runs the five modes.
demo: venv
	$(BIN)/gimbal demo $(ARGS)

# Everything, real servers included. ARGS='-m "not vllm"' leaves those out.
test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gimbal_kernels runtime

clean:
	rm -rf build dist *.egg-info gimbal_kernels/_native demo-out
	rm -f $(VENV)/gimbal-setup.json
