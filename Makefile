# Two set-up commands: `make train` and `make test`. Each makes .venv first if it is missing or out of date.

PYTHON ?= python3
NAME ?= sample
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help train test check

help:
	@echo "make train [ARGS=...]  write the sample corpus and train a small GPT on it (resumes where it stopped)"
	@echo "make test [ARGS=...]   run the tests"
	@echo "make check             check format, lint and types"
	@echo "PYTHON=python3.12      with any of these: the interpreter that .venv is made with"
	@echo "NAME=other             with train: a run of another name starts from step 0"

train: .venv/.installed
	$(BIN)/ingest sample data/sample
	$(BIN)/python -m jobs.pretrain --config data/sample/run.yaml --storage runs --name $(NAME) --max-steps 250 $(ARGS)

test: .venv/.installed
	$(BIN)/pytest $(ARGS)

check: .venv/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy --strict ingest jobs

# The stamp comes last, so an interrupted installation is done again.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fast,test]'
	@touch $@
