// What only training needs: the pass over the gates whose results its backward pass reads (`lstm/trained_device.rs`), those of the
// backward pass, and dropout (`dropout.rs`). As `cell.h`, for the columns of one row.

#pragma once

#include "cell.h"

// The gates of a step and its cell states, both directions.
struct KeptGates {
  void *gates;          // [2, all, 4 cells] from the step's first row on: i, j, f, o, before bias and non-linearities, then after them
  const float *bias;    // [2, 4 cells], with the 1 of the forget gate
  const float *before;  // [2, rows, cells]
  float *after;         // [2, rows, cells]
  void *out;            // [2, all, cells] from the step's first row on: sigmoid(o) tanh(c)
  long long rows, all, cells;
  float clip;
};

// The derivatives of a step by its gates and by the cell states before it, both directions.
struct GateGradients {
  void *gates;          // [2, all, 4 cells] from the step's first row on: gates, then derivatives before their non-linearities
  const float *before;  // [2, rows, cells]
  const float *after;   // [2, rows, cells]
  const void *out;      // [2, rows, cells]: derivatives by sigmoid(o) tanh(c)
  float *state;         // [2, rows, cells]: derivatives by the cell states after the step, then by those before it
  long long rows, all, cells;
  float clip;
};

// The derivatives of a step by its projected outputs, both directions.
struct OutputGradients {
  const void *y;          // [2, all, size] from the step's first row on: derivatives by the output of the layer
  const void *next;       // [2, rows, size]: by what the next step reads; null at the last step
  const void *projected;  // [2, rows, size]
  void *to;               // [2, all, size] from the step's first row on
  long long rows, all, size;
  float clip;
};

// Which values of the rows of a window dropout keeps. Both directions.
struct Dropping {
  const long long *packed;   // [2, tokens]: packed row of each token, row by row of the window
  void *factors;             // [2, all, width]: `kept`, or 0
  long long tokens, all, width, positions;
  unsigned long long below;  // a value is dropped where its 32 random bits are below this
  unsigned key[2], step, first_row, purposes[2];
  float kept;
};

template <class T, int V> PASS void lstm_cell_kept(const KeptGates &step, int direction, long long row, long long column) {
  const long long cells = step.cells;
  const long long at = (direction * step.all + row) * 4 * cells + column;
  const long long own = (direction * step.rows + row) * cells + column;
  Numbers<T, V> gates[4];
  Numbers<float, V> biases[4];
  for (int gate = 0; gate < 4; ++gate) {
    gates[gate] = read<T, V>(step.gates, at + gate * cells);
    biases[gate] = read<float, V>(step.bias, direction * 4 * cells + gate * cells + column);
  }
  Numbers<float, V> state = read<float, V>(step.before, own);
  Numbers<T, V> out;
  for (int v = 0; v < V; ++v) {
    const float i = sigmoid<T>(load(gates[0].of[v]) + biases[0].of[v]);
    const float j = tangent<T>(load(gates[1].of[v]) + biases[1].of[v]);
    const float f = sigmoid<T>(load(gates[2].of[v]) + biases[2].of[v]);
    const float o = sigmoid<T>(load(gates[3].of[v]) + biases[3].of[v]);
    state.of[v] = clipped(f * state.of[v] + i * j, step.clip);
    store(i, gates[0].of[v]);
    store(j, gates[1].of[v]);
    store(f, gates[2].of[v]);
    store(o, gates[3].of[v]);
    store(o * tangent<T>(state.of[v]), out.of[v]);
  }
  for (int gate = 0; gate < 4; ++gate) write<T, V>(step.gates, at + gate * cells, gates[gate]);
  write<float, V>(step.after, own, state);
  write<T, V>(step.out, (direction * step.all + row) * cells + column, out);
}

// Whether the clip bounded the cell state. From gates of 16 bits the sum cannot be had again: there, a state on the bound was bounded.
template <class T> PASS bool bounded(float sum, float state, float clip) {
  return sizeof(T) == 4 ? sum > clip || sum < -clip : state >= clip || state <= -clip;
}

