// Loops over numbers, compiled once for each kind of vector unit.  They include no header of torch.  Otherwise, the
// linker might keep the AVX-512 version of one of torch's inline functions for the whole library.
#pragma once

#include <cstdint>

namespace cpulaunch::kernels {

// Which elements of a tensor dropout keeps, as a pure function of their positions.
struct Mask {
  uint64_t seed;
  uint32_t threshold;  // an element is kept if its random number is at least this
  float scale;         // by which elements that are kept are multiplied

  // Drops with probability p, 0 < p < 1, in steps of 2^-32.
  static Mask of(uint64_t seed, double p);
};

constexpr int64_t block_size = 32;  // elements whose random numbers are computed together

// A head's bias, which is added to its scores.  That of (query, key) is at `data` + query · by_query + key · by_key.
struct Bias {
  enum Kind { none, boolean, fp32, bf16 };  // boolean: false is -infinity

  Kind kind;
  const void* data;
  int64_t by_query, by_key;  // elements
};

// Some rows of a head's scores, one for each query from `first_query` on.  A row has `width` columns, a multiple of
// block_size; the first `keys` of them are valid.
struct Rows {
  int64_t first_query, count, keys, width;
  float scale;
  bool causal;  // a query sees no key after its own position
  Bias bias;
  Mask mask;
  uint64_t first_block;  // the number of the mask's block at which the first row starts
};

// The softmax of numbers: exp(number - largest) / sum.  The two stay apart, because in fp32, largest + log(sum) rounds
// the logarithm away if the largest number is large.
struct Softmax {
  float largest, sum;
};

struct Vector {
  const char* name;

  // to[i] = from[i] masked and scaled, for the elements of blocks `begin` to `end` of a tensor with `size` elements.
  void (*dropout_float)(const float* from, float* to, int64_t begin, int64_t end, int64_t size, const Mask&);
  void (*dropout_bfloat16)(const uint16_t* from, uint16_t* to, int64_t begin, int64_t end, int64_t size,
                           const Mask&);

  // Softmax and dropout.  Sets `scores` to exp(score - largest) if dropout keeps it, else to 0.  Sets `factor` of each
  // row to the number by which these must be multiplied for probabilities, scaled for dropout.  Sets `logsum` to
  // log(sum(exp(score))).
  void (*softmax)(const Rows&, float* scores, float* factor, float* logsum);

  // The derivative of softmax and dropout.  Sets `scores` to the masked probabilities.  `gradient` is with respect to
  // these, and becomes the gradient with respect to the scores before they are scaled.  `inner` is each row's sum of
  // output · gradient of the output.
  void (*softmax_backward)(const Rows&, float* scores, float* gradient, const float* logsum, const float* inner);

  // to[i] = from[i] · factor.
  void (*scaled_float)(const float* from, float factor, float* to, int64_t count);
  void (*scaled_bfloat16)(const float* from, float factor, uint16_t* to, int64_t count);

  // The sum of one[i] · other[i].
  float (*inner_float)(const float* one, const float* other, int64_t count);
  float (*inner_bfloat16)(const uint16_t* one, const uint16_t* other, int64_t count);

  // to[column][row] = from[row][column], for elements of 16 and 32 bits.  `stride` is in bytes, between rows of `from`;
  // `to_stride` is in elements, between rows of `to`.
  void (*transpose16)(const void* from, int64_t rows, int64_t stride, int64_t columns, uint16_t* to,
                      int64_t to_stride);
  void (*transpose32)(const void* from, int64_t rows, int64_t stride, int64_t columns, uint32_t* to,
                      int64_t to_stride);

  // Arranges rows as bf16 for oneDNN's matrix products, in panels of `panel` columns.  Within a panel, each two rows
  // are interleaved element by element.  An odd last row is paired with zeros.
  void (*panels_of_float)(const float* from, int64_t rows, int64_t stride, int64_t width, int64_t panel,
                          uint16_t* to);
  void (*panels_of_bfloat16)(const uint16_t* from, int64_t rows, int64_t stride, int64_t width, int64_t panel,
                             uint16_t* to);

  // gelu with tanh, and its gradient.
  void (*gelu_float)(const float* from, float* to, int64_t count);
  void (*gelu_bfloat16)(const uint16_t* from, uint16_t* to, int64_t count);
  void (*gelu_backward_float)(const float* gradient, const float* from, float* to, int64_t count);
  void (*gelu_backward_bfloat16)(const uint16_t* gradient, const uint16_t* from, uint16_t* to, int64_t count);

  // The largest number, and the sum of exp(number - largest).
  Softmax (*softmax_of_float)(const float* from, int64_t count);
  Softmax (*softmax_of_bfloat16)(const uint16_t* from, int64_t count);

  // to[i] = softmax of from[i] · factor, minus `factor` for the element `chosen`.  The stores bypass the caches.
  void (*probabilities_float)(const float* from, Softmax, float factor, int64_t chosen, float* to, int64_t count);
  void (*probabilities_bfloat16)(const uint16_t* from, Softmax, float factor, int64_t chosen, uint16_t* to,
                                 int64_t count);

  // to[i] = from[i].  The stores bypass the caches.
  void (*widen)(const uint16_t* from, float* to, int64_t count);
};

extern const Vector portable;
#ifdef __x86_64__
extern const Vector avx2;
extern const Vector avx512;
#endif

}  // namespace cpulaunch::kernels
