# find_package(aotops), with -Daotops_DIR=$(python -m aotops cmake-dir):
#
#   aotops_add_library(scale scale.cpp)      # libscale.so, with the entries of sources that include aot.h
#
# or, for a target of one's own, target_link_libraries(mine PRIVATE aotops::aot).
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

function(aotops_add_library name)
  add_library(${name} MODULE ${ARGN})
  target_link_libraries(${name} PRIVATE aotops::aot)
  set_target_properties(${name} PROPERTIES PREFIX lib SUFFIX .so VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Static)
endfunction()
