# aotops: one plain shared library of kernels, and its frontends.
#
# make demo      everything from nothing: environments, a library for this machine, a model trained in every framework
# make test      everything from nothing, then the tests: CAPABILITY=default ISA=baseline THREADS=1 for another processor
# make test-numpy   for a first contribution: what needs no framework and no CUDA, in a few minutes
# make lib       aotops/libaotops.so, with CUDA entries for this machine's GPU; NVCC= without them
# make fuzz      torch's operators and ours on 10,000 drawn calls each
# make soak      every operator and its backward 10,000 times under load, compared to the bit: SOAK='--seconds 60'
# make lint      ruff, mypy, clang-format        make format   lets ruff and clang-format rewrite
# make asan      the CPU entries under ASan and UBSan, for each instruction set that the processor has and for all that it
#                has, with either kind of threads: a million calls at random each (ASAN_CALLS), then the tests, with
#                hosted operators
# make tsan      the library's own threads under ThreadSanitizer
# make aarch64   a wheel for aarch64, compiled here, and under qemu a C program's calls and the table's core in Python
# make bench     every operator against those of others, on the GPU where there is one: BENCH='gelu --quick'
# make calls     the cost of a call              make docs     the site, in build/site
# make wheel     dist/*.whl, which pip installs anywhere; make wheel-test installs it in several Pythons; TARGET=aarch64
#                for that machine instead of this one
# make compatibility   that wheel beside each version of each framework, in docs/compatibility.md
# make sdist     dist/*.tar.gz                   make clean

PYTHON ?= python3
JOBS   ?= $(shell nproc)
# The machine that the library is for: this one, or aarch64, which Debian's g++-aarch64-linux-gnu compiles for and its
# qemu-user runs.
MACHINE := $(shell uname -m)
TARGET  := $(MACHINE)
CROSS   := $(if $(filter-out $(MACHINE),$(TARGET)),$(TARGET)-linux-gnu-)
RUN     :=
ifneq ($(CROSS),)
$(if $(filter aarch64,$(TARGET)),,$(error TARGET is '$(TARGET)', expected $(MACHINE) or aarch64))
CC  := $(CROSS)gcc
CXX := $(CROSS)g++
AR  := $(CROSS)ar
RUN := qemu-$(TARGET) -L /usr/$(CROSS:%-=%)
endif
# The compute capabilities of this machine's GPUs that CUDA 12.9 and 13 compile for: 90 is 9.0.
CAPABILITIES := $(filter-out 5% 60 61 62 70 72,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
                  grep -x '[0-9]*[.][0-9]' | tr -d . | sort -un))
