// The passes of `cell.h` as kernels, compiled at run time for the GPU at hand (NVRTC). The grid is columns, rows, directions.

#include "cell.h"

#define KERNELS(TYPE, NAME, V)                                                                                          \
  extern "C" __global__ void lstm_cell_##NAME##_##V(const Gates step) {                                                 \
    const long long column = V * (blockIdx.x * (long long)blockDim.x + threadIdx.x);                                    \
    if (column >= step.cells) return;                                                                                   \
    for (long long row = blockIdx.y; row < step.rows; row += gridDim.y)                                                 \
      lstm_cell<TYPE, V>(step, blockIdx.z, row, column);                                                                \
  }                                                                                                                     \
  extern "C" __global__ void lstm_output_##NAME##_##V(const Outputs step) {                                             \
    const long long column = V * (blockIdx.x * (long long)blockDim.x + threadIdx.x);                                    \
    if (column >= step.size) return;                                                                                    \
    for (long long row = blockIdx.y; row < step.rows; row += gridDim.y)                                                 \
      lstm_output<TYPE, V>(step, blockIdx.z, row, column);                                                              \
  }

KERNELS(float, f32, 1)
KERNELS(float, f32, 4)
KERNELS(BFloat16, bf16, 1)
KERNELS(BFloat16, bf16, 4)
KERNELS(Float16, f16, 1)
KERNELS(Float16, f16, 4)
