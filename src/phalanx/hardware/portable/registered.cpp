/* Puts the portable kernels in the place of PyTorch's, through its stable C interface.

   PyTorch finds the kernel of an operation through its dispatcher, below autograd. A kernel that is registered there serves models, losses
   and optimizers as they are, forward and backward; written in C++, it is called without Python. The stable interface
   (https://docs.pytorch.org/docs/2.11/notes/libtorch_stable_abi.html) needs few of PyTorch's headers, so this file compiles in seconds, and
   has no scalars: operations that take one are in operations.py.

   Every kernel here brings its operands into the layout that a kernel in C takes, and divides whole outputs among PyTorch's threads. What
   it computes is in the C files. */

#define TORCH_TARGET_VERSION 0x020a000000000000 /* 2.10, the first release that has this interface */

/* The work is in the C files: what is optimized here is the time to compile. */
#pragma GCC optimize "O1"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using sizes_t = std::vector<int64_t>;

/* --- tensors ------------------------------------------------------------------------------------------------------------------------ */

void check(AOTITorchError error) {
  if (error) throw std::runtime_error("PyTorch refused a call of a portable kernel");
}

int32_t number_of(ScalarType type) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)); }

/* An empty tensor; contiguous where no strides are given. */
Tensor empty(const sizes_t &sizes, ScalarType type, const sizes_t *strides = nullptr) {
  sizes_t dense(sizes.size(), 1);
  for (int64_t d = (int64_t)sizes.size() - 2; d >= 0; d--) dense[d] = dense[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  AtenTensorHandle made;
  check(aoti_torch_empty_strided(sizes.size(), sizes.data(), (strides ? *strides : dense).data(), number_of(type),
                                 aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

sizes_t sizes_of(const Tensor &t) { return sizes_t(t.sizes().begin(), t.sizes().end()); }
sizes_t strides_of(const Tensor &t) { return sizes_t(t.strides().begin(), t.strides().end()); }

void copy(const Tensor &from, const Tensor &to) { check(aoti_torch_copy_(to.get(), from.get(), 0)); }

Tensor contiguous(const Tensor &t) {
  if (t.is_contiguous()) return t;
  Tensor made = empty(sizes_of(t), t.scalar_type());
  copy(t, made);
  return made;
}

/* The same memory with other sizes and strides. */
Tensor view(const Tensor &t, const sizes_t &sizes, const sizes_t &strides) {
  AtenTensorHandle made;
  /* The offset is counted from the first element of `t`. */
  check(aoti_torch__reinterpret_tensor(t.get(), sizes.size(), sizes.data(), strides.data(), 0, &made));
  return Tensor(made);
}

/* True if the elements fill a piece of memory, in whatever order of dimensions: then it can be computed as one row. */
bool is_dense(const Tensor &t) {
  if (t.is_contiguous()) return true;
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.sizes()[d] != 1) dimensions.emplace_back(t.strides()[d], t.sizes()[d]);
  std::sort(dimensions.begin(), dimensions.end());
  int64_t expected = 1;
  for (auto [stride, size] : dimensions) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

/* `t` in another type, in the memory's order of `t` where that is dense. */
Tensor as_type(const Tensor &t, ScalarType type) {
  if (t.scalar_type() == type) return t;
  sizes_t strides = strides_of(t);
  Tensor made = empty(sizes_of(t), type, is_dense(t) ? &strides : nullptr);
  copy(t, made);
  return made;
}

/* `out` with the shape of a result, as every operation with an argument `out` gives it. */
void resize(const Tensor &out, const sizes_t &sizes) {
  if (sizes_of(out) == sizes) return;
  StableListHandle list;
  check(torch_new_list_reserve_size(sizes.size(), &list));
  for (int64_t size : sizes) check(torch_list_push_back(list, torch::stable::detail::from(size)));
  StableIValue stack[3] = {torch::stable::detail::from(out), torch::stable::detail::from(list),
                           torch::stable::detail::from(std::nullopt)};
  check(torch_call_dispatcher("aten::resize_", "", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor into(const Tensor &result, Tensor out) {
  resize(out, sizes_of(result));
  copy(result, out);
  return out;
}

void require_memory(int failed) {
  if (failed) throw std::runtime_error("there is no memory for the workspace of a portable kernel");
}

/* `body` for pieces of [0, count), each of at least `least` where there are more than one, on PyTorch's threads. */
template <typename Body>
void divided(int64_t count, int64_t least, const Body &body) {
  if (count <= 0) return;
  check(torch_parallel_for(
      0, count, std::max<int64_t>(least, 1),
      [](int64_t begin, int64_t end, void *context) { (*(const Body *)context)(begin, end); }, (void *)&body));
}

int32_t format_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return FP32;
    case ScalarType::Double: return FP64;
    case ScalarType::BFloat16: return BF16;
    default: return INT64;
  }
}

int64_t bytes_of(int32_t format) { return format == FP32 ? 4 : format == BF16 ? 2 : 8; }

void require_real(ScalarType type) {
  if (type == ScalarType::ComplexHalf || type == ScalarType::ComplexFloat || type == ScalarType::ComplexDouble)
    throw std::runtime_error("portable numerics has no complex numbers: compute with real ones, or set runtime.numerics = \"native\"");
}

void require_sizes(const Tensor &one, const Tensor &other) {
  if (sizes_of(one) != sizes_of(other)) throw std::runtime_error("the tensors of a backward pass have other shapes than their results");
}

bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::BFloat16 || type == ScalarType::Half;
}

/* The type that the elementary functions and softmax compute in: their operand's, or fp32. */
ScalarType computed_in(ScalarType type) {
  require_real(type);
  return is_floating(type) && type != ScalarType::Half ? type : ScalarType::Float;
}

/* --- products ----------------------------------------------------------------------------------------------------------------------- */

const int64_t FEWEST_TERMS = 1 << 20; /* multiply-adds for which it pays to wake a thread */

matrix matrix_of(const Tensor &t, int64_t rows, int64_t columns) {
  auto strides = t.strides();
  return {t.data_ptr(), strides[rows], columns < 0 ? 1 : strides[columns], t.scalar_type() == ScalarType::BFloat16};
}

void require_product(const Tensor &left, const Tensor &right, bool fit) {
  ScalarType type = left.scalar_type();
  if (type != right.scalar_type() || !fit)
    throw std::runtime_error("the matrices of a product do not go together: other types, or other inner sizes");
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Double)
    throw std::runtime_error(
        "portable numerics has products of fp32, bf16 and fp64 alone: convert the operands, or set runtime.numerics = \"native\"");
}

matrix part(matrix m, int64_t size, int64_t product, int64_t step, int64_t rows, int64_t columns) {
  m.at = (const char *)m.at + (product * step + rows * m.row + columns * m.column) * size;
  return m;
}

/* c (batch, m, n), whose rows are c_row elements apart. A product of one column is that of one row, turned. */
void multiply(int32_t format, int64_t batch, int64_t m, int64_t n, int64_t k, matrix a, int64_t a_step, matrix b, int64_t b_step, void *c, int64_t c_row,
              int64_t c_step) {
  if (n == 1 && m > 1 && c_row == 1) {
    std::swap(a.row, a.column), std::swap(b.row, b.column);
    return multiply(format, batch, 1, m, k, b, b_step, a, a_step, c, m, c_step);
  }
  int64_t size = bytes_of(format), terms = std::max<int64_t>(m * n * k, 1);
  auto at = [&](int64_t product, int64_t row, int64_t column) { return (char *)c + (product * c_step + row * c_row + column) * size; };
  auto compute = [&](int64_t first, int64_t count, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    matrix one = part(a, size, first, a_step, row, 0), other = part(b, size, first, b_step, 0, column);
    if (format == FP64)
      return products_fp64(count, rows, columns, k, &one, a_step, &other, b_step, (double *)at(first, row, column), c_row, c_step);
    require_memory(products(count, rows, columns, k, &one, a_step, &other, b_step, at(first, row, column), c_row, c_step, a.narrow));
  };
  if (batch > 1) /* whole products, */
    divided(batch, FEWEST_TERMS / terms, [&](int64_t first, int64_t last) { compute(first, last - first, 0, m, 0, n); });
  else if (m >= n) { /* rows, or columns, in whole tiles of products.c */
    const int64_t tile = 6;
    divided((m + tile - 1) / tile, FEWEST_TERMS / (tile * n * k + 1), [&](int64_t first, int64_t last) {
      compute(0, 1, first * tile, std::min(last * tile, m) - first * tile, 0, n);
    });
  } else {
    const int64_t tile = 16;
    divided((n + tile - 1) / tile, FEWEST_TERMS / (tile * m * k + 1), [&](int64_t first, int64_t last) {
      compute(0, 1, 0, m, first * tile, std::min(last * tile, n) - first * tile);
    });
  }
}

Tensor mm(Tensor left, Tensor right) {
  require_product(left, right, left.dim() == 2 && right.dim() == 2 && left.size(1) == right.size(0));
  int64_t m = left.size(0), n = right.size(1);
  Tensor out = empty({m, n}, left.scalar_type());
  if (m && n) multiply(format_of(left.scalar_type()), 1, m, n, left.size(1), matrix_of(left, 0, 1), 0, matrix_of(right, 0, 1), 0, out.data_ptr(), n, m * n);
  return out;
}

Tensor bmm(Tensor left, Tensor right) {
  bool fit = left.dim() == 3 && right.dim() == 3 && left.size(0) == right.size(0) && left.size(2) == right.size(1);
  require_product(left, right, fit);
  int64_t batch = left.size(0), m = left.size(1), n = right.size(2);
  Tensor out = empty({batch, m, n}, left.scalar_type());
  if (batch && m && n)
    multiply(format_of(left.scalar_type()), batch, m, n, left.size(2), matrix_of(left, 1, 2), left.stride(0), matrix_of(right, 1, 2), right.stride(0), out.data_ptr(), n,
             m * n);
  return out;
}

Tensor mv(Tensor left, Tensor right) {
  require_product(left, right, left.dim() == 2 && right.dim() == 1 && left.size(1) == right.size(0));
  int64_t m = left.size(0);
  Tensor out = empty({m}, left.scalar_type());
  if (m) multiply(format_of(left.scalar_type()), 1, m, 1, left.size(1), matrix_of(left, 0, 1), 0, matrix_of(right, 0, -1), 0, out.data_ptr(), 1, m);
  return out;
}

Tensor dot(Tensor left, Tensor right) {
  require_product(left, right, left.dim() == 1 && right.dim() == 1 && left.size(0) == right.size(0));
  Tensor out = empty({}, left.scalar_type());
  matrix row = matrix_of(left, 0, -1);
  std::swap(row.row, row.column);
  multiply(format_of(left.scalar_type()), 1, 1, 1, left.size(0), row, 0, matrix_of(right, 0, -1), 0, out.data_ptr(), 1, 1);
  return out;
}

template <Tensor (*product)(Tensor, Tensor)>
Tensor product_into(Tensor left, Tensor right, Tensor out) {
  return into(product(left, right), out);
}

/* --- attention ---------------------------------------------------------------------------------------------------------------------- */

struct attention_operands {
  int64_t shape[7];
  matrix matrices[6];
  int64_t steps[12];
};

void add_operand(attention_operands &operands, int number, const Tensor &t) {
  operands.matrices[number] = matrix_of(t, 2, 3);
  operands.steps[2 * number] = t.stride(0);
  operands.steps[2 * number + 1] = t.stride(1);
}

attention_operands operands_of(const Tensor &query, const Tensor &key, const Tensor &value, const std::optional<Tensor> &bias,
                               double dropout) {
  if (dropout != 0)
    throw std::runtime_error("portable numerics has attention without dropout: leave it out, or set runtime.numerics = \"native\"");
  bool fit = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && key.size(1) > 0 && query.size(1) % key.size(1) == 0 &&
             key.size(1) == value.size(1) && key.size(2) == value.size(2) && query.size(0) == key.size(0) && key.size(0) == value.size(0);
  if (query.scalar_type() == ScalarType::Double)
    throw std::runtime_error("portable numerics has attention of fp32 and bf16 alone: convert the operands, or set runtime.numerics = \"native\"");
  if (fit) require_product(key, value, true);
  require_product(query, key, fit && query.size(3) == key.size(3));
  attention_operands operands{};
  int64_t shape[7] = {query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), value.size(3)};
  std::copy(shape, shape + 7, operands.shape);
  add_operand(operands, 0, query);
  add_operand(operands, 1, key);
  add_operand(operands, 2, value);
  if (bias) { /* of one or two dimensions, or with some of size one, as PyTorch spreads them */
    if (bias->dim() > 4) throw std::runtime_error("the mask of an attention has another shape");
    int64_t whole[4] = {shape[0], shape[1], shape[3], shape[4]}, strides[4] = {0, 0, 0, 0};
    for (int64_t d = 0; d < bias->dim(); d++) {
      int64_t place = 4 - bias->dim() + d;
      if (bias->size(d) != 1 && bias->size(d) != whole[place]) throw std::runtime_error("the mask of an attention has another shape");
      strides[place] = bias->size(d) == 1 ? 0 : bias->stride(d);
    }
    operands.matrices[3] = {bias->data_ptr(), strides[2], strides[3], bias->scalar_type() == ScalarType::BFloat16};
    operands.steps[6] = strides[0], operands.steps[7] = strides[1];
  }
  return operands;
}

float factor_of(const Tensor &query, const std::optional<double> &scale) {
  return (float)(scale ? *scale : 1 / std::sqrt((double)query.size(3)));
}

/* Autograd passes a mask that was not given as one that is not defined. */
std::optional<Tensor> added_to_scores(const std::optional<Tensor> &mask) {
  if (!mask || !mask->defined()) return std::nullopt;
  if (mask->scalar_type() != ScalarType::BFloat16) return as_type(*mask, ScalarType::Float);
  return mask;
}

std::tuple<Tensor, Tensor> attend(Tensor query, Tensor key, Tensor value, double dropout, bool causal, std::optional<Tensor> mask,
                                  std::optional<double> scale) {
  auto bias = added_to_scores(mask);
  attention_operands o = operands_of(query, key, value, bias, dropout);
  int64_t batch = o.shape[0], heads = o.shape[1], queries = o.shape[3], width = o.shape[6];
  sizes_t strides = {queries * heads * width, width, heads * width, 1}; /* heads of a token lie side by side */
  Tensor out = empty({batch, heads, queries, width}, query.scalar_type(), &strides);
  Tensor log_sums = empty({batch, heads, queries}, ScalarType::Float);
  void *to = out.data_ptr();
  float *sums = (float *)log_sums.data_ptr(), factor = factor_of(query, scale);
  int32_t narrow = query.scalar_type() == ScalarType::BFloat16;
  int64_t terms = queries * o.shape[4] * (o.shape[5] + width) + 1;
  divided(batch * heads, FEWEST_TERMS / terms, [&](int64_t first, int64_t last) {
    require_memory(attention(o.shape, o.matrices, o.steps, factor, causal, to, narrow, sums, first, last));
  });
  return {out, log_sums};
}

std::tuple<Tensor, Tensor, Tensor> attend_backward(Tensor slope, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums,
                                                   double dropout, bool causal, std::optional<Tensor> mask, std::optional<double> scale) {
  auto bias = added_to_scores(mask);
  attention_operands o = operands_of(query, key, value, bias, dropout);
  require_product(slope, out, true);
  require_sizes(slope, out);
  if (out.dim() != 4 || out.size(0) != o.shape[0] || out.size(1) != o.shape[1] || out.size(2) != o.shape[3] || out.size(3) != o.shape[6] ||
      log_sums.numel() != o.shape[0] * o.shape[1] * o.shape[3])
    throw std::runtime_error("the tensors of an attention's backward pass have other shapes than its results");
  add_operand(o, 4, slope);
  add_operand(o, 5, out);
  Tensor of_query = empty(sizes_of(query), query.scalar_type()), of_key = empty(sizes_of(key), query.scalar_type()),
         of_value = empty(sizes_of(value), query.scalar_type()), sums = contiguous(log_sums);
  float factor = factor_of(query, scale);
  int32_t narrow = query.scalar_type() == ScalarType::BFloat16;
  int64_t terms = o.shape[1] / o.shape[2] * o.shape[3] * o.shape[4] * (3 * o.shape[5] + 2 * o.shape[6]) + 1;
  void *to[3] = {of_query.data_ptr(), of_key.data_ptr(), of_value.data_ptr()};
  const float *logs = (const float *)sums.data_ptr();
  divided(o.shape[0] * o.shape[2], FEWEST_TERMS / terms, [&](int64_t first, int64_t last) {
    require_memory(attention_backward(o.shape, o.matrices, o.steps, factor, causal, logs, to[0], to[1], to[2], narrow, first, last));
  });
  return {of_query, of_key, of_value};
}

/* --- elementary functions ----------------------------------------------------------------------------------------------------------- */

const int64_t FEWEST_NUMBERS = 1 << 14; /* for which it pays to wake a thread */

void apply(int32_t function, int32_t format, const void *from, void *to, int64_t count) {
  int64_t size = bytes_of(format);
  divided(count, FEWEST_NUMBERS, [&](int64_t first, int64_t last) {
    const char *x = (const char *)from + first * size;
    char *y = (char *)to + first * size;
    if (format == FP32) function_fp32(function, (const float *)x, (float *)y, last - first);
    else if (format == FP64) function_fp64(function, (const double *)x, (double *)y, last - first);
    else function_bf16(function, (const uint16_t *)x, (uint16_t *)y, last - first);
  });
}

/* f(x), in the memory's order of x; of integers and booleans in fp32. */
Tensor applied(int32_t function, const Tensor &x) {
  ScalarType type = computed_in(x.scalar_type());
  Tensor from = as_type(x, type);
  if (!is_dense(from)) from = contiguous(from);
  sizes_t strides = strides_of(from);
  Tensor out = empty(sizes_of(from), type, &strides);
  apply(function, format_of(type), from.data_ptr(), out.data_ptr(), from.numel());
  return x.scalar_type() == ScalarType::Half ? as_type(out, ScalarType::Half) : out;
}

template <int function>
Tensor unary(Tensor x) {
  return applied(function, x);
}

template <int function>
Tensor unary_into(Tensor x, Tensor out) {
  return into(applied(function, x), out);
}

template <int function>
Tensor unary_in_place(Tensor x) {
  if (!is_floating(x.scalar_type())) throw std::runtime_error("a result of fp32 cannot be put in the place of integers");
  if (computed_in(x.scalar_type()) == x.scalar_type() && is_dense(x)) {
    apply(function, format_of(x.scalar_type()), x.data_ptr(), x.data_ptr(), x.numel());
    return x;
  }
  copy(applied(function, x), x);
  return x;
}

/* The handle is read here, since PyTorch 2.13's own conversion to a string leaks it. */
int32_t gelu_kind(StringHandle handle, int32_t exact, int32_t by_tanh) {
  const char *characters;
  size_t length;
  check(torch_string_length(handle, &length));
  check(torch_string_c_str(handle, &characters));
  const std::string approximate(characters, length);
  check(torch_delete_string(handle));
  if (approximate != "none" && approximate != "tanh") throw std::runtime_error("the approximation of gelu is \"none\" or \"tanh\"");
  return approximate == "none" ? exact : by_tanh;
}

Tensor gelu(Tensor x, StringHandle approximate) { return applied(gelu_kind(approximate, FUNCTION_GELU, FUNCTION_GELU_TANH), x); }

Tensor gelu_into(Tensor x, StringHandle approximate, Tensor out) { return into(gelu(x, approximate), out); }

Tensor gelu_in_place(Tensor x, StringHandle approximate) {
  copy(gelu(x, approximate), x);
  return x;
}

/* The slope of a function's input; `at` is the input, or the result, as slopes.c has it. */
Tensor slope_of(int32_t function, const Tensor &slope, const Tensor &at) {
  ScalarType type = computed_in(at.scalar_type());
  Tensor g = as_type(slope, type), x = as_type(at, type);
  require_sizes(g, x);
  if (strides_of(g) != strides_of(x) || !is_dense(x)) g = contiguous(g), x = contiguous(x);
  sizes_t strides = strides_of(x);
  Tensor out = empty(sizes_of(x), type, &strides);
  int32_t format = format_of(type);
  int64_t size = bytes_of(format);
  const char *from[2] = {(const char *)g.data_ptr(), (const char *)x.data_ptr()};
  char *to = (char *)out.data_ptr();
  divided(x.numel(), FEWEST_NUMBERS, [&](int64_t first, int64_t last) {
    slopes(format, function, from[0] + first * size, from[1] + first * size, to + first * size, last - first);
  });
  return at.scalar_type() == ScalarType::Half ? as_type(out, ScalarType::Half) : out;
}

template <int function>
Tensor slope(Tensor slope, Tensor at) {
  return slope_of(function, slope, at);
}

template <int function>
Tensor slope_into(Tensor slope, Tensor at, Tensor out) {
  return into(slope_of(function, slope, at), out);
}

Tensor gelu_slope(Tensor slope, Tensor x, StringHandle approximate) {
  return slope_of(gelu_kind(approximate, FUNCTION_GELU_SLOPE, FUNCTION_GELU_TANH_SLOPE), slope, x);
}

Tensor gelu_slope_into(Tensor slope, Tensor x, StringHandle approximate, Tensor out) {
  return into(gelu_slope(slope, x, approximate), out);
}

/* --- sums and softmax --------------------------------------------------------------------------------------------------------------- */

/* `t` with its dimensions in another order. */
Tensor permuted(const Tensor &t, const sizes_t &order) {
  sizes_t sizes, strides;
  for (int64_t d : order) sizes.push_back(t.size(d)), strides.push_back(t.stride(d));
  return view(t, sizes, strides);
}

/* The sums of `outer` matrices (reduced, inner), one below the other: of rows, if `inner` is 1, else of columns. */
void sum_matrices(int32_t format, const void *from, void *to, int64_t outer, int64_t reduced, int64_t inner) {
  int64_t size = bytes_of(format);
  const char *source = (const char *)from;
  char *target = (char *)to;
  if (inner == 1 && outer == 1 && reduced > PIECE) { /* one long row: threads take its pieces */
    int64_t pieces = (reduced + PIECE - 1) / PIECE;
    std::vector<double> sums(pieces);
    divided(pieces, 8, [&](int64_t first, int64_t last) { piece_sums(format, from, reduced, sums.data(), first, last); });
    added_pieces(format, sums.data(), pieces, to);
  } else if (inner == 1) {
    divided(outer, 4 * FEWEST_NUMBERS / reduced, [&](int64_t first, int64_t last) {
      row_sums(format, source + first * reduced * size, target + first * size, last - first, reduced);
    });
  } else if (outer > 1) {
    divided(outer, 4 * FEWEST_NUMBERS / (reduced * inner), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++)
        column_sums(format, source + i * reduced * inner * size, target + i * inner * size, reduced, inner, 0, inner);
    });
  } else {
    divided(inner, std::max<int64_t>(64, 4 * FEWEST_NUMBERS / reduced),
            [&](int64_t first, int64_t last) { column_sums(format, from, to, reduced, inner, first, last); });
  }
}

