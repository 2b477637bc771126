# `cmake --install`: library, public headers, the command, and find_package(moxie CONFIG) for other projects.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(moxie_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/moxie")
install(TARGETS moxie EXPORT moxieTargets)
if(TARGET moxie_cli)
  install(TARGETS moxie_cli)
endif()
install(FILES moxie/moxie.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/moxie")
foreach(room core pipeline trace)  # what moxie.h includes
  install(DIRECTORY moxie/${room} DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/moxie"
          FILES_MATCHING PATTERN "*.h")
endforeach()

install(FILES README.md DESTINATION "${CMAKE_INSTALL_DATADIR}/moxie")  # the text that `moxie run` reads when told none
install(EXPORT moxieTargets NAMESPACE moxie:: DESTINATION "${moxie_package_dir}")
configure_package_config_file(cmake/moxieConfig.cmake.in "${PROJECT_BINARY_DIR}/moxieConfig.cmake"
                              INSTALL_DESTINATION "${moxie_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/moxieConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/moxieConfig.cmake" "${PROJECT_BINARY_DIR}/moxieConfigVersion.cmake"
              cmake/FindOneDNN.cmake
        DESTINATION "${moxie_package_dir}")