# GPU architectures to compile for; any of 75 80 86 89 90 100 103 120 121.
ARCHS  ?= $(or $(CAPABILITIES),90)
# The one whose PTX is added, which a driver compiles for a GPU without machine code here. That of 100 serves 110 too.
PTX    ?= $(or $(filter 100,$(ARCHS)),$(lastword $(ARCHS)))
# What CUDA 12.9 compiles loads with drivers from 525, and what 13 compiles with those from 580. PyPI's packages of it are
# for x86-64; elsewhere an installed nvcc is used.
CUDA_12      := build/cuda-12.9
DEFAULT_NVCC := $(if $(filter Linux-x86_64,$(shell uname -s)-$(MACHINE)),$(CUDA_12)/bin/nvcc,\
                  $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
NVCC         ?= $(DEFAULT_NVCC)
OWN_NVCC     := $(if $(filter $(CUDA_12)/bin/nvcc,$(NVCC)),$(CUDA_12)/ready $(if $(CROSS),$(CUDA_12)/lib/$(TARGET)/ready))
ifneq ($(CROSS),)
$(if $(NVCC:$(CUDA_12)/bin/nvcc=),$(error NVCC is '$(NVCC)', expected none or $(CUDA_12)/bin/nvcc: it links for $(TARGET)))
endif
# MindSpore 2.10 has no build for Python 3.13.
MINDSPORE_PYTHON ?= $(shell for p in $(PYTHON) python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
GPU := $(shell nvidia-smi -L 2>/dev/null)

# ------------------------------------------------------------------------------------------------------------ library

BUILD := build$(if $(CROSS),/$(TARGET))
ASAN  := build/asan
# Another machine's would not load here, so they are not in the package of this tree.
PRODUCTS := $(if $(CROSS),$(BUILD)/)
LIB      := $(PRODUCTS)aotops/libaotops.so
# A library of operators outside this repository is linked with it (aotops.compile, aotops build, CMake).
RUNTIME := $(PRODUCTS)aotops/lib/libaot.a
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' aotops/__init__.py)

# Compiled once; for each instruction set; by nvcc.
HOST := $(wildcard $(addprefix cuda_src/,*.cpp cpu/*.cpp host/*.cpp))
CPU  := $(wildcard $(addprefix cuda_src/operators/,*.cpp */*.cpp))
CUDA := $(if $(NVCC),$(wildcard $(addprefix cuda_src/,gemm/*.cu conv/*.cu operators/*.cu operators/*/*.cu)))
# Files named _sm80 and _sm90 include CUTLASS's headers. The latter are Hopper's alone (wgmma, TMA): they are for sm_90a,
# and there only if 90 is asked for.
SM90 := $(filter %_sm90.cu,$(CUDA))
CUDA := $(filter-out $(SM90),$(CUDA)) $(if $(filter 90,$(ARCHS)),$(SM90))
CUTLASS := build/cutlass

# The CPU sources are compiled for several instruction sets; the entry picks one at run time (cuda_src/cpu/entry.h).
ISAS := baseline $(if $(filter x86_64,$(TARGET)),avx2 avx512)
# Processors without AVX2 are few: the smaller code of -O2 makes a wheel 1 MB smaller.
MARCH_baseline := $(if $(filter x86_64,$(TARGET)),-O2)
MARCH_avx2   := -march=x86-64-v3
# GCC 12 warns of its own intrinsics (GCC bug 105593).
MARCH_avx512 := -march=x86-64-v4 -mprefer-vector-width=512 -Wno-maybe-uninitialized

# Exports of the operators for tvm-ffi, made of the sources' entries.
TVM_FFI := $(BUILD)/tvm_ffi_functions.cpp

OBJECTS := $(TVM_FFI).o $(HOST:cuda_src/%=$(BUILD)/%.o) $(CUDA:cuda_src/%=$(BUILD)/%.o) \
           $(foreach isa,$(ISAS),$(CPU:cuda_src/%.cpp=$(BUILD)/%.$(isa).o))

WARNINGS  := -Wall -Wextra
CXXFLAGS  := -std=c++17 -O3 -Icuda_src -fPIC -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math $(WARNINGS) \
             -MMD -MP -DAOT_VERSION='"$(VERSION)"'
# nvcc 13 compresses PTX unless told otherwise, in a way that drivers know from 550 on. A wheel is compressed as a whole.
FATBIN    ?= $(if $(OWN_NVCC),--compress-mode=none)
GENCODE   := $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) $(foreach a,$(PTX),-gencode arch=compute_$(a),code=compute_$(a))
CCBIN     := $(if $(CROSS),-ccbin $(CROSS)g++)
NVCCFLAGS := $(CCBIN) -std=c++17 -O3 -Icuda_src -DAOT_ISA=cuda -MMD -MP -Werror cross-execution-space-call \
             -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(FATBIN) $(if $(filter 90,$(ARCHS)),-DAOT_HAVE_SM90) \
             $(if $(filter 90 120,$(PTX)),,-DAOT_NO_OTHER_GPUS)
comma     := ,
pinned     = $(shell sed -n 's/.*"\($(1)==[^"]*\)".*/\1/p' pyproject.toml)
LDFLAGS   := -z,defs,-z,now,-z,nodelete,--version-script=cuda_src/host/exports.map
lib:
	@$(MAKE) --no-print-directory -j$(JOBS) $(LIB) $(RUNTIME) $(TYPES)

# A change of the version, or of what the library is built for, rebuilds.
build/flags: FORCE | build
	@echo '$(VERSION)' | cmp -s - $@ || echo '$(VERSION)' >$@
$(BUILD)/targets: FORCE | $(BUILD)
	@echo 'NVCC=$(NVCC) ARCHS="$(ARCHS)" PTX="$(PTX)" ISAS="$(ISAS)"' | cmp -s - $@ || \
	  echo 'NVCC=$(NVCC) ARCHS="$(ARCHS)" PTX="$(PTX)" ISAS="$(ISAS)"' >$@
FORCE:

$(sort build $(BUILD)):
	@mkdir -p $@

# With GLIBC_FLOOR=2.28, the symbols of glibc are those of that version.
GLIBC_FLOOR ?=
$(BUILD)/link: FORCE | $(BUILD)
	@echo 'GLIBC_FLOOR=$(GLIBC_FLOOR)' | cmp -s - $@ || echo 'GLIBC_FLOOR=$(GLIBC_FLOOR)' >$@
STUBS = $(if $(GLIBC_FLOOR),$(shell $(PYTHON) packaging/glibc_floor.py $(GLIBC_FLOOR) $(BUILD)/glibc_floor $(CROSS)))

# audit: asks the library for the version of its CUDA runtime, under qemu if that is needed; then, compute capabilities.
AUDIT_NEEDS := $(if $(OWN_NVCC),$(if $(CROSS),$(BUILD)/cuda_runtime))
audit = $(PYTHON) -m aotops.fatbin $(if $(CROSS),--runtime "`$(RUN) $(BUILD)/cuda_runtime $(1)`") $(1) $(2)

$(LIB): $(OBJECTS) cuda_src/host/exports.map $(BUILD)/targets $(BUILD)/link | $(AUDIT_NEEDS)
	@echo "link $@"
	@mkdir -p $(@D)
ifneq ($(NVCC),)
	@$(NVCC) $(CCBIN) -shared $(if $(OWN_NVCC),-nodlink) -cudart static $(if $(CROSS),-L$(CUDA_12)/lib/$(TARGET)) \
	  -Xlinker $(LDFLAGS),--as-needed $(OBJECTS) -o $@ $(STUBS) -ldl -lpthread
	@$(if $(OWN_NVCC),$(call audit,$@) || { mv $@ $(BUILD)/refused.so; exit 1; })
else
	@$(CXX) -shared -pthread -Wl,$(LDFLAGS),--as-needed $(OBJECTS) -o $@ $(STUBS) -ldl
endif

$(BUILD)/cuda_runtime: packaging/cuda_runtime.c | $(BUILD)
	@$(CC) -Wall -Wextra -Werror $< -o $@ -ldl

$(RUNTIME): $(addprefix $(BUILD)/runtime/,error.cpp.o extra.cpp.o cpu/fork.cpp.o cpu/threads.cpp.o \
  host/text_extra_old.cpp.o host/tvm_ffi.cpp.o)
	@echo "ar   $@"
	@mkdir -p $(@D) && rm -f $@
	@$(AR) rcs $@ $^

# The type stubs of all frontends, by which editors and type checkers know the operators' functions.
TYPES := frontends/numpy.pyi
$(TYPES): $(wildcard aotops/*.py aotops/ops/*.py frontends/*.py frontends/*/*.py)
	@echo "stubs of the frontends"
	@$(PYTHON) -m frontends.stubs && touch $@

# The schemas of the operators for LibTorch's dispatcher, made of their definitions.
TORCH_TABLE := build/torch_table.inc
$(TORCH_TABLE): packaging/torch_table.py frontends/torch_schema.py aotops/op.py $(wildcard aotops/ops/*.py) | build
	@$(PYTHON) $< >$@.new && mv $@.new $@

$(TVM_FFI): aotops/tvm_ffi.py $(CPU) $(CUDA) | $(BUILD)
	@$(PYTHON) $^ >$@.new && mv $@.new $@

# rule: compiles sources to objects with a suffix in a folder, with flags of its own.
define rule
$(1)/%.$(2): cuda_src/%.cpp build/flags
	@mkdir -p $$(@D)
	@echo "g++  $$@"
	@$$(CXX) $$(CXXFLAGS) $(3) -c $$< -o $$@

endef
# variant: the rules of a folder, with flags of its own: objects that are compiled once, and for each instruction set.
define variant
$(1)/tvm_ffi_functions.cpp.o: $(TVM_FFI) cuda_src/tvm_ffi.h build/flags
	@mkdir -p $$(@D)
	@echo "g++  $$@"
	@$$(CXX) $$(CXXFLAGS) $(2) -c $$< -o $$@
$(call rule,$(1),cpp.o,$(2))
$(foreach isa,$(ISAS),$(call rule,$(1),$(isa).o,$(2) $(MARCH_$(isa)) -DAOT_ISA=$(isa)))
$(1)/extra.cpp.o: CXXFLAGS += -D_GLIBCXX_USE_CXX11_ABI=0
$(1)/host/torch_stable.cpp.o: $(TORCH_TABLE)
$(1)/host/torch_stable.cpp.o: CXXFLAGS += -Ibuild
endef
$(eval $(call variant,$(BUILD)))
# Without a version, since it is another library's.
$(eval $(call variant,$(BUILD)/runtime,-UAOT_VERSION))
$(eval $(call variant,$(ASAN),$$(ASAN_FLAGS)))

$(BUILD)/tvm_ffi_functions.cpp.o: $(BUILD)/targets
ifneq ($(NVCC),)
$(BUILD)/tvm_ffi_functions.cpp.o: CXXFLAGS += -DAOT_TVM_FFI_CUDA
endif

# It leaves its file as it is where the toolchain is there.
$(CUDA_12)/ready: aotops/cuda12.py aotops/cuda12.txt | build
	@$(PYTHON) -m aotops.cuda12 $(CUDA_12) >build/cuda-12.9.log
$(CUDA_12)/lib/aarch64/ready: $(CUDA_12)/ready aotops/cuda12_aarch64.txt
	@$(PYTHON) -m aotops.cuda12 $(CUDA_12) aarch64 >>build/cuda-12.9.log

# nvcc knows where CUDA's headers are.
$(BUILD)/host/device.cpp.o: $(BUILD)/targets $(OWN_NVCC)
ifneq ($(NVCC),)
$(BUILD)/host/device.cpp.o: cuda_src/host/device.cpp
	@mkdir -p $(@D)
	@echo "nvcc $<"
	@$(NVCC) $(CCBIN) -std=c++17 -O3 -Icuda_src -MMD -MP -Xcompiler -fPIC,-fvisibility=hidden,-Wall -DAOT_HAVE_CUDA -c $< -o $@
endif

# The toolchain has each kernel's code of both kinds from this text, in this order.
ARRANGE_PTX := $(if $(OWN_NVCC),packaging/arrange_ptx.py)
$(BUILD)/%.cu.o: export PTX_FILTER = $(addprefix $(PYTHON) ,$(ARRANGE_PTX))
$(BUILD)/%.cu.o: cuda_src/%.cu $(BUILD)/targets $(OWN_NVCC) $(ARRANGE_PTX)
	@mkdir -p $(@D)
	@echo "nvcc $<  (sm $(ARCHS))"
	@$(NVCC) $(NVCCFLAGS) $(GENCODE) -c $< -o $@

# NDEBUG: a call of assert() in a kernel makes the compiler wait for each wgmma.
WITH_CUTLASS := $(patsubst cuda_src/%,$(BUILD)/%.o,$(filter %_sm80.cu %_sm90.cu,$(CUDA)))
$(WITH_CUTLASS): NVCCFLAGS += -DNDEBUG --expt-relaxed-constexpr -isystem $(CUTLASS)/include
$(WITH_CUTLASS): | $(CUTLASS)/include
$(SM90:cuda_src/%=$(BUILD)/%.o): GENCODE := -gencode arch=compute_90a,code=sm_90a

# The wheel has no library, only headers.
$(CUTLASS)/include: pyproject.toml
	@echo "fetch $(call pinned,nvidia-cutlass)"
	@mkdir -p $(CUTLASS)
	@env -u PYTHONPATH $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --dest $(CUTLASS) $(call pinned,nvidia-cutlass)
	@$(PYTHON) -m zipfile -e $(CUTLASS)/nvidia_cutlass-*.whl $(CUTLASS)/wheel
	@rm -rf $@ && mv $(CUTLASS)/wheel/cutlass_library/source/include $@
	@rm -rf $(CUTLASS)/wheel $(CUTLASS)/*.whl && touch $@

-include $(wildcard $(foreach kind,cpp cu $(ISAS),$(addsuffix *.$(kind).d,$(addprefix $(BUILD),/ /*/ /*/*/ /*/*/*/))))

