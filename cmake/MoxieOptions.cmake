# Compiler options of everything that is built here. What the results depend on:
#   -ffp-contract=off   an a*b+c is two roundings everywhere, whatever the compiler and the loop around it: the same
#                       bits in every plan, worker count and build (design contract: bitwise determinism)
#   no -ffast-math, no -march=native: one binary, the same bits on every x86-64; wide vectors come from oneDNN,
#                       which picks them at run time.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # the Python module will link the static library
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Sanitizers go everywhere, test main and support library included.
if(MOXIE_SANITIZE)
  add_compile_options(-fsanitize=${MOXIE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MOXIE_SANITIZE})
endif()

if(MOXIE_CUDA)
  # nvcc is often installed but not on PATH. Architecture by -gencode: wgmma and setmaxnreg exist in sm_90a only, and
  # there is no PTX to fall back to. CMake 3.25 has no spelling for that, nor for C++20 in CUDA: both are plain flags.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(MOXIE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin REQUIRED)
    set(CMAKE_CUDA_COMPILER "${MOXIE_NVCC}")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
    message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: Moxie needs CUDA 12.9 or newer")
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()

function(moxie_compile_options target)
  set(warnings -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
      -Wno-missing-field-initializers)  # options structs are filled by designated initializers
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND warnings -Wshadow=local)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
      list(APPEND warnings -Wno-restrict)  # false alarms on std::string's operator+, GCC bug 105329
    endif()
  else()
    list(APPEND warnings -Wshadow)
  endif()
  if(MOXIE_WERROR)
    list(APPEND warnings -Werror)
  endif()
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${warnings};-ffp-contract=off>)
  if(MOXIE_CUDA)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr;-lineinfo;-Xcompiler=-Wall,-ffp-contract=off>")
    if(MOXIE_WERROR)
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
    endif()
  endif()
endfunction()
