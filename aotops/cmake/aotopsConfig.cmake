# find_package(aotops), with -Daotops_DIR=$(python -m aotops cmake-dir):
#
#   aotops_add_library(scale scale.cpp)      # libscale.so, with the entries of sources that include aot.h
#
# or, for a target of one's own, target_link_libraries(mine PRIVATE aotops::aot), and aotops_export_to_tvm_ffi(mine) for
# the functions by which tvm-ffi calls the entries.
cmake_minimum_required(VERSION 3.18)

get_filename_component(_aotops "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(aotops_INCLUDE_DIR "${_aotops}/include")
if(NOT EXISTS "${aotops_INCLUDE_DIR}")  # a checkout
  get_filename_component(aotops_INCLUDE_DIR "${_aotops}/../cuda_src" ABSOLUTE)
endif()
if(NOT EXISTS "${_aotops}/lib/libaot.a")
  set(aotops_FOUND FALSE)
  set(aotops_NOT_FOUND_MESSAGE "${_aotops}/lib/libaot.a does not exist: build it with `make lib`")
  return()
endif()

include(CMakeFindDependencyMacro)
find_dependency(OpenMP COMPONENTS CXX)

if(NOT TARGET aotops::aot)
  add_library(aotops::aot STATIC IMPORTED)
  set_target_properties(aotops::aot PROPERTIES IMPORTED_LOCATION "${_aotops}/lib/libaot.a"
    INTERFACE_INCLUDE_DIRECTORIES "${aotops_INCLUDE_DIR}")
  target_compile_features(aotops::aot INTERFACE cxx_std_17)
  target_compile_definitions(aotops::aot INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:AOT_ISA=cuda>)
  target_compile_options(aotops::aot INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno;-fno-trapping-math>)
  target_link_libraries(aotops::aot INTERFACE OpenMP::OpenMP_CXX)
  # An unresolved symbol fails here, and not in a process that uses the library. C++ symbols are not exported.
  target_link_options(aotops::aot INTERFACE
    "LINKER:-z,defs,-z,now,-z,nodelete,--as-needed,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map")
endif()

set(_aotops_tvm_ffi "${CMAKE_CURRENT_LIST_DIR}/tvm_ffi.cmake")

# Adds a source with __tvm_ffi_<op> for each operator whose entry is in the target's sources.
function(aotops_export_to_tvm_ffi target)
  get_target_property(listed ${target} SOURCES)
  set(sources "")
  foreach(source IN LISTS listed)
    get_filename_component(source "${source}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
    if(EXISTS "${source}")
      list(APPEND sources "${source}")
    endif()
  endforeach()
  set(written "${CMAKE_CURRENT_BINARY_DIR}/${target}_tvm_ffi.cpp")
  string(REPLACE ";" "\\;" argument "${sources}")
  add_custom_command(OUTPUT "${written}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${written}" "-DSOURCES=${argument}" -P "${_aotops_tvm_ffi}"
    DEPENDS ${sources} "${_aotops_tvm_ffi}" VERBATIM)
  if(listed MATCHES "\\.cu(;|$)")
    set_source_files_properties("${written}" PROPERTIES COMPILE_DEFINITIONS AOT_TVM_FFI_CUDA)
  endif()
  target_sources(${target} PRIVATE "${written}")
endfunction()

function(aotops_add_library name)
  add_library(${name} MODULE ${ARGN})
  target_link_libraries(${name} PRIVATE aotops::aot)
  set_target_properties(${name} PROPERTIES PREFIX lib SUFFIX .so VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Static)
  aotops_export_to_tvm_ffi(${name})
endfunction()