# ------------------------------------------------------------------------------------------------------- environments

VENV    := .venv
MS_VENV := .venv-mindspore
# Python compiles what is imported, which is a part of what pip would.
PIP     := -m pip install --quiet --disable-pip-version-check --no-compile

# Where the package index has a CPU build of torch (PIP_EXTRA_INDEX_URL can add one), pip prefers it.
$(VENV)/ready: pyproject.toml
	@echo "environment $(VENV): torch, jax$(if $(GPU),$(comma) cupy)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP) --upgrade 'pip>=25.1'
	@$(VENV)/bin/python $(PIP) --group main $(if $(GPU),--group gpu)
	@PYTHONWARNINGS=ignore $(VENV)/bin/python $(PIP) --no-deps --editable .
	@touch $@

$(MS_VENV)/ready: pyproject.toml
	@echo "environment $(MS_VENV): mindspore"
	@$(MINDSPORE_PYTHON) -m venv $(MS_VENV)
	@$(MS_VENV)/bin/python $(PIP) --upgrade 'pip>=25.1'
	@$(MS_VENV)/bin/python $(PIP) --group mindspore
	@PYTHONWARNINGS=ignore $(MS_VENV)/bin/python $(PIP) --no-deps --editable .
	@touch $@

$(VENV)/lint: $(VENV)/ready
	@$(VENV)/bin/python $(PIP) --group lint
	@touch $@

