// The passes of `cell.h` and `training.h` as kernels, compiled at run time for the GPU at hand (NVRTC). The grid is columns, rows,
// directions.

#include "cell.h"
#include "training.h"

#define KERNEL(PASS_NAME, ARGUMENTS, ROWS, COLUMNS, TYPE, NAME, V)                                                      \
  extern "C" __global__ void PASS_NAME##_##NAME##_##V(const ARGUMENTS step) {                                           \
    const long long column = V * (blockIdx.x * (long long)blockDim.x + threadIdx.x);                                    \
    if (column >= step.COLUMNS) return;                                                                                 \
    for (long long row = blockIdx.y; row < step.ROWS; row += gridDim.y)                                                 \
      PASS_NAME<TYPE, V>(step, blockIdx.z, row, column);                                                                \
  }

// Those of one use: compiling takes longer than loading a small model.
#ifdef ELMO_TRAINING
#define PASSES(TYPE, NAME, V)                                               \
  KERNEL(lstm_cell_kept, KeptGates, rows, cells, TYPE, NAME, V)             \
  KERNEL(lstm_output, Outputs, rows, size, TYPE, NAME, V)                   \
  KERNEL(lstm_cell_backward, GateGradients, rows, cells, TYPE, NAME, V)     \
  KERNEL(lstm_output_backward, OutputGradients, rows, size, TYPE, NAME, V)  \
  KERNEL(dropout, Dropping, tokens, width, TYPE, NAME, V)
#else
#define PASSES(TYPE, NAME, V)                                               \
  KERNEL(lstm_cell, Gates, rows, cells, TYPE, NAME, V)                      \
  KERNEL(lstm_output, Outputs, rows, size, TYPE, NAME, V)
PASSES(Float16, f16, 1)
PASSES(Float16, f16, 4)
#endif

PASSES(float, f32, 1)
PASSES(float, f32, 4)
PASSES(BFloat16, bf16, 1)
PASSES(BFloat16, bf16, 4)
