// The files that need libtorch's large headers, in one unit: reading the headers takes a compiler longer than all else.
#include "c10d.cpp"
#include "device.cpp"
#include "flash.cpp"
#include "graph.cpp"
#include "memory.cpp"
#include "npu.cpp"
#include "profile.cpp"
#include "tensor.cpp"