/* The sum over dimensions, all of them where none are named. */
Tensor summed(const Tensor &t, const std::optional<sizes_t> &dimensions, bool keep, const std::optional<ScalarType> &wanted) {
  ScalarType type = wanted ? *wanted : is_floating(t.scalar_type()) ? t.scalar_type() : ScalarType::Long;
  require_real(t.scalar_type()), require_real(type);
  ScalarType added_as = type == ScalarType::Half ? ScalarType::Float : is_floating(type) ? type : ScalarType::Long;
  Tensor x = as_type(as_type(t, type), added_as); /* of booleans, too, as many as are true */
  int64_t count = x.dim();
  std::vector<bool> is_reduced(count, !dimensions || dimensions->empty());
  if (dimensions)
    for (int64_t d : *dimensions)
      if (count) is_reduced.at(d < 0 ? d + count : d) = true;
  sizes_t sizes, order;
  int64_t reduced = 1, inner = 1, outer = 1, last = -1;
  for (int64_t d = 0; d < count; d++) {
    if (is_reduced[d]) reduced *= x.size(d), last = d;
    if (!is_reduced[d] || keep) sizes.push_back(is_reduced[d] ? 1 : x.size(d));
  }
  /* kept dimensions, then those that are reduced, then kept ones behind the last of them */
  for (int64_t d = 0; d < last; d++)
    if (!is_reduced[d]) order.push_back(d), outer *= x.size(d);
  for (int64_t d = 0; d < count; d++)
    if (is_reduced[d]) order.push_back(d);
  for (int64_t d = last + 1; d < count; d++)
    if (!is_reduced[d]) order.push_back(d), inner *= x.size(d);
  Tensor out = empty(sizes, added_as);
  if (out.numel() && reduced) {
    Tensor laid_out = contiguous(permuted(x, order));
    sum_matrices(format_of(added_as), laid_out.data_ptr(), out.data_ptr(), outer, reduced, inner);
  } else {
    std::memset(out.data_ptr(), 0, out.numel() * bytes_of(format_of(added_as)));
  }
  return as_type(out, type);
}

