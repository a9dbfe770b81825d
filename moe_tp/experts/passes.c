/* SwiGLU of bf16 rows, forward and backward, in one pass each: bf16 in and out, fp32 between.

   Compiled on the machine by moe_tp/experts/compiled.py; the plain form is SwiGLU in
   moe_tp/experts/activation.py (arXiv:2002.05202, eq. 6). Every row is worked out by one thread in
   one order, so that results depend neither on the number of threads nor on the run. A row of
   gate_up holds F gates, then F ups; 16 numbers are worked out at a time, and the rest of a row as
   if zeros followed. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef bf16 halves __attribute__((vector_size(2 * LANES)));

INLINE floats all(float x) { return (floats){} + x; }

INLINE floats pick(words mask, floats yes, floats no) {
    return (floats)(((words)yes & mask) | ((words)no & ~mask));
}

/* the first `count` of the numbers at x, zeros after them */
INLINE floats load(const bf16 *x, int64_t count) {
    halves bits = {};
    memcpy(&bits, x, count < LANES ? count * sizeof(bf16) : sizeof bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

/* To nearest, ties to even; NaN stays NaN. The processor's own instruction makes numbers below
   2^-126 zero; it stands here by name because the header of intrinsics takes 0.1 s to compile. */
INLINE halves narrow(floats x) {
#ifdef __AVX512BF16__
    halves rounded;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
    return rounded;
#else
    words bits = (words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words nan = (words)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
#endif
}

INLINE void store(bf16 *y, floats x, int64_t count) {
    halves bits = narrow(x);
    memcpy(y, &bits, count < LANES ? count * sizeof(bf16) : sizeof bits);
}

/* 1 / (1 + exp(-x)), to some 1e-7; exp by a polynomial on [-ln 2 / 2, ln 2 / 2] */
INLINE floats sigmoid(floats x) {
    floats z = -x;
    z = pick((words)(z > 88.0f), all(88.0f), z);
    z = pick((words)(z < -87.0f), all(-87.0f), z);
    /* adding 1.5 * 2^23 rounds to a whole number, which then lies in the low bits */
    floats shifted = z * 1.44269504f + 12582912.0f;
    floats whole = shifted - 12582912.0f;
    floats r = z - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    floats p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    floats scale = (floats)(((words)shifted + 127) << 23);
    return 1.0f / (1.0f + p * scale);
}

/* the derivative of silu, from sigmoid and silu */
INLINE floats slope(floats s, floats silu) { return s + silu * (1.0f - s); }

/* The lanes of one row from `i` on; `count` is a constant where all of them are there, so that what
   is loaded and stored are whole vectors. */
INLINE void forward_lanes(const bf16 *gate, const bf16 *up, bf16 *out, int64_t i, int64_t count) {
    floats g = load(gate + i, count);
    store(out + i, g * sigmoid(g) * load(up + i, count), count);
}

/* the same backward; returns their terms of the weight's gradient */
INLINE floats backward_lanes(const bf16 *dy, const bf16 *gate, float w, bf16 *out, bf16 *d_gate,
                             int64_t size, int64_t i, int64_t count) {
    floats d = load(dy + i, count), g = load(gate + i, count), u = load(gate + size + i, count);
    floats s = sigmoid(g), silu = g * s, act = silu * u, dw = d * w;
    store(out + i, w * act, count);
    store(d_gate + size + i, dw * silu, count);
    store(d_gate + i, dw * u * slope(s, silu), count);
    return d * act;
}

/* hidden = silu(gate) * up */
void moe_tp_swiglu(const bf16 *gate_up, bf16 *hidden, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *gate = gate_up + 2 * row * size, *up = gate + size;
        bf16 *out = hidden + row * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) forward_lanes(gate, up, out, i, LANES);
        if (i < size) forward_lanes(gate, up, out, i, size - i);
    }
}

/* Backward of weight * silu(gate) * up: hidden is that value, d_weight the sum over a row of
   grad * silu(gate) * up. */
void moe_tp_swiglu_backward(const bf16 *grad, const bf16 *gate_up, const float *weight,
                            bf16 *hidden, bf16 *d_gate_up, float *d_weight, int64_t rows,
                            int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *dy = grad + row * size, *gate = gate_up + 2 * row * size;
        bf16 *out = hidden + row * size, *d_gate = d_gate_up + 2 * row * size;
        float w = weight[row], sum = 0;
        floats total = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            total += backward_lanes(dy, gate, w, out, d_gate, size, i, LANES);
        if (i < size) total += backward_lanes(dy, gate, w, out, d_gate, size, i, size - i);
        for (int lane = 0; lane < LANES; lane++) sum += total[lane];
        d_weight[row] = sum;
    }
}

