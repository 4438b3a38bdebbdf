# Every target sets up .venv by itself and is safe to run again.
#   make serve                        the embedded default model on http://127.0.0.1:8080
#   make serve MODEL=qwen3.6-35b-moe  another model (a card id, a Hugging Face repo or a local folder)
#   make serve ARGS="--port 9000"     more options, see .venv/bin/pooled-mlx serve --help

MODEL ?= $(if $(POOLED_MLX_MODEL),$(POOLED_MLX_MODEL),smollm2-135m)
ARGS ?=
WORKERS ?= 2
VENV ?= .venv
export VENV
BIN = $(VENV)/bin

.PHONY: help serve test check format fuzz bench soak agents setup docs wheel clean

help:
	@echo "make serve   set up and serve the embedded model (MODEL=..., ARGS=...)"
	@echo "make test    set up and run the whole test suite (ARGS=... goes to pytest, WORKERS=0 runs it in one process)"
	@echo "make check   formatting, lint and types"
	@echo "make format  apply the formatting and the safe lint fixes"
	@echo "make fuzz    5,000 broken requests each to a fake engine and to a small room"
	@echo "make bench   the benchmarks that docs/benchmarks.md reports"
	@echo "make soak    the long endurance test"
	@echo "make agents  install real coding agents into build/agents and run them against scripted answers"
	@echo "make docs    regenerate docs/settings.md and docs/models.md"
	@echo "make wheel   build the wheel into dist/"

setup:
	@sh scripts/setup.sh dev

serve:
	@sh scripts/setup.sh runtime
	@exec $(BIN)/pooled-mlx serve --model "$(MODEL)" $(ARGS)

test:
	@sh scripts/setup.sh dev
	@OPENBLAS_NUM_THREADS=$${OPENBLAS_NUM_THREADS:-1} exec $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

check:
	@sh scripts/setup.sh dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format:
	@sh scripts/setup.sh dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz:
	@sh scripts/setup.sh dev
	@exec $(BIN)/python -m scripts.fuzz $(ARGS)

bench:
	@sh scripts/setup.sh dev
	@exec $(BIN)/python -m benchmarks $(ARGS)

soak:
	@sh scripts/setup.sh dev
	@exec $(BIN)/python -m benchmarks.soak $(ARGS)

agents:
	@sh scripts/setup.sh dev
	@exec $(BIN)/python scripts/agents/run_agents.py --install $(ARGS)

docs:
	@sh scripts/setup.sh dev
	$(BIN)/python scripts/docs.py

wheel:
	@sh scripts/setup.sh dev
	$(BIN)/python -m pip wheel -q --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .hypothesis
