// Owners of CUDA memory, by their names of this room: the transport uses the same ones.
#pragma once

#include "moxie/transport/cuda_memory.h"

namespace moxie::backend_cuda {

using transport::check_cuda;
using transport::DeviceBytes;
using transport::DeviceGuard;
using transport::MappedHost;

}  // namespace moxie::backend_cuda
