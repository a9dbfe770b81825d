/* What a generation step does with few rows: products with matrices, y = x w^T, and norms; in fp32.

   Compiled on the machine by moe_tp/parallel/few_rows.py; the plain forms are
   torch.nn.functional.linear and rms_norm.
   The weights are read once from memory, whatever the number of rows, and the next ones fetched
   meanwhile. An element of y is summed by one thread in one order, which depends neither on the
   number of rows nor on that of threads. */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(64)));
typedef float loose_lanes __attribute__((vector_size(64), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint32_t loose_bits __attribute__((vector_size(64), aligned(2)));

enum { AT_ONCE_float = 16, AT_ONCE_bf16 = 32 };

static inline float wide_float(float x) { return x; }
static inline float narrow_float(float x) { return x; }

static inline float wide_bf16(bf16 x) {
    uint32_t whole = (uint32_t)x << 16;
    float y;
    memcpy(&y, &whole, 4);
    return y;
}

/* to nearest, ties to even; NaN stays NaN */
static inline bf16 narrow_bf16(float x) {
    uint32_t whole;
    memcpy(&whole, &x, 4);
    uint32_t rounded = (whole + 0x7fff + ((whole >> 16) & 1)) >> 16;
    return (whole & 0x7fffffff) > 0x7f800000 ? (bf16)0x7fc0 : (bf16)rounded;
}

/* 64 bytes of elements, and what a sum takes of their products */
typedef lanes some_float;
static inline lanes load_float(const float *p) { return *(const loose_lanes *)p; }
static inline lanes add_float(lanes total, lanes x, lanes w) { return total + x * w; }

#ifdef __AVX512BF16__
typedef __m512bh some_bf16;
static inline some_bf16 load_bf16(const bf16 *p) { return (some_bf16)_mm512_loadu_si512(p); }
static inline lanes add_bf16(lanes total, some_bf16 x, some_bf16 w) {
    return (lanes)_mm512_dpbf16_ps((__m512)total, x, w);
}
#else
typedef struct { lanes odd, even; } some_bf16;
static inline some_bf16 load_bf16(const bf16 *p) {
    bits both = *(const loose_bits *)p;
    return (some_bf16){(lanes)(both & 0xffff0000u), (lanes)(both << 16)};
}
static inline lanes add_bf16(lanes total, some_bf16 x, some_bf16 w) {
    return total + x.odd * w.odd + x.even * w.even;
}
#endif

/* in pairs */
static float sum(const float *v) {
    float half[8], quarter[4];
    for (int i = 0; i < 8; i++) half[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) quarter[i] = half[i] + half[i + 4];
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

#define EACH(i, n) _Pragma("GCC unroll 4") for (int i = 0; i < n; i++)

/* `rows` of x and y with `count` rows of w, both known when compiled: as many sums as registers */
#define BLOCK(T)                                                                                   \
    static inline __attribute__((always_inline)) void block_##T(                                   \
        const T *x, const T *w, T *y, int64_t k, int64_t m, int rows, int count) {                 \
        lanes total[4][4] = {0};                                                                   \
        int64_t i = 0;                                                                             \
        for (; i + AT_ONCE_##T <= k; i += AT_ONCE_##T) {                                           \
            some_##T part[4];                                                                      \
            EACH(j, count) part[j] = load_##T(w + j * k + i);                                      \
            EACH(j, count) __builtin_prefetch(w + (j + 4) * k + i);                                \
            EACH(r, rows) {                                                                        \
                some_##T one = load_##T(x + r * k + i);                                            \
                EACH(j, count) total[r][j] = add_##T(total[r][j], one, part[j]);                   \
            }                                                                                      \
        }                                                                                          \
        float kept[4][4][16];                                                                      \
        EACH(r, rows) EACH(j, count) memcpy(kept[r][j], &total[r][j], sizeof(lanes));              \
        finish_##T(x, w, y, i, k, m, rows, count, kept);                                           \
    }

/* adds what is left past column `i` */
#define FINISH(T)                                                                                  \
    static __attribute__((noinline)) void finish_##T(const T *x, const T *w, T *y, int64_t i,      \
                                                     int64_t k, int64_t m, int rows, int count,    \
                                                     float kept[4][4][16]) {                       \
        for (int r = 0; r < rows; r++)                                                             \
            for (int j = 0; j < count; j++) {                                                      \
                float whole = sum(kept[r][j]);                                                     \
                for (int64_t at = i; at < k; at++)                                                 \
                    whole += wide_##T(x[r * k + at]) * wide_##T(w[j * k + at]);                    \
                y[r * m + j] = narrow_##T(whole);                                                  \
            }                                                                                      \
    }

/* `rows` (4, 2 or 1) of x and y with `count` (up to 4) rows of w */
#define STRIP(T)                                                                                   \
    static void strip_##T(const T *x, const T *w, T *y, int64_t k, int64_t m, int rows,            \
                          int count) {                                                             \
        if (count == 4 && rows == 4) block_##T(x, w, y, k, m, 4, 4);                               \
        else if (count == 4 && rows == 2) block_##T(x, w, y, k, m, 2, 4);                          \
        else if (count == 4) block_##T(x, w, y, k, m, 1, 4);                                       \
        else                                                                                       \
            for (int r = 0; r < rows; r++)                                                         \
                for (int j = 0; j < count; j++)                                                    \
                    block_##T(x + r * k, w + j * k, y + r * m + j, k, m, 1, 1);                    \
    }