Tensor sum(Tensor t, std::optional<ScalarType> type) { return summed(t, std::nullopt, false, type); }

Tensor sum_over(Tensor t, std::optional<sizes_t> dimensions, bool keep, std::optional<ScalarType> type) {
  return summed(t, dimensions, keep, type);
}

Tensor sum_over_into(Tensor t, std::optional<sizes_t> dimensions, bool keep, std::optional<ScalarType> type, Tensor out) {
  return into(summed(t, dimensions, keep, type ? type : std::optional<ScalarType>(out.scalar_type())), out);
}

/* `compute(tensors, width)` with the dimension moved to the end, and its result moved back. */
template <typename Compute>
Tensor along(std::vector<Tensor> tensors, int64_t dimension, const Compute &compute) {
  int64_t count = tensors[0].dim(), last = count - 1;
  if (count == 0) return compute(tensors);
  int64_t d = dimension < 0 ? dimension + count : dimension;
  sizes_t order(count);
  std::iota(order.begin(), order.end(), 0);
  std::swap(order.at(d), order.at(last));
  for (Tensor &t : tensors) t = contiguous(d == last ? t : permuted(t, order));
  Tensor out = compute(tensors);
  return d == last ? out : contiguous(permuted(out, order));
}

int64_t width_of(const Tensor &t) { return t.dim() ? t.size(t.dim() - 1) : 1; }