environments: $(VENV)/ready $(if $(MINDSPORE_PYTHON),$(MS_VENV)/ready,no-mindspore)
no-mindspore:
	@echo "no Python 3.10 to 3.12 here: MindSpore is left out"

# -------------------------------------------------------------------------------------------------------- sanitizers

ASAN_CALLS   ?= 1000000
ASAN_SEED    ?= 1
# vptr would refuse a host's object, which is of no class of ours (cuda_src/extra.cpp).
ASAN_FLAGS   := -O1 -g1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all \
                -fno-omit-frame-pointer
# A higher level than the processor's would run as the best that it has. Those named are without what a processor has
# beside a level, as tile registers.
ASAN_ISAS    ?= $(filter baseline $(if $(shell grep -w avx2 /proc/cpuinfo),avx2) \
                $(if $(shell grep -w avx512f /proc/cpuinfo),avx512),$(ISAS))
ASAN_OBJECTS := $(ASAN)/tvm_ffi_functions.cpp.o $(HOST:cuda_src/%=$(ASAN)/%.o) $(foreach isa,$(ASAN_ISAS),$(CPU:cuda_src/%.cpp=$(ASAN)/%.$(isa).o))
ASAN_PRELOAD  = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)
ASAN_TESTS   := $(addprefix tests/,$(addprefix core/test_,convention.py call.py frontends.py hosting.py) arrays/test_numpy.py)

