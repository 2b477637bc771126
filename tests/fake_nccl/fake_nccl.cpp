// Stands for libnccl.so.2 in the tests of how it is looked for: a version, and functions' names.
extern "C" {
int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
const char* ncclGetErrorString(int) { return "fake"; }
const char* ncclGetLastError(void*) { return ""; }
#define FAKE(name) \
  int name() { return 3; }
#ifndef FAKE_NCCL_INCOMPLETE
FAKE(ncclCommWindowRegister)
#endif
FAKE(ncclGetUniqueId)
FAKE(ncclCommInitRankConfig)
FAKE(ncclCommSplit)
FAKE(ncclCommGetAsyncError)
FAKE(ncclCommAbort)
FAKE(ncclCommCount)
FAKE(ncclCommUserRank)
FAKE(ncclCommCuDevice)
FAKE(ncclMemAlloc)
FAKE(ncclMemFree)
FAKE(ncclTeamLsa)
FAKE(ncclCommWindowDeregister)
FAKE(ncclGetLsaDevicePointer)
}