Tensor softmax_along(const Tensor &x, int64_t dimension, bool widen, bool logarithm) {
  ScalarType type = widen ? ScalarType::Float : computed_in(x.scalar_type());
  Tensor out = along({as_type(x, type)}, dimension, [&](const std::vector<Tensor> &operands) {
    const Tensor &rows = operands[0];
    Tensor result = empty(sizes_of(rows), type);
    int64_t width = width_of(rows), size = bytes_of(format_of(type));
    const char *from = (const char *)rows.data_ptr();
    char *to = (char *)result.data_ptr();
    divided(width ? rows.numel() / width : 0, FEWEST_NUMBERS / std::max<int64_t>(width, 1), [&](int64_t first, int64_t last) {
      int64_t at = first * width * size;
      require_memory(softmax_rows(format_of(type), logarithm, from + at, to + at, last - first, width));
    });
    return result;
  });
  return x.scalar_type() == ScalarType::Half && !widen ? as_type(out, ScalarType::Half) : out;
}

Tensor softmax_slope_along(const Tensor &slope, const Tensor &result, int64_t dimension, ScalarType wanted, bool logarithm) {
  ScalarType type = computed_in(result.scalar_type());
  require_sizes(slope, result);
  Tensor out = along({as_type(slope, type), as_type(result, type)}, dimension, [&](const std::vector<Tensor> &operands) {
    Tensor made = empty(sizes_of(operands[0]), type);
    int64_t width = width_of(made), size = bytes_of(format_of(type));
    const char *g = (const char *)operands[0].data_ptr(), *y = (const char *)operands[1].data_ptr();
    char *to = (char *)made.data_ptr();
    divided(width ? made.numel() / width : 0, FEWEST_NUMBERS / std::max<int64_t>(width, 1), [&](int64_t first, int64_t last) {
      int64_t at = first * width * size;
      require_memory(softmax_slopes(format_of(type), logarithm, g + at, y + at, to + at, last - first, width));
    });
    return made;
  });
  return as_type(out, wanted);
}