# The tests' process is Python's, which leaks as it ends, and loads the sanitizer only this way. What the sanitizer says
# goes to the descriptor of stderr, which pytest would keep. What was freed stays in quarantine, and looks like a leak.
# The libraries of hosted operators that the tests build have the sanitizers too. AOTOPS_THREADS= is an OpenMP runtime.
asan: $(VENV)/ready
	@$(MAKE) --no-print-directory -j$(JOBS) $(ASAN)/libaotops.so $(ASAN)/fuzz_convention
	set -e; for isa in $(ASAN_ISAS) ''; do for threads in '' own; do \
	  export OMP_NUM_THREADS=2 AOTOPS_CPU_ISA=$$isa AOTOPS_THREADS=$$threads; \
	  test -n "$$isa" || unset AOTOPS_CPU_ISA; echo "$${isa:-all that it has}, threads: $${threads:-OpenMP}"; \
	  $(ASAN)/fuzz_convention $(ASAN)/libaotops.so $(ASAN_CALLS) $(ASAN_SEED); \
	  LD_PRELOAD="$(ASAN_PRELOAD)" ASAN_OPTIONS=detect_leaks=0 AOTOPS_LIBRARY=$(abspath $(ASAN)/libaotops.so) \
	    AOTOPS_TEST_FRONTENDS=numpy AOTOPS_TEST_CXXFLAGS="$(ASAN_FLAGS)" \
	    $(VENV)/bin/python -m pytest -q --capture=sys -m 'not gpu' -k 'not leak and not pile_up' $(ASAN_TESTS); done; done

$(ASAN)/libaotops.so: $(ASAN_OBJECTS) cuda_src/host/exports.map
	@echo "link $@"
	@$(CXX) -shared -pthread $(ASAN_FLAGS) -Wl,$(LDFLAGS) $(ASAN_OBJECTS) -o $@ -ldl

$(ASAN)/fuzz_convention: tests/programs/fuzz_convention.cpp
	@mkdir -p $(@D)
	@echo "g++  $<"
	@$(CXX) -std=c++17 $(ASAN_FLAGS) $(WARNINGS) $< -o $@ -ldl

# It refuses the threads of a forked child unless told otherwise.
tsan:
	@mkdir -p build
	$(CXX) -std=c++17 -O1 -g1 -fsanitize=thread $(WARNINGS) -Icuda_src tests/programs/thread_pool.cpp cuda_src/cpu/threads.cpp \
	  cuda_src/cpu/fork.cpp -o build/thread_pool -ldl -pthread
	TSAN_OPTIONS=die_after_fork=0 build/thread_pool

# ------------------------------------------------------------------------------------------------------------ aarch64

