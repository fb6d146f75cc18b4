// The passes over memory between the products of a time step (`lstm/device.rs`), for the columns of one row. `kernels.cu` runs them
// on GPUs; `host.cpp` runs them on the CPU, where tests compare them with the plain reference.
//
// Arithmetic is float32 whatever the type of the numbers in memory. `mod.rs` declares the structures in Rust.

#pragma once

#ifdef __CUDACC_RTC__
#define PASS static __device__ __forceinline__
static __device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
static __device__ __forceinline__ float of_bits(unsigned bits) { return __uint_as_float(bits); }
#else
#include <cmath>
#include <cstring>
#define PASS static inline
static inline unsigned bits_of(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float of_bits(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
#endif

// The gates of a step and its cell states, both directions.
struct Gates {
  const void *sums;         // [2, rows, 4 cells]: i, j, f, o before bias and non-linearities
  const void *inputs;       // [2, words, 4 cells]: products that are added to them; may be null
  const long long *places;  // [2, all] from the step's first row on: which of them, for each row
  const float *bias;        // [2, 4 cells], with the 1 of the forget gate
  float *state;             // [2, width, cells], changed in place
  const float *start;       // [2, cells]
  const long long *begins;  // [rows], not 0 where a sentence begins; may be null
  void *out;                // [2, rows, cells]: sigmoid(o) tanh(c)
  long long rows, width, cells, words, all;
  float clip;
};

// The projected outputs of a step, both directions.
struct Outputs {
  const void *projected;    // [2, rows, size]
  const void *input;        // [2, all, columns] from the step's first row on: what is added; may be null
  void *next;               // [2, all, columns] from the next step's first row on: what that step reads
  void *y;                  // [2, all, size] from the step's first row on
  const void *start;        // [2, size]
  const long long *begins;  // [next_rows], not 0 where a sentence begins at the next step; may be null
  long long rows, next_rows, all, columns, size;
  float clip;
};

struct BFloat16 {
  unsigned short bits;
};

PASS float load(float x) { return x; }
PASS float load(BFloat16 x) { return of_bits(unsigned(x.bits) << 16); }
PASS void store(float x, float &to) { to = x; }
PASS void store(float x, BFloat16 &to) {
  const unsigned bits = bits_of(x);
  // To the nearest, and to the even one of two; NaN stays NaN.
  to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#ifdef __CUDACC_RTC__
struct Float16 {
  unsigned short bits;
};
PASS float load(Float16 x) {
  float to;
  asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(x.bits));
  return to;
}
PASS void store(float x, Float16 &to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
#endif

// The non-linearities of gates of type T. Numbers of 16 bits do not show the error of the fast instructions, some 1e-6 of the result.
template <class T> PASS float sigmoid(float x) {
#ifdef __CUDACC_RTC__
  if (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
#endif
  return 1.0f / (1.0f + expf(-x));
}
template <class T> PASS float tangent(float x) {
#ifdef __CUDACC_RTC__
  // Near 0 the difference would lose digits, and the series needs two terms. For large x the exponential is infinite, and the quotient 0.
  if (sizeof(T) == 2)
    return fabsf(x) < 0.03f ? x - x * x * x * (1.0f / 3.0f) : 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x));
#endif
  return tanhf(x);
}

// NaN stays NaN.
PASS float clipped(float x, float clip) { return x > clip ? clip : x < -clip ? -clip : x; }

// V numbers, in one access to memory.
template <class T, int V> struct alignas(sizeof(T) * V) Numbers {
  T of[V];
};

template <class T, int V> PASS Numbers<T, V> read(const void *numbers, long long at) {
  return *reinterpret_cast<const Numbers<T, V> *>(static_cast<const T *>(numbers) + at);
}

template <class T, int V> PASS void write(void *numbers, long long at, const Numbers<T, V> &values) {
  *reinterpret_cast<Numbers<T, V> *>(static_cast<T *>(numbers) + at) = values;
}

// c = clip(sigmoid(f) c + sigmoid(i) tanh(j)) and sigmoid(o) tanh(c), for V columns of a row.
template <class T, int V> PASS void lstm_cell(const Gates &step, int direction, long long row, long long column) {
  const long long cells = step.cells;
  const long long sums = (direction * step.rows + row) * 4 * cells + column;
  const long long bias = direction * 4 * cells + column;
  const long long own = (direction * step.width + row) * cells + column;
  const bool begins = step.begins && step.begins[row];
  Numbers<T, V> gates[4];
  Numbers<float, V> biases[4];
  for (int gate = 0; gate < 4; ++gate) {
    gates[gate] = read<T, V>(step.sums, sums + gate * cells);
    biases[gate] = read<float, V>(step.bias, bias + gate * cells);
  }
  if (step.inputs) {
    const long long word = direction * step.words + step.places[direction * step.all + row];
    for (int gate = 0; gate < 4; ++gate) {
      const Numbers<T, V> input = read<T, V>(step.inputs, (word * 4 + gate) * cells + column);
      for (int v = 0; v < V; ++v) biases[gate].of[v] += load(input.of[v]);
    }
  }
  Numbers<float, V> state =
      begins ? read<float, V>(step.start, direction * cells + column) : read<float, V>(step.state, own);
  Numbers<T, V> out;
  for (int v = 0; v < V; ++v) {
    const float i = sigmoid<T>(load(gates[0].of[v]) + biases[0].of[v]);
    const float j = tangent<T>(load(gates[1].of[v]) + biases[1].of[v]);
    const float f = sigmoid<T>(load(gates[2].of[v]) + biases[2].of[v]);
    const float o = sigmoid<T>(load(gates[3].of[v]) + biases[3].of[v]);
    state.of[v] = clipped(f * state.of[v] + i * j, step.clip);
    store(o * tangent<T>(state.of[v]), out.of[v]);
  }
  write<float, V>(step.state, own, state);
  write<T, V>(step.out, (direction * step.rows + row) * cells + column, out);
}

// h = clip(projected), to the next step and to the output of the layer, for V columns of a row.
template <class T, int V> PASS void lstm_output(const Outputs &step, int direction, long long row, long long column) {
  const long long size = step.size;
  const long long of_input = (direction * step.all + row) * step.columns + column;
  Numbers<T, V> h = read<T, V>(step.projected, (direction * step.rows + row) * size + column);
  for (int v = 0; v < V; ++v) store(clipped(load(h.of[v]), step.clip), h.of[v]);
  if (row < step.next_rows) {
    const bool begins = step.begins && step.begins[row];
    write<T, V>(step.next, of_input, begins ? read<T, V>(step.start, direction * size + column) : h);
  }
  if (step.input) {
    const Numbers<T, V> x = read<T, V>(step.input, of_input);
    for (int v = 0; v < V; ++v) store(load(h.of[v]) + load(x.of[v]), h.of[v]);
  }
  write<T, V>(step.y, (direction * step.all + row) * size + column, h);
}
