// The passes of `cell.h`, `reduction.h` and `training.h` as kernels, compiled at run time for the GPU at hand (NVRTC), for numbers of the
// type `ELMO_TYPE`. The grid is columns, rows, directions.

#include "cell.h"
#include "reduction.h"
#include "training.h"

#define KERNEL(PASS_NAME, ARGUMENTS, ROWS, COLUMNS, V)                                        \
  extern "C" __global__ void PASS_NAME##_##V(const ARGUMENTS step) {                          \
    const long long column = V * (blockIdx.x * (long long)blockDim.x + threadIdx.x);          \
    if (column >= step.COLUMNS) return;                                                       \
    for (long long row = blockIdx.y; row < step.ROWS; row += gridDim.y)                       \
      PASS_NAME<ELMO_TYPE, V>(step, blockIdx.z, row, column);                                 \
  }

// Those of one use: compiling takes longer than loading a small model.
#ifdef ELMO_TRAINING
#define PASSES(V)                                               \
  KERNEL(lstm_cell_kept, KeptGates, rows, cells, V)             \
  KERNEL(lstm_output, Outputs, rows, size, V)                   \
  KERNEL(lstm_cell_backward, GateGradients, rows, cells, V)     \
  KERNEL(lstm_output_backward, OutputGradients, rows, size, V)  \
  KERNEL(dropout, Dropping, tokens, width, V)
#else
#define PASSES(V)                                               \
  KERNEL(lstm_cell, Gates, rows, cells, V)                      \
  KERNEL(lstm_output, Outputs, rows, size, V)                   \
  KERNEL(mix, Mixes, rows, size, V)                             \
  KERNEL(mix_sum, Mixes, rows, size, V)                         \
  KERNEL(mix_max, Mixes, rows, size, V)
#endif

PASSES(1)
PASSES(4)
