// What this library is. The build defines KVN_BUILD_ID for this file alone.
#include "kv_native.h"

#ifndef KVN_BUILD_ID
#define KVN_BUILD_ID "unknown"
#endif

int32_t kvn_abi_version() { return KVN_ABI_VERSION; }

const char* kvn_build_id() { return KVN_BUILD_ID; }
