# make demo, make test: all that a fresh machine needs. The rest is for developers.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTO_VENV := .venv-proto

.PHONY: demo test test-sglang lint bench evaluation proto clean

# A stamp for each set of extras, so that an unchanged checkout installs once.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install -q -c constraints.txt -e '.[train,otel,dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/specgov demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not sglang" $(PYTEST_ARGS)

test-sglang:
	tests/sglang/run $(PYTEST_ARGS)

# mypy reads the installed, non-editable package: that is what users get.
lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	tests/packaging/mypy_installed $(BIN)/python

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/hot_path.py -o out/hot_path.json

# The tables and pictures of docs/policies.md. Goes on where it was interrupted, as long as the code is the same.
evaluation: $(VENV)/.base env/tuned_peers.json
	$(BIN)/specgov evaluate --suite quick -o out/quick.jsonl --renew --update docs/policies.md
	$(BIN)/specgov plot out/quick.jsonl -o docs
	$(BIN)/specgov evaluate --suite standard -o out/standard.jsonl --renew --update docs/policies.md
	$(BIN)/specgov plot out/standard.jsonl -o docs

env/tuned_peers.json: | $(VENV)/.base
	$(BIN)/specgov tune peers -o $@

# Generated with protobuf 6's compiler, so that the code loads under protobuf 6 and 7.
proto:
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip --disable-pip-version-check install -q grpcio-tools==1.76.0 mypy-protobuf==5.1.0 'setuptools<81'
	proto/generate $(PROTO_VENV)/bin

clean:
	rm -rf $(VENV) $(PROTO_VENV) build dist .cache out
