# Run by ctest: stages an install of BUILD_DIR, configures tests/consumer against it, builds and runs it.
set(work "${BUILD_DIR}/consumer")
file(REMOVE_RECURSE "${work}")
# A copy, so that no header of the source tree can be found by accident.
file(COPY "${SOURCE_DIR}/examples/hello_cpu.cpp" DESTINATION "${work}/src")
file(COPY "${SOURCE_DIR}/tests/consumer/CMakeLists.txt" DESTINATION "${work}/src")
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()
run(${CMAKE_COMMAND} --install "${BUILD_DIR}" --prefix "${work}/stage")
run(${CMAKE_COMMAND} -S "${work}/src" -B "${work}/build" -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${work}/stage -DHELLO_SOURCE=${work}/src/hello_cpu.cpp)
run(${CMAKE_COMMAND} --build "${work}/build")
run("${work}/build/hello_cpu")
run("${work}/stage/bin/moxie" --version)