/* The same where gate_up lies turned: of each expert 2F rows, as long as it has rows itself. So
   products that are quickest with AMX leave and take it. Tiles of 32 rows and 32 columns are
   turned in registers, half of the rows at a time: a tile's column is a line of memory. Lines that
   far apart no processor fetches by itself, so each is asked for some columns before its turn. */

#define COLUMNS (2 * LANES)
#define ROWS (2 * LANES)
#define AHEAD 16 /* columns */
typedef struct { int64_t rows, size; } shape; /* of an expert: its rows, F */

extern int omp_get_thread_num(void), omp_get_num_threads(void);

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* how many of so many rows are in one half of a tile */
INLINE int64_t in_half(int64_t rows, int half) {
    return half == 0 ? least(rows, LANES) : rows > LANES ? rows - LANES : 0;
}

INLINE words shuffled(words a, words b, words from) {
#ifdef __clang__
    words made;
    for (int j = 0; j < LANES; j++) made[j] = from[j] < LANES ? a[from[j]] : b[from[j] - LANES];
    return made;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* rows become columns: one bit of both numbers changes places at a time */
INLINE void turn(words v[LANES]) {
    const words lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int bit = LANES / 2; bit; bit /= 2) {
        words high = (words)((lane & bit) != 0);
        words low_from = (high & (lane + LANES - bit)) | (~high & lane);
        words high_from = (high & (lane + LANES)) | (~high & (lane + bit));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & bit) continue;
            words a = v[i], b = v[i + bit];
            v[i] = shuffled(a, b, low_from);
            v[i + bit] = shuffled(a, b, high_from);
        }
    }
}

/* 16 rows of two columns are the two halves of 16 words */
INLINE words pair(halves even, halves odd) {
    return __builtin_convertvector(even, words) | (__builtin_convertvector(odd, words) << 16);
}

INLINE floats of_pair(words pair, int odd) {
    return (floats)(odd ? pair & 0xffff0000 : pair << 16);
}

INLINE void load_rows(words v[LANES], const bf16 *x, int64_t stride, int64_t rows,
                      int64_t columns) {
    for (int row = 0; row < LANES; row++) {
        v[row] = (words){};
        if (row < rows) memcpy(v + row, x + row * stride, columns * sizeof(bf16));
    }
    turn(v);
}

INLINE void store_rows(words v[LANES], bf16 *y, int64_t stride, int64_t rows,
                       int64_t columns) {
    turn(v);
    for (int row = 0; row < rows; row++) memcpy(y + row * stride, v + row, columns * sizeof(bf16));
}

/* hidden, as rows, of a tile; `rows` and `columns` are constants where the tile is whole */
INLINE void forward_tile(const bf16 *gate, const bf16 *up, bf16 *hidden, shape of, int64_t rows,
                         int64_t columns) {
    words v[2][LANES] = {};
#pragma GCC unroll 1
    for (int c = 0; c < columns; c += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            halves h[2] = {};
            int64_t count = in_half(rows, half);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                if (c + odd >= columns) continue;
                int64_t at = (c + odd) * of.rows + half * LANES;
                if (half == 0) {
                    __builtin_prefetch(gate + at + AHEAD * of.rows);
                    __builtin_prefetch(up + at + AHEAD * of.rows);
                }
                floats g = load(gate + at, count);
                h[odd] = narrow(g * sigmoid(g) * load(up + at, count));
            }
            v[half][c / 2] = pair(h[0], h[1]);
        }
    for (int half = 0; half < 2; half++)
        store_rows(v[half], hidden + half * LANES * of.size, of.size, in_half(rows, half), columns);
}

/* Where the backward of some rows of an expert reads and writes. Turned are gate_up, hidden and
   d_turned; grad and d_gate_up, which holds the same as d_turned, are rows. */
typedef struct {
    const bf16 *grad, *gate_up;
    bf16 *hidden, *d_gate_up, *d_turned;
} places;

INLINE void fetch_columns(places p, int64_t gate, int64_t up) {
    __builtin_prefetch(p.gate_up + gate);
    __builtin_prefetch(p.gate_up + up);
    __builtin_prefetch(p.hidden + gate, 1);
    __builtin_prefetch(p.d_turned + gate, 1);
    __builtin_prefetch(p.d_turned + up, 1);
}

INLINE void fetch_rows(places p, shape of, int64_t at, int64_t rows) {
    for (int row = 0; row < rows; row++) {
        __builtin_prefetch(p.grad + row * of.size + at);
        __builtin_prefetch(p.d_gate_up + 2 * row * of.size + at, 1);
        __builtin_prefetch(p.d_gate_up + (2 * row + 1) * of.size + at, 1);
    }
}