template <bool logarithm>
Tensor softmax(Tensor x, int64_t dimension, bool widen) {
  return softmax_along(x, dimension, widen, logarithm);
}

template <bool logarithm>
Tensor softmax_into(Tensor x, int64_t dimension, bool widen, Tensor out) {
  return into(softmax_along(x, dimension, widen, logarithm), out);
}

template <bool logarithm>
Tensor softmax_slope(Tensor slope, Tensor result, int64_t dimension, ScalarType type) {
  return softmax_slope_along(slope, result, dimension, type, logarithm);
}

template <bool logarithm>
Tensor softmax_slope_into(Tensor slope, Tensor result, int64_t dimension, ScalarType type, Tensor out) {
  return into(softmax_slope_along(slope, result, dimension, type, logarithm), out);
}

/* --- registration ------------------------------------------------------------------------------------------------------------------- */

struct entry {
  const char *name;
  void (*kernel)(StableIValue *, uint64_t, uint64_t);
};

#define UNARY(name, function)                                                            \
  {name, TORCH_BOX(&unary<function>)}, {name "_", TORCH_BOX(&unary_in_place<function>)}, \
  {name ".out", TORCH_BOX(&unary_into<function>)}
#define SLOPE(name, function) {name, TORCH_BOX(&slope<function>)}, {name ".grad_input", TORCH_BOX(&slope_into<function>)}

