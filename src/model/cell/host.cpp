// The passes of `cell.h`, `reduction.h` and `training.h` on the CPU, in float32 and bfloat16.

#include "reduction.h"
#include "training.h"

#define PASS_ON_HOST(PASS_NAME, ARGUMENTS, ROWS, COLUMNS, TYPE, NAME, V)                         \
  extern "C" void elmo_##PASS_NAME##_##NAME##_##V(const ARGUMENTS *step) {                       \
    for (int direction = 0; direction < 2; ++direction)                                          \
      for (long long row = 0; row < step->ROWS; ++row)                                           \
        for (long long column = 0; column < step->COLUMNS; column += V)                          \
          PASS_NAME<TYPE, V>(*step, direction, row, column);                                     \
  }

#define HOST(TYPE, NAME, V)                                                        \
  PASS_ON_HOST(lstm_cell, Gates, rows, cells, TYPE, NAME, V)                       \
  PASS_ON_HOST(lstm_output, Outputs, rows, size, TYPE, NAME, V)                    \
  PASS_ON_HOST(mix, Mixes, rows, size, TYPE, NAME, V)                              \
  PASS_ON_HOST(mix_sum, Mixes, rows, size, TYPE, NAME, V)                          \
  PASS_ON_HOST(mix_max, Mixes, rows, size, TYPE, NAME, V)                          \
  PASS_ON_HOST(lstm_cell_kept, KeptGates, rows, cells, TYPE, NAME, V)              \
  PASS_ON_HOST(lstm_cell_backward, GateGradients, rows, cells, TYPE, NAME, V)      \
  PASS_ON_HOST(lstm_output_backward, OutputGradients, rows, size, TYPE, NAME, V)   \
  PASS_ON_HOST(dropout, Dropping, tokens, width, TYPE, NAME, V)

HOST(float, f32, 1)
HOST(float, f32, 4)
HOST(BFloat16, bf16, 1)
HOST(BFloat16, bf16, 4)