/* the backward of a tile from column `at` on; adds the rows' terms of d_weight to `total` */
INLINE void backward_tile(places p, shape of, int64_t at, int64_t rows, int64_t columns,
                          const floats weight[2], floats total[2]) {
    words grad[2][LANES], d_gate[2][LANES] = {}, d_up[2][LANES] = {};
    fetch_rows(p, of, at + 2 * COLUMNS, rows);
    for (int half = 0; half < 2; half++)
        load_rows(grad[half], p.grad + half * LANES * of.size + at, of.size, in_half(rows, half),
                  columns);
#pragma GCC unroll 1
    for (int c = 0; c < columns; c += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            halves dg[2] = {}, du[2] = {};
            int64_t count = in_half(rows, half), bytes = count * sizeof(bf16);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                if (c + odd >= columns) continue;
                int64_t gate = (at + c + odd) * of.rows + half * LANES;
                int64_t up = gate + of.size * of.rows, ahead = AHEAD * of.rows;
                if (half == 0) fetch_columns(p, gate + ahead, up + ahead);
                floats d = of_pair(grad[half][c / 2], odd), dw = d * weight[half];
                floats g = load(p.gate_up + gate, count), u = load(p.gate_up + up, count);
                floats s = sigmoid(g), silu = g * s, act = silu * u;
                total[half] += d * act;
                store(p.hidden + gate, weight[half] * act, count);
                dg[odd] = narrow(dw * u * slope(s, silu));
                du[odd] = narrow(dw * silu);
                memcpy(p.d_turned + gate, dg + odd, bytes);
                memcpy(p.d_turned + up, du + odd, bytes);
            }
            d_gate[half][c / 2] = pair(dg[0], dg[1]);
            d_up[half][c / 2] = pair(du[0], du[1]);
        }
    for (int half = 0; half < 2; half++) {
        bf16 *out = p.d_gate_up + 2 * half * LANES * of.size + at;
        store_rows(d_gate[half], out, 2 * of.size, in_half(rows, half), columns);
        store_rows(d_up[half], out + of.size, 2 * of.size, in_half(rows, half), columns);
    }
}

/* hidden of at most ROWS rows */
static void forward_rows(const bf16 *gate, bf16 *hidden, shape of, int64_t rows) {
    for (int64_t at = 0; at < of.size; at += COLUMNS) {
        const bf16 *own = gate + at * of.rows, *up = own + of.size * of.rows;
        int64_t columns = least(of.size - at, COLUMNS);
        if (rows == ROWS && columns == COLUMNS)
            forward_tile(own, up, hidden + at, of, ROWS, COLUMNS);
        else
            forward_tile(own, up, hidden + at, of, rows, columns);
    }
}

/* the backward of at most ROWS rows */
static void backward_rows(places p, shape of, int64_t rows, const float *weight, float *d_weight) {
    floats total[2] = {}, weights[2] = {};
    memcpy(weights, weight, rows * sizeof(float));
    for (int64_t at = 0; at < of.size; at += COLUMNS) {
        int64_t columns = least(of.size - at, COLUMNS);
        if (rows == ROWS && columns == COLUMNS)
            backward_tile(p, of, at, ROWS, COLUMNS, weights, total);
        else
            backward_tile(p, of, at, rows, columns, weights, total);
    }
    memcpy(d_weight, total, rows * sizeof(float));
}

/* hidden = silu(gate) * up as rows, gate_up turned; counts: rows of each expert */
void moe_tp_turned_swiglu(const bf16 *gate_up, bf16 *hidden, const int64_t *counts, int64_t experts,
                          int64_t size, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t next = 0, own = omp_get_thread_num(), start = 0;
        for (int64_t expert = 0; expert < experts; start += counts[expert++]) {
            shape of = {counts[expert], size};
            for (int64_t row = 0; row < of.rows; row += ROWS) {
                if (next++ != own) continue;
                own += omp_get_num_threads();
                forward_rows(gate_up + 2 * start * size + row, hidden + (start + row) * size, of,
                             least(of.rows - row, ROWS));
            }
        }
    }
}

/* Backward of weight * silu(gate) * up. Turned are gate_up, hidden (the value) and d_turned;
   d_gate_up has the same as d_turned, as rows. */
void moe_tp_turned_swiglu_backward(const bf16 *grad, const bf16 *gate_up, const float *weight,
                                   bf16 *hidden, bf16 *d_gate_up, bf16 *d_turned, float *d_weight,
                                   const int64_t *counts, int64_t experts, int64_t size,
                                   int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t next = 0, own = omp_get_thread_num(), start = 0;
        for (int64_t expert = 0; expert < experts; start += counts[expert++]) {
            shape of = {counts[expert], size};
            for (int64_t row = 0; row < of.rows; row += ROWS) {
                if (next++ != own) continue;
                own += omp_get_num_threads();
                int64_t first = start + row, chunk = start * size;
                places p = {grad + first * size, gate_up + 2 * chunk + row, hidden + chunk + row,
                            d_gate_up + 2 * first * size, d_turned + 2 * chunk + row};
                backward_rows(p, of, least(of.rows - row, ROWS), weight + first, d_weight + first);
            }
        }
    }
}