const entry ENTRIES[] = {
    {"mm", TORCH_BOX(&mm)},
    {"mm.out", TORCH_BOX(&product_into<mm>)},
    {"bmm", TORCH_BOX(&bmm)},
    {"bmm.out", TORCH_BOX(&product_into<bmm>)},
    {"mv", TORCH_BOX(&mv)},
    {"mv.out", TORCH_BOX(&product_into<mv>)},
    {"dot", TORCH_BOX(&dot)},
    {"dot.out", TORCH_BOX(&product_into<dot>)},
    {"_scaled_dot_product_flash_attention_for_cpu", TORCH_BOX(&attend)},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_BOX(&attend_backward)},
    UNARY("exp", FUNCTION_EXP),
    UNARY("expm1", FUNCTION_EXPM1),
    UNARY("exp2", FUNCTION_EXP2),
    UNARY("log", FUNCTION_LOG),
    UNARY("log1p", FUNCTION_LOG1P),
    UNARY("log2", FUNCTION_LOG2),
    UNARY("log10", FUNCTION_LOG10),
    UNARY("sigmoid", FUNCTION_SIGMOID),
    UNARY("silu", FUNCTION_SILU),
    UNARY("tanh", FUNCTION_TANH),
    UNARY("erf", FUNCTION_ERF),
    UNARY("sin", FUNCTION_SIN),
    UNARY("cos", FUNCTION_COS),
    UNARY("sqrt", FUNCTION_SQRT),
    UNARY("rsqrt", FUNCTION_RSQRT),
    {"gelu", TORCH_BOX(&gelu)},
    {"gelu.out", TORCH_BOX(&gelu_into)},
    {"gelu_", TORCH_BOX(&gelu_in_place)},
    {"gelu_backward", TORCH_BOX(&gelu_slope)},
    {"gelu_backward.grad_input", TORCH_BOX(&gelu_slope_into)},
    SLOPE("sigmoid_backward", FUNCTION_SIGMOID),
    SLOPE("tanh_backward", FUNCTION_TANH),
    SLOPE("silu_backward", FUNCTION_SILU_SLOPE),
    {"sum", TORCH_BOX(&sum)},
    {"sum.dim_IntList", TORCH_BOX(&sum_over)},
    {"sum.IntList_out", TORCH_BOX(&sum_over_into)},
    {"_softmax", TORCH_BOX(&softmax<false>)},
    {"_softmax.out", TORCH_BOX(&softmax_into<false>)},
    {"_log_softmax", TORCH_BOX(&softmax<true>)},
    {"_log_softmax.out", TORCH_BOX(&softmax_into<true>)},
    {"_softmax_backward_data", TORCH_BOX(&softmax_slope<false>)},
    {"_softmax_backward_data.out", TORCH_BOX(&softmax_slope_into<false>)},
    {"_log_softmax_backward_data", TORCH_BOX(&softmax_slope<true>)},
    {"_log_softmax_backward_data.out", TORCH_BOX(&softmax_slope_into<true>)},
};

}  // namespace

/* The names of the operations that have kernels here, by number; NULL behind the last. */
extern "C" const char *kernel_name(int64_t number) {
  return number < (int64_t)(sizeof ENTRIES / sizeof *ENTRIES) ? ENTRIES[number].name : nullptr;
}

/* Registers all kernels for operations of a namespace on CPUs, until they are withdrawn. Returns NULL if PyTorch refuses one. */
extern "C" void *register_kernels(const char *name_space) {
  TorchLibraryHandle registered;
  if (aoti_torch_library_init_impl(name_space, "CPU", __FILE__, __LINE__, &registered)) return nullptr;
  for (const entry &e : ENTRIES)
    if (torch_library_impl(registered, e.name, e.kernel, TORCH_ABI_VERSION)) return nullptr;
  return registered;
}

/* Takes back what register_kernels has returned: the operations have the kernels that they had before. */
extern "C" void withdraw_kernels(void *registered) { aoti_torch_delete_library_object((TorchLibraryHandle)registered); }
