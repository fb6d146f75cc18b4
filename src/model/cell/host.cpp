// The passes of `cell.h` on the CPU, in float32 and bfloat16.

#include "cell.h"

template <class T, int V> static void cells(const Gates &step) {
  for (int direction = 0; direction < 2; ++direction)
    for (long long row = 0; row < step.rows; ++row)
      for (long long column = 0; column < step.cells; column += V) lstm_cell<T, V>(step, direction, row, column);
}

template <class T, int V> static void outputs(const Outputs &step) {
  for (int direction = 0; direction < 2; ++direction)
    for (long long row = 0; row < step.rows; ++row)
      for (long long column = 0; column < step.size; column += V) lstm_output<T, V>(step, direction, row, column);
}

#define HOST(TYPE, NAME, V)                                                        \
  extern "C" void elmo_lstm_cell_##NAME##_##V(const Gates *step) { cells<TYPE, V>(*step); } \
  extern "C" void elmo_lstm_output_##NAME##_##V(const Outputs *step) { outputs<TYPE, V>(*step); }

HOST(float, f32, 1)
HOST(float, f32, 4)
HOST(BFloat16, bf16, 1)
HOST(BFloat16, bf16, 4)