/* Group g: the rows [start[g], start[g + 1]) of x and y, and matrix slot[g] of w [., m, k]. */
#define PRODUCTS(T)                                                                                \
    FINISH(T)                                                                                      \
    BLOCK(T)                                                                                       \
    STRIP(T)                                                                                       \
    void moe_tp_rows_##T(const T *x, const T *w, T *y, const int64_t *slot, const int64_t *start,  \
                         int64_t groups, int64_t k, int64_t m, int threads) {                      \
        int64_t strips = (m + 3) / 4;                                                              \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")         \
        for (int64_t task = 0; task < groups * strips; task++) {                                   \
            int64_t g = task / strips, j = task % strips * 4, r = start[g], end = start[g + 1];    \
            const T *strip = w + (slot[g] * m + j) * k;                                            \
            for (int64_t now; r < end; r += now) {                                                 \
                now = end - r >= 4 ? 4 : end - r >= 2 ? 2 : 1;                                     \
                strip_##T(x + r * k, strip, y + r * m + j, k, m, now, m - j < 4 ? m - j : 4);      \
            }                                                                                      \
        }                                                                                          \
    }

PRODUCTS(float)
PRODUCTS(bf16)

/* y = x / sqrt(mean(x^2) + eps) * w, each of `rows` by itself (arXiv:1910.07467, equation 4) */
#define NORM(T)                                                                                    \
    void moe_tp_norm_##T(const T *x, const float *w, T *y, int64_t rows, int64_t k, double eps) {  \
        for (int64_t r = 0; r < rows; r++, x += k, y += k) {                                       \
            float square[16] = {0}, rest = 0;                                                      \
            int64_t i = 0;                                                                         \
            for (; i + 16 <= k; i += 16)                                                           \
                for (int j = 0; j < 16; j++) square[j] += wide_##T(x[i + j]) * wide_##T(x[i + j]); \
            for (; i < k; i++) rest += wide_##T(x[i]) * wide_##T(x[i]);                            \
            float scale = (float)(1 / __builtin_sqrt((sum(square) + rest) / (double)k + eps));     \
            for (i = 0; i < k; i++) y[i] = narrow_##T(wide_##T(x[i]) * scale * w[i]);              \
        }                                                                                          \
    }

NORM(float)
NORM(bf16)
