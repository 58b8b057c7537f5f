// The part of hiprtc's ABI that the shims have, as hiprtc.h of HIP 6.4 and 7.2 declares it: see hip_abi.h.
#pragma once

typedef struct _hiprtcProgram* hiprtcProgram;
enum hiprtcResult : int {
  HIPRTC_SUCCESS = 0,
  HIPRTC_ERROR_INVALID_INPUT = 3,
  HIPRTC_ERROR_INVALID_PROGRAM = 4,
  HIPRTC_ERROR_INVALID_OPTION = 5,
  HIPRTC_ERROR_COMPILATION = 6,
  HIPRTC_ERROR_INTERNAL_ERROR = 11,
};
