PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint venv clean

venv:
	$(PYTHON) scripts/setup_venv.py $(VENV)

demo: venv
	$(BIN)/gimbal demo $(ARGS)

test: venv lint
	$(BIN)/python -m pytest $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy gimbal_kernels runtime

clean:
	rm -rf build dist *.egg-info gimbal_kernels/_native
