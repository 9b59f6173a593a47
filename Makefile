# make demo    train a small GPT with two processes      make test    run tests with few of their cases
# make test-all   run all tests with all cases           make costs   measure what tests cost (tests/tiers.py)
# make test-compiled   run the tests of torch.compile
# make test-programs   run whole programs: the examples, the benchmarks (their quick forms), a few faults
# make test-integrations   run programs of other packages, in .venv-integrations, with FSDP2 and with fsdp_compose
# make which-tests FILE=fsdp_compose/core/flat/layout.py   say which test files to run after a change of a file
# make test-titan   run torchtitan's trainer, in .venv-titan, with torch 2.15.0
# make test-torch VERSION=2.15.0   run tests with another torch, in .venv-torch-VERSION
# make lint    ruff and mypy                             make format  let ruff rewrite what lint would complain about
# make docs    the documentation as a site, in site/: its blocks of code run first, no link may be broken, and a browser,
#              where there is one, looks at every page
# make reference   write docs/reference from the docstrings
# make wheel   build the wheel, and try it in clean environments, plain and with each extra
# make faults  kill, stop, starve and damage real jobs   make clean   remove what the others made
#
# They work in .venv, which they make with the first Python >= 3.10 they find, or with PYTHON=...

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)
PROCESSES ?= 2
RESTARTS ?= 0
DEMO_ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 2
# Programs sleep, and wait for processes that begin or that are dead: one test more keeps the cores busy.
PROGRAM_PROCESSES ?= 3
FAULTS_ARGS ?=

# Images of containers often set this. Without bytecode each of the hundreds of processes of a test run compiles torch,
# for six seconds, and this package.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
LOOPBACK := $(if $(filter Darwin,$(shell uname -s)),lo0,lo)

.PHONY: demo test test-all costs test-compiled test-programs test-integrations test-titan test-torch which-tests docs reference wheel faults lint format clean
.NOTPARALLEL:

demo: .venv/installed-examples
	GLOO_SOCKET_IFNAME=$(LOOPBACK) OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
		$(BIN)/python -m torch.distributed.run --standalone --local-addr 127.0.0.1 \
		--nproc_per_node $(PROCESSES) --max-restarts $(RESTARTS) examples/train_gpt.py $(DEMO_ARGS)

test: TIER = small
test-all: TIER = all
test test-all: .venv/installed-test
	$(BIN)/python -m pytest --tier $(TIER) --numprocesses $(TEST_PROCESSES) --dist worksteal \
		--ignore tests/whole --ignore tests/compiled $(PYTEST_ARGS)

costs: .venv/installed-test
	$(BIN)/python -m pytest --tier all --write-costs tests/tools/costs.json --numprocesses 2 --dist worksteal $(PYTEST_ARGS) tests

test-compiled: .venv/installed-test
	$(BIN)/python -m pytest --tier all --numprocesses $(TEST_PROCESSES) $(PYTEST_ARGS) tests/compiled

test-programs: .venv/installed-test
	$(BIN)/python -m pytest --tier all --numprocesses $(PROGRAM_PROCESSES) --dist worksteal $(PYTEST_ARGS) tests/whole

test-integrations: .venv-integrations/installed
	.venv-integrations/bin/python -m pytest --numprocesses $(PROGRAM_PROCESSES) $(PYTEST_ARGS) --timeout 600 tests_integration

test-titan: .venv-titan/installed
	.venv-titan/bin/python -m pytest $(PYTEST_ARGS) --timeout 1800 tests_integration/test_torchtitan_trainer.py

# With another torch: the tests of `make test-all`, or those that TEST_ARGS names.
TORCH_ENV = .venv-torch-$(VERSION)

test-torch: $(TORCH_ENV)/installed
	$(TORCH_ENV)/bin/python -m pytest --tier all --numprocesses $(TEST_PROCESSES) --dist worksteal \
		$(or $(TEST_ARGS),--ignore tests/whole --ignore tests/compiled) $(PYTEST_ARGS)

which-tests: $(BIN)/python
	@test -n '$(FILE)' || { echo 'say of which file: make which-tests FILE=fsdp_compose/core/flat/layout.py'; exit 1; }
	@$(BIN)/python -m tests.tools.which_tests $(FILE)

docs: .venv/installed-docs .venv/installed-test
	$(BIN)/python -m pytest --quiet tests/whole/test_documentation.py
	$(BIN)/python -m mkdocs build --strict --clean
	$(BIN)/python docs/generator/look.py

reference: $(BIN)/python
	$(BIN)/python docs/generator/reference.py

wheel: .venv/installed-release
	$(BIN)/python tests/whole/wheel.py

faults: .venv/installed-test
	$(BIN)/python -m benchmarks.faults $(FAULTS_ARGS)

lint: .venv/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-integrations .venv-titan .venv-torch-* site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per extra of pyproject.toml: installed again only when what is to be installed changes.
.venv/installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

# Other environments take from .venv what they do not install themselves. Their packages are compiled when first imported.
PIP_INSTALL = $(BIN)/python -m pip --python $(@D)/bin/python install --disable-pip-version-check --no-compile

define take_the_rest_from
	$(BIN)/python -m venv --without-pip $(@D)
	for other in $(1); do "$$PWD/$$other/bin/python" -c 'import sysconfig; \
		print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'; done \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
endef

.venv-integrations/installed: .venv/installed-test tests_integration/requirements.txt
	$(call take_the_rest_from,.venv)
	$(PIP_INSTALL) --no-deps -r tests_integration/requirements.txt
	touch $@

# Of torch and spmd_types, the first that is found counts.
.venv-titan/installed: .venv-torch-2.15.0/installed .venv-integrations/installed tests_integration/requirements_titan.txt
	$(call take_the_rest_from,.venv-torch-2.15.0 .venv-integrations)
	$(PIP_INSTALL) --no-deps -r tests_integration/requirements_titan.txt
	touch $@

# A configuration of pip that caps torch is set aside for this environment alone.
.venv-torch-%/installed: .venv/installed-test tests_integration/requirements.txt
	$(call take_the_rest_from,.venv)
	PIP_CONFIG_FILE=/dev/null $(PIP_INSTALL) torch==$*
	$(if $(filter 2.12.%,$*),,$(PIP_INSTALL) --no-deps $$(grep ^spmd_types tests_integration/requirements.txt))
	touch $@

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'no Python >= 3.10 with venv found: install one, or say PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv .venv