# The wheel is of what it was built for before, or without CUDA entries. Debian: g++-aarch64-linux-gnu qemu-user
aarch64:
	+@$(call as_before,wheel TARGET=aarch64,build/aarch64,NVCC=)
	@$(MAKE) --no-print-directory emulated TARGET=aarch64

# With the threads of GCC's OpenMP, and with the library's own. apt fetches Debian's Python.
emulated: $(BUILD)/entries
	OMP_NUM_THREADS=4 $(RUN) $(BUILD)/entries $(LIB)
	OMP_NUM_THREADS=4 AOTOPS_THREADS=own $(RUN) $(BUILD)/entries $(LIB)
	$(PYTHON) packaging/try_emulated.py $(WHEEL) $(BUILD)/python

$(BUILD)/entries: tests/programs/aarch64_entries.c | $(BUILD)
	@$(CC) -std=c11 -D_GNU_SOURCE -O1 -Wall -Wextra -Werror $< -o $@ -ldl -lm

# --------------------------------------------------------------------------------------------------------------- uses

# A library that is quick to build and runs here: CPU entries for any processor, and CUDA entries for this machine's GPU;
# or the one that was built here before.
RUNNABLE     := ISAS=baseline $(if $(CAPABILITIES),ARCHS="$(CAPABILITIES)",NVCC=)
GIVEN        := $(filter command environment,$(foreach v,NVCC ARCHS ISAS,$(origin $(v))))
# as_before: makes a goal for what was built in a folder before, or else by variables, unless some are given here.
as_before     = $(if $(GIVEN),$(MAKE) --no-print-directory $(1),\
                eval $(MAKE) --no-print-directory $(1) "$$(cat $(2)/targets 2>/dev/null || echo '$(3)')")
runnable:
	+@$(call as_before,$(LIB),build,$(RUNNABLE))

demo:
	@$(MAKE) --no-print-directory -j$(JOBS) environments runnable
	@$(VENV)/bin/python examples/squares.py
	@$(VENV)/bin/python examples/digits.py $(if $(MINDSPORE_PYTHON),--mindspore-python $(MS_VENV)/bin/python)

# The tests run in several processes with two threads each. Waiting threads sleep, because spinning would slow the other
# processes. Those of NumPy's OpenBLAS spin whatever they are told: it has one. At most four processes, because each has a
# context on the GPU; JAX must not preallocate its memory.
TEST_JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n : 4)))
PYTEST := -m pytest -q -n $(TEST_JOBS) --dist worksteal tests
# CAPABILITY limits the instructions of torch (default, avx2, avx512), ISA those of aotops (baseline, avx2, avx512).
THREADS ?= 2
WAITING := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
# glibc keeps freed arrays of up to 256 MiB. Given back, the kernel would clear their pages for each array anew: a sixth of
# the time of tests beside NumPy's references.
KEEPING := MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=268435456
PYTEST_ENVIRONMENT := OMP_NUM_THREADS=$(THREADS) $(addprefix ATEN_CPU_CAPABILITY=,$(CAPABILITY)) \
                      $(addprefix AOTOPS_CPU_ISA=,$(ISA)) $(WAITING) $(KEEPING)

# Both environments are tested, whatever the first one says, and then those that failed are named. Without a GPU a third
# of the first one's tests would be skipped one by one.
TESTS := AOTOPS_TEST_FRONTENDS=numpy,torch,jax$(if $(GPU),$(comma)cupy) $(PYTEST_ENVIRONMENT) $(VENV)/bin/python $(PYTEST) \
         $(if $(GPU),,-m 'not gpu')
# These try nothing on MindSpore that others do not, so the second environment does not repeat them: the checker runs on
# it in test_selections.py.
TESTED_ONCE := $(addprefix --ignore=tests/,$(addprefix core/test_,call.py convention.py core.py cpp.py formulas.py info.py \
               loading.py products_cpu.py sharding.py sources.py tvm_ffi.py xla_layout.py) $(addprefix authors/test_,\
               adding_an_op.py arrange_ptx.py attention_rates.py bench.py check.py cli.py compatibility.py compile.py \
               cpu_record.py cuda12.py examples.py models.py new.py other_gpus.py packaging.py performance_page.py soak.py \
               step_records.py triton.py whole_record.py))
MS_TESTS := AOTOPS_TEST_FRONTENDS=numpy,mindspore $(PYTEST_ENVIRONMENT) $(MS_VENV)/bin/python $(PYTEST) $(TESTED_ONCE)

