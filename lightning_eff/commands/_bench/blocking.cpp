// C = A * B in float32, by rows: A [m, k], B [k, n], C [m, n]. blocking.py compiles, checks and times it.
#include <cstdint>
#include <cstring>

using Int = std::int64_t;
typedef float Row __attribute__((vector_size(64)));

constexpr int COLUMNS = 16;  // of a tile: those of a Row; n is a multiple of it
#ifdef __AVX512F__
constexpr int ROWS = 8;  // m is a multiple of it
#else
constexpr int ROWS = 4;  // a Row takes several registers
#endif

static Int least(Int x, Int y) { return x < y ? x : y; }

extern "C" {

extern const Int tile_rows = ROWS;

void three_loops(const float* a, const float* b, float* c, Int m, Int n, Int k) {
  for (Int i = 0; i < m; ++i)
    for (Int j = 0; j < n; ++j) {
      float sum = 0;
      for (Int l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
      c[i * n + j] = sum;
    }
}

// One block [depth, width] of B after another, each for all rows of A. The innermost loop is along rows.
void blocked(const float* a, const float* b, float* __restrict c, Int m, Int n, Int k, Int depth, Int width) {
  std::memset(c, 0, sizeof(float) * m * n);
  for (Int j0 = 0; j0 < n; j0 += width)
    for (Int l0 = 0; l0 < k; l0 += depth)
      for (Int i = 0; i < m; ++i)
        for (Int l = l0; l < least(l0 + depth, k); ++l)
          for (Int j = j0; j < least(j0 + width, n); ++j) c[i * n + j] += a[i * k + l] * b[l * n + j];
}

// One tile [ROWS, COLUMNS] of C after another, summed in registers. `panel`: a copy of B [depth, COLUMNS].
void tiled(const float* a, const float* b, float* __restrict c, Int m, Int n, Int k, Int depth, float* panel) {
  std::memset(c, 0, sizeof(float) * m * n);
  for (Int l0 = 0; l0 < k; l0 += depth)
    for (Int j = 0; j < n; j += COLUMNS) {
      const Int length = least(depth, k - l0);
      for (Int l = 0; l < length; ++l) std::memcpy(panel + l * COLUMNS, b + (l0 + l) * n + j, sizeof(Row));
      for (Int i = 0; i < m; i += ROWS) {
        Row tile[ROWS] = {};
        for (Int l = 0; l < length; ++l) {
          Row row;
          std::memcpy(&row, panel + l * COLUMNS, sizeof(Row));
          for (int r = 0; r < ROWS; ++r) tile[r] += a[(i + r) * k + l0 + l] * row;
        }
        for (int r = 0; r < ROWS; ++r)
          for (int x = 0; x < COLUMNS; ++x) c[(i + r) * n + j + x] += tile[r][x];
      }
    }
}

}  // extern "C"
