# Commands for users: `make demo`, `make test`, and `make bench`, which trains side by side with what else there is.
# All set up .venv first. `make clients` installs what the clients in JavaScript, C++ and Go are built and tested with (npm), `make demo-web` serves a page that trains in the browser. `make docs` builds the documentation as a site, in an environment of its own. `make peers` installs what `make bench` compares with beside torch, and `make data-peers` what benchmarks/data_loading.py compares with, each in an environment of its own.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
DATA_PEERS := .venv-data-peers
DOCS := .venv-docs
PEERS_PYTHON ?= python3.11
BIN := $(VENV)/bin
NODE_MODULES := clients/javascript/node_modules
ORT_HEADERS := build/onnxruntime
ORT_HEADERS_PACKAGE := com.github.asus4.onnxruntime@0.4.9

.PHONY: demo demo-web test bench peers data-peers clients check docs clean

$(VENV)/installed: pyproject.toml constraints.txt $(wildcard lock*.txt)
	@echo "setting up $(VENV): a few minutes, once"
	$(PYTHON) -m venv $(VENV)
	dev/install $(BIN)/python
	touch $@

demo: $(VENV)/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" dev/demo

demo-web: $(VENV)/installed $(NODE_MODULES)/installed
	$(BIN)/python dev/demo_web

# Without npm, or the network, the tests of the JavaScript client are skipped and say so.
test: $(VENV)/installed
	-if command -v npm > /dev/null; then timeout 300 $(MAKE) --no-print-directory clients; fi
	PYTHON=$(BIN)/python dev/test

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.compare $(TASKS)

peers:
	$(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet onnxruntime-training==1.19.2 "numpy<2" onnx==1.16.2 setuptools
	$(PEERS)/bin/python -m pip install --quiet --no-deps --target $(PEERS)/onnx2torch onnx2torch==1.5.15

# Streaming's clients of object stores are left out; torchvision is for its imports.
data-peers:
	$(PEERS_PYTHON) -m venv $(DATA_PEERS)
	$(DATA_PEERS)/bin/python -m pip install --quiet --requirement benchmarks/data_peers.txt
	$(DATA_PEERS)/bin/python -m pip install --quiet --no-deps mosaicml-streaming==0.13.0 torchvision==0.28.0

clients: $(NODE_MODULES)/installed $(ORT_HEADERS)/installed

# The scripts of packages fetch what is not used here.
$(NODE_MODULES)/installed: clients/javascript/package-lock.json
	cd clients/javascript && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

# The headers of ONNX Runtime 1.29 for C++; a newer library runs what is compiled with them. No registry has them alone,
# so they are taken out of a package that ships them with the runtime for every platform (150 MB, not kept).
$(ORT_HEADERS)/installed:
	rm -rf $(ORT_HEADERS) && mkdir -p $(ORT_HEADERS)
	cd $(ORT_HEADERS) && npm pack --silent $(ORT_HEADERS_PACKAGE) && \
	sha256sum --check --quiet $(CURDIR)/clients/cpp/headers.sha256 && \
	tar xzf *.tgz --strip-components=7 --wildcards '*/ios-arm64/*/Headers/*.h' && rm *.tgz
	touch $@

check: $(VENV)/installed
	PYTHON=$(BIN)/python dev/check

docs: $(DOCS)/installed
	$(DOCS)/bin/python dev/site

# The lock's hashes are for one Python and platform; elsewhere its versions are installed without comparing them.
$(DOCS)/installed: lock-docs.txt
	$(PYTHON) -m venv $(DOCS)
	if $(DOCS)/bin/python dev/lock --fits; \
	then $(DOCS)/bin/python -m pip install --quiet --require-hashes --no-deps --requirement lock-docs.txt; \
	else grep -o '^[^ ]*==[^ ]*' lock-docs.txt | xargs $(DOCS)/bin/python -m pip install --quiet; fi
	touch $@

clean:
	rm -rf build demo $(NODE_MODULES) $(VENV) $(PEERS) $(DATA_PEERS) $(DOCS)