# Tests that depend on the processor, as on one without AVX, with threads that divide nothing evenly. The kernels are
# those of every framework.
LOWEST := AOTOPS_TEST_FRONTENDS=numpy OMP_NUM_THREADS=3 ATEN_CPU_CAPABILITY=default AOTOPS_CPU_ISA=baseline $(WAITING) \
          $(KEEPING)
ON_LOWEST := $(addprefix tests/core/test_,accuracy.py cross_entropy.py formulas.py frontends.py norm_dtypes.py)
LOWEST_TESTS := $(LOWEST) $(VENV)/bin/python $(patsubst tests,$(ON_LOWEST),$(PYTEST)) -m 'not gpu'

test:
	@$(MAKE) --no-print-directory -j$(JOBS) environments lint $(LIB) $(RUNTIME) $(TYPES)
	@failed=; \
	echo "$(TESTS)"; $(TESTS) || failed="$$failed $(VENV)"; \
	$(if $(MINDSPORE_PYTHON),echo "$(MS_TESTS)"; $(MS_TESTS) || failed="$$failed $(MS_VENV)";) \
	echo "$(LOWEST_TESTS)"; $(LOWEST_TESTS) || failed="$$failed $(VENV)-as-without-AVX"; \
	test -z "$$failed" || { echo "tests failed in:$$failed"; exit 1; }

# For a first contribution: an environment of its own without a framework, and a library for any processor, without CUDA
# unless one is built here.
NUMPY_VENV  := .venv-numpy
NUMPY_TESTS := $(addprefix tests/,arrays $(addprefix core/test_,core.py errors.py formulas.py frontends.py \
               hosting.py library.py norm_dtypes.py sharding.py sources.py))
$(NUMPY_VENV)/ready: pyproject.toml
	@echo "environment $(NUMPY_VENV): numpy"
	@$(PYTHON) -m venv $(NUMPY_VENV)
	@$(NUMPY_VENV)/bin/python $(PIP) --upgrade 'pip>=25.1'
	@$(NUMPY_VENV)/bin/python $(PIP) --group backend --group tests $(call pinned,ruff)
	@PYTHONWARNINGS=ignore $(NUMPY_VENV)/bin/python $(PIP) --no-deps --editable .
	@touch $@

test-numpy: $(NUMPY_VENV)/ready
	@$(MAKE) --no-print-directory -j$(JOBS) runnable $(RUNTIME)
	AOTOPS_TEST_FRONTENDS=numpy $(PYTEST_ENVIRONMENT) $(NUMPY_VENV)/bin/python $(patsubst tests,$(NUMPY_TESTS),$(PYTEST)) \
	  -m 'not gpu' -k 'not pile_up and not leak'
	@$(NUMPY_VENV)/bin/ruff check . && $(NUMPY_VENV)/bin/ruff format --check .

fuzz: lib $(VENV)/ready
	AOTOPS_TEST_PROFILE=fuzz AOTOPS_TEST_FRONTENDS=torch $(VENV)/bin/python $(patsubst tests,tests/torch/test_differential.py,$(PYTEST))

# Once more on the CPU, with the library's own threads.
soak: lib $(VENV)/ready
	$(VENV)/bin/python -m aotops check --soak aotops $(SOAK)
	AOTOPS_THREADS=own $(VENV)/bin/python -m aotops check --soak aotops $(SOAK) --devices cpu

