// The passes that mix the layers of tokens, and reduce sentences to a vector (`reduction.rs`). As `cell.h`, for the columns of one row.

#pragma once

#include "cell.h"

#define MOST_TERMS 8

// Rows of one mix of layers. Both directions, which are the halves of a row.
struct Mixes {
  const void *layers[MOST_TERMS];  // each [2, all, size]
  float factors[MOST_TERMS];       // of each layer
  const long long *tokens;         // [2, count]: packed row of each token
  const long long *ends;           // [rows], one past the last token of each row; where rows are tokens it is not read
  void *out;                       // [rows, columns] from the first column of this mix on
  long long terms, count, all, size, rows, columns;
};

// Rounded after each operation, as in host memory and by libtorch.
#ifdef __CUDACC_RTC__
PASS float product(float a, float b) { return __fmul_rn(a, b); }
PASS float sum(float a, float b) { return __fadd_rn(a, b); }
#else
PASS float product(float a, float b) { return a * b; }
PASS float sum(float a, float b) { return a + b; }
#endif

// V columns of the mix of a token.
template <class T, int V> PASS Numbers<float, V> mix_of(const Mixes &mixes, int direction, long long token, long long column) {
  const long long row = direction * mixes.all + mixes.tokens[direction * mixes.count + token];
  Numbers<float, V> mix = {};
  for (int term = 0; term < mixes.terms; ++term) {
    const Numbers<T, V> layer = read<T, V>(mixes.layers[term], row * mixes.size + column);
    for (int v = 0; v < V; ++v) {
      const float x = product(load(layer.of[v]), mixes.factors[term]);
      mix.of[v] = term ? sum(mix.of[v], x) : x;
    }
  }
  return mix;
}

PASS long long out_of(const Mixes &mixes, int direction, long long row, long long column) {
  return row * mixes.columns + direction * mixes.size + column;
}

// The mixes of tokens.
template <class T, int V> PASS void mix(const Mixes &mixes, int direction, long long row, long long column) {
  write<float, V>(mixes.out, out_of(mixes, direction, row, column), mix_of<T, V>(mixes, direction, row, column));
}

// The sum of the tokens of a row, in their order and in float64.
template <class T, int V> PASS void mix_sum(const Mixes &mixes, int direction, long long row, long long column) {
  Numbers<double, V> sums = {};
  for (long long token = row ? mixes.ends[row - 1] : 0; token < mixes.ends[row]; ++token) {
    const Numbers<float, V> mix = mix_of<T, V>(mixes, direction, token, column);
    for (int v = 0; v < V; ++v) sums.of[v] += mix.of[v];
  }
  write<double, V>(mixes.out, out_of(mixes, direction, row, column), sums);
}

// The maximum of the tokens of a row; NaN if there is one, and negative infinity without a token.
template <class T, int V> PASS void mix_max(const Mixes &mixes, int direction, long long row, long long column) {
  Numbers<double, V> maxima;
  for (int v = 0; v < V; ++v) maxima.of[v] = of_bits(0xff800000);
  for (long long token = row ? mixes.ends[row - 1] : 0; token < mixes.ends[row]; ++token) {
    const Numbers<float, V> mix = mix_of<T, V>(mixes, direction, token, column);
    for (int v = 0; v < V; ++v)
      if (mix.of[v] > maxima.of[v] || mix.of[v] != mix.of[v]) maxima.of[v] = mix.of[v];
  }
  write<double, V>(mixes.out, out_of(mixes, direction, row, column), maxima);
}
