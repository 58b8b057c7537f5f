// CPU kernels of `ops`: fp32, contiguous rows, threads from libtorch's own pool.
#include <ATen/Parallel.h>
#include "shim.h"