lint: $(VENV)/lint
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/clang-format --dry-run --Werror $(shell find cuda_src -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

format: $(VENV)/lint
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(shell find cuda_src -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

$(VENV)/docs: $(VENV)/ready
	@$(VENV)/bin/python $(PIP) --group docs
	@touch $@

docs: $(VENV)/docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

bench: lib $(VENV)/ready
	@$(VENV)/bin/python -m aotops bench $(BENCH)

calls: lib $(VENV)/ready
	@$(VENV)/bin/python -m benchmarks.call_overhead

# ---------------------------------------------------------------------------------------------------------- packaging

# A GPU runs code for its own major version and a minor one up to its own: 80 is for 86, 87 and 89 too, 100 for 103, 120
# for 121. PTX of 100 is for 110 and for what comes later. Arm's hosts are Grace's, whose GPUs are 90, 100 and 103.
EVERY_ARCH  := $(if $(filter aarch64,$(TARGET)),90 100,75 80 90 100 120)
EVERY_GPU   := $(if $(filter aarch64,$(TARGET)),90 100 103 110 120 121 130,all)
WHEEL_ARCHS ?= $(if $(filter command environment,$(origin ARCHS)),$(ARCHS),$(EVERY_ARCH))
WHEEL_GPUS   = $(if $(filter-out $(WHEEL_ARCHS),$(EVERY_ARCH)),$(WHEEL_ARCHS),$(EVERY_GPU))
WHEEL       := dist/aotops-$(VERSION)-py3-none-manylinux_2_28_$(TARGET).whl
PACKAGING   := build/packaging
$(PACKAGING)/ready: pyproject.toml
	@$(PYTHON) -m venv $(PACKAGING)
	@$(PACKAGING)/bin/python $(PIP) --upgrade 'pip>=25.1'
	@$(PACKAGING)/bin/python $(PIP) --group packaging
	@touch $@

# Without nvcc it would contain no CUDA entries, so that has to be asked for: make wheel NVCC=
# auditwheel offers the platforms of the machine that Python names, and calls strip, which is for one machine.
AUDITWHEEL := python -c 'import platform, sys; platform.machine = lambda: "$(TARGET)"; import auditwheel.main as a; sys.exit(a.main())'
wheel: $(PACKAGING)/ready
	@test -n '$(NVCC)$(filter command environment,$(origin NVCC))' || \
	  { echo "no nvcc here: NVCC=/path/nvcc, or NVCC= for a wheel without CUDA entries"; exit 1; }
	@$(MAKE) --no-print-directory lib ARCHS="$(WHEEL_ARCHS)" GLIBC_FLOOR=2.28
	@rm -rf $(BUILD)/wheel && PATH="$(if $(CROSS),/usr/$(CROSS:%-=%)/bin:)$(abspath $(PACKAGING))/bin:$$PATH" && \
	  AOTOPS_PRODUCTS="$(abspath ./$(PRODUCTS))" python -m build --wheel --no-isolation \
	    --config-setting=--build-option=--plat-name=linux_$(TARGET) --outdir $(BUILD)/wheel . >$(BUILD)/wheel.log 2>&1 && \
	  $(AUDITWHEEL) repair --plat $(WHEEL:dist/aotops-$(VERSION)-py3-none-%.whl=%) --only-plat --strip --wheel-dir dist \
	    $(BUILD)/wheel/*.whl >>$(BUILD)/wheel.log 2>&1 && \
	  python packaging/compress_wheel.py $(WHEEL) || { tail $(BUILD)/wheel.log; exit 1; }
	@$(if $(OWN_NVCC),rm -rf $(BUILD)/audited && $(PYTHON) -m zipfile -e $(WHEEL) $(BUILD)/audited && \
	  $(call audit,$(BUILD)/audited/aotops/libaotops.so,$(WHEEL_GPUS)) || { mv $(WHEEL) $(BUILD)/refused.whl; exit 1; })
	@ls -l $(WHEEL)

# The wheel in a clean environment of each of PYTHONS with NumPy alone, and of WITH_TORCH with torch too.
# pyenv has a command for each version of Python, which fails unless that version is chosen.
PYTHONS    ?= $(shell for v in 10 11 12 13 14; do python3.$$v -c '' 2>/dev/null && command -v python3.$$v || \
  ls -d $(HOME)/.pyenv/versions/3.$$v.*/bin/python 2>/dev/null | tail -1; done)
WITH_TORCH ?= $(PYTHON)
wheel-test:
	$(PYTHON) packaging/try_wheel.py $(WHEEL) $(PYTHONS) $(addprefix --torch ,$(WITH_TORCH))

# The wheel beside each version of each framework, and docs/compatibility.md of what came of it. ONLY="torch 2.4 3.11"
# selects. Free-threaded interpreters are named by PYTHONS=/path/python3.14t.
compatibility:
	$(PYTHON) packaging/compatibility.py run $(WHEEL) $(PYTHONS) $(if $(ONLY),--only $(ONLY))

sdist: $(PACKAGING)/ready
	@$(PACKAGING)/bin/python -m build --sdist --no-isolation --outdir dist . >build/sdist.log 2>&1 || { tail build/sdist.log; exit 1; }
	@ls -l dist/aotops-$(VERSION).tar.gz

clean:
	rm -rf build dist $(LIB) $(RUNTIME)

.PHONY: lib asan tsan aarch64 emulated environments no-mindspore demo test test-numpy fuzz soak lint format docs bench calls wheel wheel-test compatibility sdist clean FORCE