template <class T, int V>
PASS void lstm_cell_backward(const GateGradients &step, int direction, long long row, long long column) {
  const long long cells = step.cells;
  const long long at = (direction * step.all + row) * 4 * cells + column;
  const long long own = (direction * step.rows + row) * cells + column;
  Numbers<T, V> gates[4];
  for (int gate = 0; gate < 4; ++gate) gates[gate] = read<T, V>(step.gates, at + gate * cells);
  const Numbers<float, V> before = read<float, V>(step.before, own), after = read<float, V>(step.after, own);
  const Numbers<T, V> out = read<T, V>(step.out, own);
  Numbers<float, V> state = read<float, V>(step.state, own);
  for (int v = 0; v < V; ++v) {
    const float i = load(gates[0].of[v]), j = load(gates[1].of[v]), f = load(gates[2].of[v]), o = load(gates[3].of[v]);
    const float t = tangent<T>(after.of[v]), m = load(out.of[v]);
    const bool beyond = bounded<T>(f * before.of[v] + i * j, after.of[v], step.clip);
    const float c = beyond ? 0.0f : state.of[v] + m * o * (1.0f - t * t);
    state.of[v] = c * f;
    store(c * j * i * (1.0f - i), gates[0].of[v]);
    store(c * i * (1.0f - j * j), gates[1].of[v]);
    store(c * before.of[v] * f * (1.0f - f), gates[2].of[v]);
    store(m * t * o * (1.0f - o), gates[3].of[v]);
  }
  for (int gate = 0; gate < 4; ++gate) write<T, V>(step.gates, at + gate * cells, gates[gate]);
  write<float, V>(step.state, own, state);
}

template <class T, int V>
PASS void lstm_output_backward(const OutputGradients &step, int direction, long long row, long long column) {
  const long long at = (direction * step.all + row) * step.size + column;
  const long long own = (direction * step.rows + row) * step.size + column;
  Numbers<T, V> y = read<T, V>(step.y, at);
  if (step.next) {
    const Numbers<T, V> next = read<T, V>(step.next, own);
    for (int v = 0; v < V; ++v) store(load(y.of[v]) + load(next.of[v]), y.of[v]);
  }
  const Numbers<T, V> projected = read<T, V>(step.projected, own);
  for (int v = 0; v < V; ++v) {
    const float h = load(projected.of[v]);
    if (h > step.clip || h < -step.clip) store(0.0f, y.of[v]);
  }
  write<T, V>(step.to, at, y);
}

// Philox 4x32 with ten rounds, as `train/random.rs` has it.
struct Philox {
  unsigned of[4];
};

PASS Philox philox(Philox counter, unsigned key0, unsigned key1) {
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = counter.of[0] * 0xD2511F53ull, second = counter.of[2] * 0xCD9E8D57ull;
    counter = {{unsigned(second >> 32) ^ counter.of[1] ^ key0, unsigned(second), unsigned(first >> 32) ^ counter.of[3] ^ key1,
                unsigned(first)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The values of a row of the window are numbered from its first position on; a block of Philox is for four of them.
template <class T, int V> PASS void dropout(const Dropping &drop, int direction, long long token, long long column) {
  const long long number = token % drop.positions * drop.width + column;
  const unsigned row = drop.first_row + unsigned(token / drop.positions);
  const Philox bits = philox({{unsigned(number / 4), row, drop.step, drop.purposes[direction]}}, drop.key[0], drop.key[1]);
  Numbers<T, V> factors;
  for (int v = 0; v < V; ++v) store(bits.of[(number + v) % 4] < drop.below ? 0.0f : drop.kept, factors.of[v]);
  const long long packed = drop.packed[direction * drop.tokens + token];
  write<T, V>(drop.factors, (direction * drop.all + packed) * drop.width + column, factors);
}
