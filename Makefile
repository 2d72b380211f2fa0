# make help lists the targets. A machine needs Python 3.11 with its venv module, git and make.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP_INSTALL := pip install --disable-pip-version-check --progress-bar off
# torch's CUDA build requires Triton, its CPU build does not; a slow test runs the GPU's kernel in Triton's interpreter.
TRITON := 3.7.1
TORCH  := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.txt)
# Where PyTorch publishes its CPU builds; used only if pip's own sources have none.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
# Benchmarks are the modules whose docstring names their command; the other modules are parts of them.
BENCHMARKS := $(shell for file in benchmarks/*.py; do name=$$(basename $$file .py); grep -q "make bench NAME=$$name" $$file && echo $$name; done)

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm clients docs reference demo wheel test test-slow test-all test-repeat mutants test-gpu gpu-report chart fuzz check sbom audit audit-image bench report archives clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

setup: $(VENV)/.ready  ## make .venv with all packages

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 is needed and there is no python3 on the PATH" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed; name it: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: this Python has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Installs torch unless the environment has this version: the CPU build, or PyPI's CUDA build, which runs on CPUs, too,
# if there is none. The suffix +cpu keeps pip from installing the CUDA build instead.
define install_torch
  $(1)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH)")' 2>/dev/null \
  || $(1)/$(PIP_INSTALL) -q --retries 1 --extra-index-url $(TORCH_CPU_INDEX) torch==$(TORCH)+cpu 2>/dev/null \
  || { echo "make: no CPU build of torch $(TORCH), neither in pip's sources nor in $(TORCH_CPU_INDEX); installing the CUDA build (3 GB more)" >&2 \
    && $(1)/$(PIP_INSTALL) torch==$(TORCH); }
endef

$(VENV)/.ready: $(VENV)/bin/python requirements.txt setup.py
	@echo "setting up $(VENV) (a few minutes the first time)" >&2
	@$(call install_torch,$(BIN))
	$(BIN)/$(PIP_INSTALL) -q -r requirements.txt
	$(BIN)/$(PIP_INSTALL) -q --no-deps -e .
	@touch $@

# vLLM has an environment of its own, because it pins other versions of the handlers' libraries. torch is the same.
setup-vllm: .venv-vllm/.ready  ## install vLLM for the CPU (3.5 GB), for handler.engine.name: vllm and its tests

.venv-vllm/.ready: requirements-vllm.txt scripts/setup_vllm.py | $(VENV)/bin/python
	$(BIN)/python -m venv .venv-vllm
	@$(call install_torch,.venv-vllm/bin)
	.venv-vllm/bin/$(PIP_INSTALL) -q --no-deps -r requirements-vllm.txt
	.venv-vllm/bin/python scripts/setup_vllm.py
	@touch $@

# A virtual environment of its own, because these libraries pin other versions.
clients: .venv-clients/.ready  ## install the SageMaker SDK, LangChain and JavaScript clients, whose tests are skipped without them

# npm is a package of requirements-clients.txt. Without the npm registry, only the JavaScript clients are left out.
JAVASCRIPT := tests/torchserve/clients/javascript
.venv-clients/.ready: requirements-clients.txt $(JAVASCRIPT)/package-lock.json | $(VENV)/bin/python
	$(BIN)/python -m venv .venv-clients
	.venv-clients/bin/$(PIP_INSTALL) -q -r requirements-clients.txt
	@cp $(JAVASCRIPT)/package.json $(JAVASCRIPT)/package-lock.json .venv-clients/
	@PATH="$$PWD/.venv-clients/bin:$$PATH" npm ci --prefix .venv-clients --silent --no-audit --no-fund && touch $@ \
	  || echo "make: npm could not install the JavaScript clients; their tests are skipped, and fail in CI" >&2

# build_archives.py builds only archives that are not up to date. Without network it reports that llm.mar is left out.
archives: setup  ## build model_store/*.mar; the first time, SmolLM2 (93 MB) and MiniLM (84 MB) are downloaded
	@$(BIN)/python scripts/make_smollm2.py --optional
	@$(BIN)/python scripts/make_minilm.py --optional
	@$(BIN)/python scripts/build_archives.py

demo: setup  ## start two TorchServe instances and the proxy, and ask about a picture with boto3
	@$(BIN)/python scripts/build_archives.py --only llava
	$(BIN)/python scripts/demo.py

wheel: setup  ## build dist/torchmoor-*.whl; COMPILED=1: with the proxy's common path compiled, for this Python and machine
	@rm -rf build/lib build/lib.*  # modules from earlier builds, which would all go into the wheel
	TORCHMOOR_COMPILED=$(COMPILED) $(BIN)/pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation -w dist .

docs: setup  ## build the documentation as a site with a search field: build/site
	@$(BIN)/zensical build --strict

reference: setup  ## rewrite the generated pages: settings, commands, metrics, routes, modules
	@$(BIN)/python scripts/make_reference.py

check: setup  ## run ruff, mypy, import contracts, rules for modules and names, wording, generated pages, and the documentation's links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 0 tests/unit/test_source.py tests/unit/test_documents.py
	$(BIN)/python scripts/check_prose.py
	$(BIN)/python scripts/make_reference.py --check
	$(BIN)/zensical build --strict

# A virtual environment of its own, so that these programs are not in the list that they write.
.venv-audit/.ready: requirements-audit.txt | $(VENV)/bin/python
	$(BIN)/python -m venv .venv-audit
	.venv-audit/bin/$(PIP_INSTALL) -q -r requirements-audit.txt
	@touch $@

# Without cyclonedx-py's validation, which takes 25 s of processor time; a slow test validates the list.
sbom: setup .venv-audit/.ready  ## list every package of .venv with version and licence, in CycloneDX's format: build/sbom.json
	@mkdir -p build
	@.venv-audit/bin/cyclonedx-py environment --no-validate --output-reproducible -o build/sbom.json $(BIN)/python
	@echo "build/sbom.json is ready" >&2

# pip-audit exits with 1 both for a finding and for a missing answer; it writes its result only in the first case.
audit: setup .venv-audit/.ready  ## list known vulnerabilities of these packages, from OSV's database (network): build/audit.json
	@mkdir -p build
	@rm -f build/audit.json
	@site=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  .venv-audit/bin/pip-audit -s osv --progress-spinner off --desc off -f json -o build/audit.json --path $$site 2>build/audit.log; \
	  status=$$?; tail -1 build/audit.log >&2; \
	  if [ ! -e build/audit.json ]; then \
	    echo "make: nothing was audited: api.osv.dev did not answer; build/audit.log has the details" >&2; exit 1; \
	  fi; \
	  echo "build/audit.json is ready" >&2; exit $$status

# Torch has one thread in each process; if a test has two, the second one waits passively. Tests often wait for a browser
# or the end of TorchServe, so three processes suit two cores. Hundreds of programs import the same modules, which takes
# long if the environment forbids to keep bytecode, so that variable is emptied.
PYTEST_WORKERS ?= 3
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(PYTEST_WORKERS)
test: setup archives  ## test everything that users rely on, in PYTEST_WORKERS processes; 0: in one, without pytest-xdist
	$(PYTEST) -m "not slow and not long and not gpu" $(ARGS)

$(VENV)/.triton: $(VENV)/.ready
	$(BIN)/$(PIP_INSTALL) -q triton==$(TRITON)
	@touch $@

test-slow: setup archives $(VENV)/.triton  ## test faults and memory under load, image, AWS emulation, namespaces, 200 models: as root, with .ci/run's Debian packages
	$(PYTEST) -m "slow and not long and not gpu" $(ARGS)

test-all: setup archives $(VENV)/.triton  ## run both, and what CI does not run: pods, SageMaker's local mode, 1000 sessions, all benchmarks
	$(PYTEST) -m "not gpu" $(ARGS)

N ?= 10
test-repeat: setup archives  ## run make test N times beside four busy processes, and list failures by test: make test-repeat [N=10]
	$(BIN)/python scripts/repeat_tests.py $(N) $(ARGS)

mutants: setup  ## change one expression at a time in core modules, and list changes that no test detects: make mutants [NAME=session_ids] [EVERY=5]
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/run_mutants.py $(NAME) $(if $(EVERY),--every $(EVERY))

chart: setup  ## write the Helm chart: build/helm/torchmoor (docs/kubernetes.md)
	@$(BIN)/python scripts/make_helm_chart.py

# setup installs the CPU build of torch, unless a CUDA build of the same version is there.
test-gpu: setup  ## run the GPU tests, on a machine with a GPU and torch's CUDA build
	@$(BIN)/python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' \
	  || { echo "make: torch finds no GPU; its CUDA build: $(BIN)/pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu130 torch==$(TORCH)" >&2; exit 1; }
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Without `setup`, so that it runs with the torch and transformers that a borrowed GPU machine has.
PYTHON_GPU ?= $(shell test -x $(BIN)/python && echo $(BIN)/python || echo python3)
gpu-report:  ## measure the engine on this machine's GPU, in at most 9 minutes: make gpu-report [ARGS="--minutes 4 --only decode"]
	$(PYTHON_GPU) -m benchmarks.gpu_report $(ARGS)

SECONDS ?= 60
fuzz: setup  ## look for bytes that the HTTP parts misread: make fuzz [SECONDS=60], for each of three targets
	for target in requests answers connections; do $(BIN)/python -m tests.fuzz $$target $(SECONDS) || exit 1; done

IMAGE ?= torchmoor
audit-image:  ## list known vulnerabilities of an image, with trivy or grype (network): make audit-image [IMAGE=torchmoor]: build/image-audit.json
	@mkdir -p build
	@if command -v trivy >/dev/null; then trivy image --format json --output build/image-audit.json $(IMAGE); \
	elif command -v grype >/dev/null; then grype $(IMAGE) --output json --file build/image-audit.json; \
	else echo "make: install trivy or grype, which scan images" >&2; exit 1; fi

bench: setup archives  ## run one benchmark: make bench NAME=proxy [QUICK=1]
	@test -n "$(NAME)" || { echo "make: name a benchmark: make bench NAME=..., one of: $(BENCHMARKS)" >&2; exit 1; }
	@test -n "$(filter $(NAME),$(BENCHMARKS))" || { echo "make: there is no benchmark $(NAME); there are: $(BENCHMARKS)" >&2; exit 1; }
	$(BIN)/python -m benchmarks.$(NAME) $(if $(QUICK),--quick)

report: setup $(if $(FROM),,archives)  ## run every benchmark, shortened, and write one page that compares them with the goals: make report [FROM=docs/benchmarks]
	@$(BIN)/python -m benchmarks.report_all $(if $(FROM),--from $(FROM))

clean:  ## remove everything that was built, the virtual environments too
	rm -rf $(VENV) .venv-clients .venv-debian .venv-vllm .venv-audit build dist *.egg-info
	rm -rf model_store/*.mar model_store/.*.partial models/smollm2 models/.smollm2-* models/minilm models/.minilm-* models/variants
	rm -rf .pytest_cache .mypy_cache .ruff_cache .grimp_cache .import_linter_cache .hypothesis .fuzz logs torchserve.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
